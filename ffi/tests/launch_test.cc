// What a good call launches.

#include "ffi/launch.h"

#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

namespace ffi = ::xla::ffi;

// The log's line of the only launch of a call that must succeed.
std::string OnlyLaunch(const Invocation& call, int device = 0) {
  CHECK_EQ(call.Execute(device).message, "");
  for (const std::string& line : TakeLog()) {
    if (CountCalls({line}, "cuLaunchKernelEx") == 1) return line;
  }
  CHECK(!"a kernel was launched");
  return "";
}

template <size_t kCount, typename T>
std::vector<uint64_t> List(const T (&numbers)[kCount]) {
  return {numbers, numbers + kCount};
}

TEST(GridBlockAndSharedMemory) {
  const std::string launch = OnlyLaunch(ForwardCall(Add(ForwardSpec("plain"))));
  CHECK_CONTAINS(launch, "\"kernel\": \"plain_kernel\"");
  CHECK_CONTAINS(launch, "\"grid\": [48, 1, 1]");  // ceil(300 / 128) * 8 heads * batch 2
  CHECK_CONTAINS(launch, "\"block\": [384, 1, 1]");
  CHECK_CONTAINS(launch, "\"shared_memory_bytes\": 204800");
  CHECK_CONTAINS(launch, "\"cluster\": null");
  CHECK_CONTAINS(launch, "\"programmatic_launch\": false");
}

TEST(ParametersInOrder) {
  const Invocation call = ForwardCall(Add(ForwardSpec("parameters")));
  const std::string launch = OnlyLaunch(call);
  CHECK_EQ(ParameterAs<int32_t>(launch, 0), 8);
  CHECK_EQ(ParameterAs<FakeTensorMap>(launch, 1).address, call.Address("query"));
  CHECK_EQ(ParameterAs<FakeTensorMap>(launch, 2).address, call.Address("key"));
  CHECK_EQ(ParameterAs<uint64_t>(launch, 3), call.Address("output"));
  CHECK_EQ(ParameterAs<float>(launch, 4), 0.125f);
  CHECK_EQ(ParameterAs<uint64_t>(launch, 5), call.Address("lse"));
  CHECK_EQ(ParameterAs<int32_t>(launch, 6), -7);
}

TEST(TensorMapOfRankFour) {
  const std::string launch = OnlyLaunch(ForwardCall(Add(ForwardSpec("map"))));
  const auto map = ParameterAs<FakeTensorMap>(launch, 2);  // key: [2, 200, 4, 64] bf16
  CHECK_EQ(map.magic, kFakeTensorMapMagic);
  CHECK((List(map.extents) == std::vector<uint64_t>{64, 200, 4, 2}));
  CHECK((List(map.strides) == std::vector<uint64_t>{4 * 64 * 2, 64 * 2, 200 * 4 * 64 * 2}));
  CHECK((List(map.box) == std::vector<uint64_t>{64, 96, 1, 1}));
  CHECK((List(map.element_strides) == std::vector<uint64_t>{1, 1, 1, 1}));
  CHECK_EQ(map.data_type, 9);           // BFLOAT16
  CHECK_EQ(map.interleave, 0);          // NONE
  CHECK_EQ(map.swizzle, 3);             // 128B
  CHECK_EQ(map.l2_promotion, 3);        // L2_256B
  CHECK_EQ(map.out_of_bounds_fill, 0);  // zeros
}

TEST(LeadingDimensionsAreOneBatch) {
  const std::string name = Add(MakeSpec(
      "leading", {TensorMapOf("query", "f32", 16, 64, 64), Int32("batch"), Int32("query_length")}));
  const auto launch_with = [&](std::vector<int64_t> shape) {
    Invocation call;
    call.Operand("query", ffi::F32, std::move(shape)).Set("kernels", name);
    return OnlyLaunch(call);
  };
  const std::string none = launch_with({40, 2, 16});
  CHECK((List(ParameterAs<FakeTensorMap>(none, 0).extents) == std::vector<uint64_t>{16, 40, 2, 1}));
  CHECK_EQ(ParameterAs<int32_t>(none, 1), 1);
  CHECK_EQ(ParameterAs<FakeTensorMap>(none, 0).swizzle, 2);  // 64B

  const std::string several = launch_with({3, 5, 7, 40, 2, 16});
  CHECK((List(ParameterAs<FakeTensorMap>(several, 0).extents) ==
         std::vector<uint64_t>{16, 40, 2, 105}));
  CHECK_EQ(ParameterAs<int32_t>(several, 1), 105);
  CHECK_EQ(ParameterAs<int32_t>(several, 2), 40);
  CHECK_CONTAINS(several, "\"grid\": [105, 1, 1]");
}

TEST(ValuesOfTheShapes) {
  const std::string name = Add(MakeSpec(
      "values", {Int32("batch"), Int32("query_length"), Int32("query_heads"), Int32("head_dim"),
                 Int32("key_length"), Int32("key_heads"), Int32("value_head_dim")}));
  Invocation call;
  call.Operand("query", ffi::F16, {2, 3, 11, 8, 64})
      .Operand("key", ffi::F16, {2, 3, 13, 4, 64})
      .Operand("value", ffi::F16, {2, 3, 13, 4, 32})
      .Set("kernels", name);
  const std::string launch = OnlyLaunch(call);
  const int32_t expected[] = {6, 11, 8, 64, 13, 4, 32};
  for (size_t i = 0; i < 7; ++i) CHECK_EQ(ParameterAs<int32_t>(launch, i), expected[i]);
}

TEST(ValuesOfABiasAndAMask) {
  const std::string name = Add(MakeSpec(
      "dense", {Int32("bias_axes"), Int32("mask_axes"), Int32("bias_batch"), Int32("bias_heads"),
                Int32("bias_queries"), Int32("bias_keys"), Int32("padded_query_length")}));
  Invocation call;
  call.Operand("query", ffi::F16, {2, 3, 11, 8, 64})
      .Operand("key", ffi::F16, {2, 3, 13, 4, 64})
      .Operand("bias", ffi::F32, {1, 1, 8, 1, 13})
      .Operand("mask", ffi::PRED, {6, 1, 11, 1})
      .Operand("lse_log2", ffi::F32, {2, 3, 8, 64})
      .Set("kernels", name);
  const std::string launch = OnlyLaunch(call);
  const int32_t expected[] = {0b1010, 0b0101, 1, 8, 1, 13, 64};
  for (size_t i = 0; i < 7; ++i) CHECK_EQ(ParameterAs<int32_t>(launch, i), expected[i]);

  const std::string without = Add(MakeSpec("no_dense", {Int32("bias_axes"), Int32("mask_axes")}));
  const std::string plain = OnlyLaunch(ForwardCall(without));
  CHECK_EQ(ParameterAs<int32_t>(plain, 0), 0);
  CHECK_EQ(ParameterAs<int32_t>(plain, 1), 0);
}

TEST(ValuesOfAttributes) {
  const std::string name =
      Add(MakeSpec("attributes", {Int32("small"), Int32("wide"), Float32("cap"), Int32("least")}));
  Invocation call = ForwardCall(name);
  call.Set("small", int32_t{-1})
      .Set("wide", int64_t{2147483647})
      .Set("cap", 50.0f)
      .Set("least", int64_t{-2147483648});
  const std::string launch = OnlyLaunch(call);
  CHECK_EQ(ParameterAs<int32_t>(launch, 0), -1);
  CHECK_EQ(ParameterAs<int32_t>(launch, 1), 2147483647);
  CHECK_EQ(ParameterAs<float>(launch, 2), 50.0f);
  CHECK_EQ(ParameterAs<int32_t>(launch, 3), INT32_MIN);
}

TEST(ClusterRoundsTheGridUp) {
  KernelSpec spec = ForwardSpec("cluster");
  spec.cluster = {2, 1, 1};
  spec.programmatic_launch = true;
  spec.grid = {{"query_length", 100}, {"batch_size", 1}};
  Invocation call = ForwardCall(Add(spec));
  const std::string launch = OnlyLaunch(call.Set("batch_size", int32_t{5}));
  CHECK_CONTAINS(launch, "\"grid\": [16, 1, 1]");  // 3 * 5, to a multiple of 2
  CHECK_CONTAINS(launch, "\"cluster\": [2, 1, 1]");
  CHECK_CONTAINS(launch, "\"programmatic_launch\": true");
}

// ForwardCall has 300 queries and a grid of 48 blocks; device d has 13 + d multiprocessors.
std::string LaunchUpTo(int64_t resident_up_to, uint32_t cluster, int device) {
  KernelSpec spec =
      ForwardSpec(Concat("up_to_", resident_up_to, "_cluster_", cluster, "_device_", device));
  spec.resident_up_to = resident_up_to;
  spec.cluster = {cluster, 1, 1};
  return OnlyLaunch(ForwardCall(Add(spec)), device);
}

TEST(UpToALengthTheGridIsNoLargerThanTheDevice) {
  CHECK_CONTAINS(LaunchUpTo(300, 1, 0), "\"grid\": [13, 1, 1]");
  CHECK_CONTAINS(LaunchUpTo(2147483647, 1, 7), "\"grid\": [20, 1, 1]");
  CHECK_CONTAINS(LaunchUpTo(299, 1, 0), "\"grid\": [48, 1, 1]");
  CHECK_CONTAINS(LaunchUpTo(0, 1, 0), "\"grid\": [48, 1, 1]");
}

TEST(EachDeviceHasItsOwnNumberOfMultiprocessors) {
  KernelSpec spec = ForwardSpec("resident_on_two");
  spec.resident_up_to = 512;
  const Invocation call = ForwardCall(Add(spec));
  for (const int device : {2, 5, 2}) {
    CHECK_CONTAINS(OnlyLaunch(call, device), Concat("\"grid\": [", 13 + device, ", 1, 1]"));
  }
}

TEST(AGridThatTheDeviceHoldsIsKept) {
  KernelSpec spec = ForwardSpec("resident_and_small");
  spec.grid = {{"query_length", 128}, {"batch", 1}};
  spec.resident_up_to = 512;
  CHECK_CONTAINS(OnlyLaunch(ForwardCall(Add(spec))), "\"grid\": [6, 1, 1]");
}

TEST(AResidentGridIsWholeClustersAndAtLeastOne) {
  CHECK_CONTAINS(LaunchUpTo(512, 2, 0), "\"grid\": [12, 1, 1]");
  CHECK_CONTAINS(LaunchUpTo(512, 2, 1), "\"grid\": [14, 1, 1]");
  CHECK_CONTAINS(LaunchUpTo(512, 16, 0), "\"grid\": [16, 1, 1]");
}

TEST(ALargeClusterAsksForIt) {
  KernelSpec spec = ForwardSpec("large_cluster");
  spec.cluster = {16, 1, 1};
  const Invocation call = ForwardCall(Add(spec));
  CHECK_EQ(call.Prepare().message, "");
  CHECK_CONTAINS(Concat(TakeLog()[5]), "\"attribute\": 14, \"value\": 1");
  CHECK_CONTAINS(OnlyLaunch(call), "\"cluster\": [16, 1, 1]");
}

TEST(KernelsOfACallAreLaunchedInOrder) {
  const std::string first = Add(ForwardSpec("first"));
  const std::string second = Add(ForwardSpec("second"));
  const Invocation call = ForwardCall(second + "," + first + "," + second);
  CHECK_EQ(call.Prepare().message, "");
  TakeLog();
  CHECK_EQ(call.Execute().message, "");
  const std::vector<std::string> log = TakeLog();
  CHECK_EQ(log.size(), size_t{3});
  CHECK_CONTAINS(log[0], "second_kernel");
  CHECK_CONTAINS(log[1], "first_kernel");
  CHECK_CONTAINS(log[2], "second_kernel");
}

TEST(PrepareLoadsAndExecuteOnlyLaunches) {
  KernelSpec spec = ForwardSpec("stages");
  spec.resident_up_to = 512;
  const Invocation call = ForwardCall(Add(spec));
  TakeLog();
  CHECK_EQ(call.Prepare().message, "");
  const std::vector<std::string> prepared = TakeLog();
  CHECK_EQ(prepared.size(), size_t{6});
  CHECK_EQ(CountCalls(prepared, "cuDeviceGetAttribute"), size_t{3});
  CHECK_CONTAINS(prepared[2], "\"attribute\": 16, \"device\": 0");
  CHECK_CONTAINS(prepared[3], "cuLibraryLoadData");
  CHECK_CONTAINS(prepared[4], "\"attribute\": 8, \"value\": 204800, \"device\": 0");
  CHECK_CONTAINS(prepared[5], "\"call\": \"cuKernelGetFunction\"");

  CHECK_EQ(call.Prepare().message, "");
  CHECK_EQ(call.Execute().message, "");
  CHECK_EQ(call.Execute().message, "");
  const std::vector<std::string> executed = TakeLog();
  CHECK_EQ(executed.size(), size_t{2});
  CHECK_EQ(CountCalls(executed, "cuLaunchKernelEx"), size_t{2});
}

TEST(PrepareGivesBackTheContextThatItTakes) {
  const Invocation call =
      ForwardCall(Add(ForwardSpec("context_1")) + "," + Add(ForwardSpec("context_2")));
  TakeLog();
  CHECK_EQ(call.Prepare(6).message, "");
  for (const std::string& line : TakeLog()) {
    if (CountCalls({line}, "cuKernelGetFunction") == 0) continue;
    CHECK_CONTAINS(line, "\"device\": 6, \"context_depth\": 1, \"context_references\": 1}");
  }
}

TEST(EachDeviceIsPreparedOnceAndTheCubinLoadedOnce) {
  const Invocation call = ForwardCall(Add(ForwardSpec("devices")));
  TakeLog();
  for (const int device : {3, 5, 3}) CHECK_EQ(call.Execute(device).message, "");
  const std::vector<std::string> log = TakeLog();
  CHECK_EQ(CountCalls(log, "cuLibraryLoadData"), size_t{1});
  CHECK_EQ(CountCalls(log, "cuKernelGetFunction"), size_t{2});
  CHECK_EQ(CountCalls(log, "cuLaunchKernelEx"), size_t{3});
  CHECK_CONTAINS(log.back(), "\"device\": 3");
}

TEST(AnEmptyBatchLaunchesNothing) {
  const std::string name = Add(ForwardSpec("empty_batch"));
  Invocation call;
  call.Operand("query", ffi::BF16, {2, 0, 300, 8, 64})
      .Operand("key", ffi::BF16, {2, 0, 200, 4, 64})
      .Operand("value", ffi::BF16, {2, 0, 200, 4, 64})
      .Result("output", ffi::BF16, {2, 0, 300, 8, 64})
      .Set("kernels", name);
  TakeLog();
  CHECK_EQ(call.Execute().message, "");
  CHECK(TakeLog().empty());
}

TEST(OffsetsBeyond32Bits) {
  const std::string name = Add(MakeSpec("wide", {TensorMapOf("query", "bf16", 64, 64, 128)}));
  Invocation call;
  call.Operand("query", ffi::BF16, {3, 1 << 20, 64, 128}).Set("kernels", name);
  const auto map = ParameterAs<FakeTensorMap>(OnlyLaunch(call), 0);
  CHECK_EQ(map.strides[2], uint64_t{1} << 34);
}

}  // namespace
}  // namespace jax_flash::testing
