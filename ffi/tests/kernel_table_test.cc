#include "ffi/kernel_table.h"

#include <functional>

#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

// What Add says of a good kernel changed by `change`.
std::string Refusal(const std::function<void(KernelSpec&)>& change) {
  KernelTable table;
  KernelSpec spec = ForwardSpec("refused");
  change(spec);
  return table.Add(spec);
}

TEST(AddsAndFinds) {
  KernelTable table;
  CHECK(table.Find("sm_90a/a") == nullptr);
  const KernelSpec b = ForwardSpec("b");
  const KernelSpec a = ForwardSpec("a");
  CHECK_EQ(table.Add(b), "");
  CHECK_EQ(table.Add(a), "");
  CHECK(table.Find("sm_90a/a") != nullptr && table.Find("sm_90a/a")->spec() == a);
  CHECK(table.Find("sm_90a/b") != nullptr && table.Find("sm_90a/b")->spec() == b);
  CHECK(table.Find("sm_90a/") == nullptr);
  CHECK((table.Names() == std::vector<std::string>{"sm_90a/a", "sm_90a/b"}));
}

TEST(FindsEachOfMoreKernelsThanBuckets) {
  KernelTable table;
  KernelSpec spec = ForwardSpec("many");
  for (int i = 0; i < 3000; ++i) {
    spec.name = Concat("sm_90a/", i);
    CHECK_EQ(table.Add(spec), "");
  }
  CHECK_EQ(table.Names().size(), size_t{3000});
  for (int i = 0; i < 3000; ++i) {
    const std::string name = Concat("sm_90a/", i);
    CHECK(table.Find(name) != nullptr && table.Find(name)->spec().name == name);
  }
}

TEST(AnEqualKernelMayBeAddedAgain) {
  KernelTable table;
  const KernelSpec spec = ForwardSpec("again");
  CHECK_EQ(table.Add(spec), "");
  Kernel* kernel = table.Find(spec.name);
  CHECK_EQ(table.Add(spec), "");
  CHECK(table.Find(spec.name) == kernel);
  CHECK_EQ(table.Names().size(), size_t{1});
}

TEST(ADifferentKernelOfTheSameNameIsRefused) {
  const std::vector<std::function<void(KernelSpec&)>> changes = {
      [](KernelSpec& spec) { spec.path += "x"; },
      [](KernelSpec& spec) { spec.symbol += "x"; },
      [](KernelSpec& spec) { spec.sha256[0] = spec.sha256[0] == '0' ? '1' : '0'; },
      [](KernelSpec& spec) { spec.threads = 128; },
      [](KernelSpec& spec) { spec.cluster[0] = 2; },
      [](KernelSpec& spec) { spec.shared_memory_bytes = 1024; },
      [](KernelSpec& spec) { spec.programmatic_launch = true; },
      [](KernelSpec& spec) { spec.arguments.pop_back(); },
      [](KernelSpec& spec) { spec.arguments[1].box_rows = 64; },
      [](KernelSpec& spec) { spec.arguments[3].dtype = FindDtype("f16"); },
      [](KernelSpec& spec) { spec.grid[0].divisor = 64; },
      [](KernelSpec& spec) { spec.grid[0].value_name = "key_length"; },
      [](KernelSpec& spec) { spec.resident_up_to = 512; },
  };
  KernelTable table;
  const KernelSpec spec = ForwardSpec("changed");
  CHECK_EQ(table.Add(spec), "");
  for (const auto& change : changes) {
    KernelSpec changed = spec;
    change(changed);
    CHECK_CONTAINS(table.Add(changed), "kernel sm_90a/changed was already added");
  }
  CHECK(table.Find(spec.name)->spec() == spec);
}

TEST(MalformedKernelsAreRefused) {
  for (const char* name : {"forward", "/forward", "sm_90a/", "sm_90a/a,b"}) {
    CHECK_CONTAINS(Refusal([&](KernelSpec& spec) { spec.name = name; }), "<arch>/<variant>");
  }
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.path = ""; }), "path is empty");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.symbol = ""; }), "symbol is empty");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.sha256.pop_back(); }), "64 lower-case");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.sha256[3] = 'G'; }), "64 lower-case");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.threads = 0; }), "threads 0");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.threads = 1025; }), "threads 1025");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.cluster[0] = 0; }), "cluster (0, 1, 1)");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.cluster[0] = 17; }), "cluster (17, 1, 1)");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.cluster[1] = 2; }), "cluster (1, 2, 1)");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.grid.clear(); }), "no factors");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.grid[0].divisor = 0; }), "positive divisor");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.grid[0].value_name = ""; }), "needs a name");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.resident_up_to = -1; }), "resident_up_to -1");
}

TEST(MalformedArgumentsAreRefused) {
  const auto with = [](KernelArgument argument) {
    return Refusal([&](KernelSpec& spec) { spec.arguments = {argument}; });
  };
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) { spec.arguments.clear(); }), "0 arguments");
  CHECK_CONTAINS(
      Refusal([](KernelSpec& spec) { spec.arguments.assign(kMaxArguments + 1, Int32("batch")); }),
      "65 arguments");
  CHECK_CONTAINS(Refusal([](KernelSpec& spec) {
                   spec.arguments.assign(33, TensorMapOf("query", "bf16", 64, 64, 128));
                 }),
                 "arguments take 4224 bytes; at most 4096");
  CHECK_CONTAINS(with(Int32("")), "empty name");
  CHECK_CONTAINS(with(PointerTo("query", "bf17")), "no known dtype; known: bf16, f16");
  CHECK_CONTAINS(with(TensorMapOf("query", "bf16", 64, 257, 128)), "box 64 x 257");
  CHECK_CONTAINS(with(TensorMapOf("query", "bf16", 0, 64, 128)), "box 0 x 64");
  CHECK_CONTAINS(with(TensorMapOf("query", "bf16", 64, 64, 96)), "swizzle_bytes 96");
  CHECK_CONTAINS(with(TensorMapOf("query", "bf16", 65, 64, 0)), "has 130 bytes");
  CHECK_CONTAINS(with(TensorMapOf("query", "bf16", 128, 64, 128)), "has 256 bytes; must fit");
  CHECK_EQ(with(TensorMapOf("query", "bf16", 128, 64, 0)), "");
}

TEST(ParametersAreNaturallyAligned) {
  const std::vector<size_t> offsets =
      ParameterOffsets({Int32("a"), PointerTo("b", "f32"), Float32("c"),
                        TensorMapOf("d", "bf16", 64, 64, 128), Int32("e"), Int32("f")});
  CHECK((offsets == std::vector<size_t>{0, 8, 16, 64, 192, 196, 200}));
}

}  // namespace
}  // namespace jax_flash::testing
