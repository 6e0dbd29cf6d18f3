// On a machine without a driver: run with JAX_FLASH_LIBCUDA naming a file that does not exist.

#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

TEST(CallsFailWithTheReason) {
  const Invocation call = ForwardCall(Add(ForwardSpec("forward")));
  for (const bool prepare : {true, false}) {
    const Outcome outcome = prepare ? call.Prepare() : call.Execute();
    CHECK_EQ(outcome.code, XLA_FFI_Error_Code_FAILED_PRECONDITION);
    CHECK_CONTAINS(outcome.message, "jax_flash: cannot open the CUDA driver library");
    CHECK_CONTAINS(outcome.message, "[kernel sm_90a/forward] (kernel.cc:");
  }
}

}  // namespace
}  // namespace jax_flash::testing
