#include "ffi/arch.h"

#include "ffi/tests/check.h"

namespace jax_flash::testing {
namespace {

bool RunsOn(const char* arch, int major, int minor) {
  const std::optional<Arch> parsed = Arch::Parse(arch);
  return parsed && parsed->RunsOn(major, minor);
}

TEST(ArchSpecificRunsOnExactlyItsOwn) {
  CHECK(RunsOn("sm_90a", 9, 0));
  CHECK(!RunsOn("sm_90a", 10, 0));
  CHECK(RunsOn("sm_100a", 10, 0));
  CHECK(!RunsOn("sm_100a", 10, 3));
  CHECK(!RunsOn("sm_103a", 10, 0));
  CHECK(!RunsOn("sm_100a", 1, 0));
}

TEST(OthersRunOnLaterOnesOfTheSameMajor) {
  CHECK(RunsOn("sm_100f", 10, 3));
  CHECK(!RunsOn("sm_103f", 10, 0));
  CHECK(RunsOn("sm_80", 8, 6));
  CHECK(!RunsOn("sm_80", 9, 0));
}

TEST(RefusesOtherNames) {
  for (const char* name : {"", "sm_", "sm_9", "sm_90b", "sm_a", "90a", "sm_9x", "sm_10000"}) {
    CHECK(!Arch::Parse(name));
  }
}

}  // namespace
}  // namespace jax_flash::testing
