// What is wrong with a bad call, and how it is said.

#include "ffi/call.h"

#include "ffi/kernel.h"
#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

namespace ffi = ::xla::ffi;

// Checks that the call is refused as INVALID_ARGUMENT and launches nothing; gives the text.
std::string Refusal(const Invocation& call) {
  TakeLog();
  const Outcome outcome = call.Execute();
  CHECK_EQ(outcome.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  CHECK_CONTAINS(outcome.message, "jax_flash: ");
  CHECK_EQ(CountCalls(TakeLog(), "cuLaunchKernelEx"), size_t{0});
  return outcome.message;
}

const std::string& Forward() {
  static const std::string name = Add(ForwardSpec("forward"));
  return name;
}

std::string RefusalWith(const std::string& attribute, Attribute value) {
  return Refusal(ForwardCall(Forward()).Set(attribute, std::move(value)));
}

TEST(Version) {
  CHECK_CONTAINS(RefusalWith("version", int32_t{2}), "call version 2; this jax_flash extension");
  CHECK_CONTAINS(RefusalWith("version", int64_t{1}), "attribute version must be an int32");
  CHECK_CONTAINS(Refusal(ForwardCall(Forward()).Unset("version")), "attribute version");
  CHECK_EQ(ForwardCall(Forward()).Set("version", int32_t{2}).Prepare().code,
           XLA_FFI_Error_Code_INVALID_ARGUMENT);
}

TEST(Kernels) {
  CHECK_CONTAINS(RefusalWith("kernels", std::string()), "names no kernel");
  CHECK_CONTAINS(RefusalWith("kernels", 1.0f), "attribute kernels must be a string");
  for (const bool prepare : {true, false}) {
    const Invocation call = ForwardCall("sm_90a/unknown");
    const Outcome outcome = prepare ? call.Prepare() : call.Execute();
    CHECK_EQ(outcome.code, XLA_FFI_Error_Code_NOT_FOUND);
    CHECK_CONTAINS(outcome.message, "no kernel \"sm_90a/unknown\" in this build");
    CHECK_CONTAINS(outcome.message, "(handlers.cc:");
  }
}

TEST(Names) {
  CHECK_CONTAINS(RefusalWith("operands", std::string("query,key")),
                 "3 operands and 2 results, but the attributes name 2 (query,key) and 2");
  CHECK_CONTAINS(RefusalWith("results", std::string("")), "name 3 (query,key,value) and 0 ()");
  CHECK_CONTAINS(RefusalWith("operands", std::string("query,key,key")), "are named key");
  CHECK_CONTAINS(RefusalWith("results", std::string("query,lse")), "are named query");
  CHECK_CONTAINS(RefusalWith("operands", std::string("query,,value")), "empty name");
  CHECK_CONTAINS(RefusalWith("operands", int32_t{3}), "attribute operands must be a string");
}

TEST(Attributes) {
  CHECK_CONTAINS(RefusalWith("scale", 0.125),
                 "attribute scale must be a scalar of type int32, int64 or float32");
  CHECK_CONTAINS(RefusalWith("mode", std::string("fast")), "attribute mode must be a scalar");
  for (const char* name : {"batch", "query_length", "query_heads", "head_dim", "key_length",
                           "key_heads", "value_head_dim"}) {
    CHECK_CONTAINS(RefusalWith(name, int32_t{1}), Concat("attribute ", name, " has the name of"));
  }
}

Invocation CallOf(std::vector<int64_t> query, std::vector<int64_t> key,
                  std::vector<int64_t> value) {
  Invocation call;
  call.Operand("query", ffi::BF16, std::move(query))
      .Operand("key", ffi::BF16, std::move(key))
      .Operand("value", ffi::BF16, std::move(value))
      .Set("kernels", Forward());
  return call;
}

TEST(Shapes) {
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {3, 9, 8, 64}, {3, 9, 8, 64})),
                 "query [2, 9, 8, 64] and key [3, 9, 8, 64] must have equal dimensions but for the "
                 "last 3");
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {9, 8, 64}, {9, 8, 64})), "must have equal");
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {2, 9, 8, 32}, {2, 9, 8, 64})),
                 "must have the same head dimension");
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {2, 9, 8, 64}, {2, 8, 8, 64})),
                 "key [2, 9, 8, 64] and value [2, 8, 8, 64] must have equal dimensions but for the "
                 "last 1");
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {2, 9, 8, 64}, {2, 9, 4, 64})), "key [2, 9, 8, 64]");
  CHECK_CONTAINS(Refusal(CallOf({8, 64}, {9, 8, 64}, {9, 8, 64})),
                 "query has shape [8, 64]; must have at least 3 dimensions");
}

TEST(BiasAndMask) {
  const auto refusal_of = [](const char* name, ffi::DataType type, std::vector<int64_t> shape) {
    Invocation call = CallOf({2, 3, 9, 8, 64}, {2, 3, 7, 8, 64}, {2, 3, 7, 8, 64});
    return Refusal(call.Operand(name, type, std::move(shape)));
  };
  CHECK_CONTAINS(refusal_of("bias", ffi::F32, {2, 1, 8, 9, 7}),
                 "bias has shape [2, 1, 8, 9, 7]; batch, heads, queries and keys must each be 1 or "
                 "6, 8, 9 and 7");
  CHECK_CONTAINS(refusal_of("bias", ffi::F32, {6, 4, 9, 7}), "bias has shape [6, 4, 9, 7]; batch");
  CHECK_CONTAINS(refusal_of("mask", ffi::PRED, {1, 1, 8, 7}), "mask has shape [1, 1, 8, 7]; batch");
  CHECK_CONTAINS(refusal_of("mask", ffi::PRED, {1, 1, 1, 9}), "mask has shape [1, 1, 1, 9]; batch");
  CHECK_CONTAINS(refusal_of("mask", ffi::PRED, {9, 7}),
                 "mask has shape [9, 7]; must have at least 3 dimensions: heads, queries, keys");
}

TEST(EmptyOperands) {
  CHECK_CONTAINS(Refusal(CallOf({2, 0, 8, 64}, {2, 9, 8, 64}, {2, 9, 8, 64})),
                 "empty operand or result query [2, 0, 8, 64]");
  CHECK_CONTAINS(Refusal(CallOf({2, 9, 8, 64}, {2, 0, 8, 64}, {2, 0, 8, 64})), "key [2, 0, 8, 64]");
  Invocation call = ForwardCall(Forward());
  CHECK_CONTAINS(Refusal(call.Result("workspace", ffi::F32, {0})), "workspace [0]");
}

TEST(WhatAKernelAsksFor) {
  CHECK_CONTAINS(Refusal(ForwardCall(Forward()).Unset("scale")),
                 "the call has no value scale; it has batch, query_length, query_heads, head_dim, "
                 "key_length, key_heads, value_head_dim, bias_axes, mask_axes, window "
                 "[kernel sm_90a/forward]");
  CHECK_CONTAINS(RefusalWith("scale", int32_t{1}), "value must be a float32: scale");
  CHECK_CONTAINS(RefusalWith("window", 1.0f), "value must be an integer: window");
  CHECK_CONTAINS(RefusalWith("window", int64_t{2147483648}),
                 "value window = 2147483648 does not fit the int32");
  CHECK_CONTAINS(RefusalWith("results", std::string("output,log_sum_exp")),
                 "no operand or result lse; it has query, key, value, output, log_sum_exp");
  const std::string float_output =
      Add(MakeSpec("float_output", {PointerTo("output", "f32"), PointerTo("lse", "f32")}));
  CHECK_CONTAINS(Refusal(ForwardCall(float_output)),
                 "output is bf16; the kernel takes f32 [kernel sm_90a/float_output]");
}

TEST(Grids) {
  const auto refusal_of = [](const char* variant, std::vector<GridFactor> grid,
                             std::array<uint32_t, 3> cluster = {1, 1, 1}) {
    KernelSpec spec = MakeSpec(variant, {Int32("batch")});
    spec.grid = std::move(grid);
    spec.cluster = cluster;
    Invocation call = ForwardCall(Add(spec));
    call.Set("large", int64_t{1} << 40).Set("limit", int32_t{2147483647}).Set("none", int32_t{0});
    call.Set("negative", int32_t{-1});
    return Refusal(call);
  };
  CHECK_CONTAINS(refusal_of("grid_large", {{"large", 1}}), "ceil(large = 1099511627776 / 1)");
  CHECK_CONTAINS(refusal_of("grid_product", {{"limit", 2}, {"batch", 1}, {"batch", 1}}),
                 "must be in [1, 2^31)");
  CHECK_CONTAINS(refusal_of("grid_none", {{"none", 1}}), "must be in [1, 2^31)");
  CHECK_CONTAINS(refusal_of("grid_negative", {{"negative", 1}}), "must be in [1, 2^31)");
  CHECK_CONTAINS(refusal_of("grid_cluster", {{"limit", 1}}, {2, 1, 1}), "grid of 2147483648");
  CHECK_CONTAINS(refusal_of("grid_unknown", {{"tiles", 1}}), "the call has no value tiles");
  CHECK_CONTAINS(refusal_of("grid_float", {{"scale", 1}}), "value must be an integer: scale");
}

TEST(AResidentGridNeedsTheQueryLength) {
  KernelSpec spec = MakeSpec("resident", {Int32("rows")});
  spec.grid = {{"rows", 1}};
  spec.resident_up_to = 1;
  Invocation call;
  call.Result("output", ffi::F32, {4}).Set("kernels", Add(spec)).Set("rows", int32_t{4});
  CHECK_CONTAINS(Refusal(call),
                 "the call has no value query_length; it has rows [kernel sm_90a/resident]");
}

TEST(TensorMaps) {
  const std::string name = Add(MakeSpec("map", {TensorMapOf("query", "bf16", 8, 64, 0)}));
  const auto refusal_of = [&](std::vector<int64_t> shape, uintptr_t address = 0) {
    Invocation call;
    call.Operand("query", ffi::BF16, std::move(shape), address).Set("kernels", name);
    return Refusal(call);
  };
  CHECK_CONTAINS(refusal_of({2, 9, 8, 64}, 0x1008),
                 "tensor map of query bf16[2, 9, 8, 64]: address 4104; must be a multiple of 16 "
                 "[kernel sm_90a/map]");
  CHECK_CONTAINS(refusal_of({2, 9, 8, 12}), "stride in bytes 24; must be a multiple of 16");
  CHECK_CONTAINS(refusal_of({1, int64_t{1} << 32, 1, 8}),
                 "extent 4294967296; must be in [1, 2^32)");
  CHECK_CONTAINS(refusal_of({1, int64_t{1} << 20, 1024, 1024}),
                 "2199023255552; must be below 2^40");
  const std::string flat = Add(MakeSpec("flat", {TensorMapOf("lengths", "s32", 8, 64, 0)}));
  Invocation call = ForwardCall(flat);
  CHECK_CONTAINS(Refusal(call.Operand("lengths", ffi::S32, {4, 8})),
                 "lengths has shape [4, 8]; a tensor map needs at least 3 dimensions");
}

TEST(TooManyBuffersOrValues) {
  Invocation buffers = ForwardCall(Forward());
  for (int i = 0; i < 40; ++i) buffers.Operand(Concat("operand_", i), ffi::F32, {1});
  CHECK_CONTAINS(Refusal(buffers), "more than 32 operands and results");
  Invocation values = ForwardCall(Forward());
  for (int i = 0; i < 40; ++i) values.Set(Concat("value_", i), int32_t{i});
  CHECK_CONTAINS(Refusal(values), "more than 32 values");
}

TEST(ALaterKernelThatCannotBeLaunchedIsNamed) {
  const std::string needs = Add(MakeSpec("needs_tiles", {Int32("tiles")}));
  const Outcome outcome = ForwardCall(Forward() + "," + needs).Execute();
  CHECK_CONTAINS(outcome.message, "[kernel sm_90a/needs_tiles]");
}

TEST(DeviceOrdinal) {
  const Outcome outcome = ForwardCall(Forward()).Prepare(kMaxDevices);
  CHECK_EQ(outcome.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  CHECK_CONTAINS(outcome.message, "device ordinal 64 is not between 0 and 63");
}

}  // namespace
}  // namespace jax_flash::testing
