// On a driver older than 12.4: run with JAX_FLASH_FAKE_MISSING naming the functions new in it.

#include "ffi/driver_api.h"
#include "ffi/sha256.h"
#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

TEST(KernelsRunWithoutTheChecksThatNeedANewerDriver) {
  CHECK(DriverApi::Get().cuKernelGetParamInfo == nullptr);
  CHECK(DriverApi::Get().cuLibraryGetKernelCount == nullptr);
  CHECK(ForwardCall(Add(ForwardSpec("old"))).Execute().ok());

  KernelSpec spec = MakeSpec("unchecked", {Int32("batch")});
  const std::string cubin = "fake cubin\nkernel unchecked_kernel 0:4\nkernel second 0:4\n";
  spec.path = WriteFile("unchecked_other.cubin", cubin);
  spec.sha256 = Sha256Hex(cubin);
  CHECK(ForwardCall(Add(spec)).Execute().ok());
}

}  // namespace
}  // namespace jax_flash::testing
