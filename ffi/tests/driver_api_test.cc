#include "ffi/driver_api.h"

#include <cstdlib>

#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

DriverApi LoadFake() { return DriverApi::Load(std::getenv("JAX_FLASH_LIBCUDA")); }

TEST(ResolvesEveryFunction) {
  const DriverApi api = LoadFake();
  CHECK_EQ(api.error, "");
  CHECK(api.cuLaunchKernelEx != nullptr);
  CHECK(api.cuKernelGetParamInfo != nullptr);
  CHECK(api.cuLibraryGetKernelCount != nullptr);
  int device = -1;
  CHECK(api.cuDeviceGet(&device, 3) == cuda::Result::kSuccess);
  CHECK_EQ(device, 3);
}

TEST(AMissingLibraryIsAnErrorThatNamesIt) {
  const DriverApi api = DriverApi::Load("./no_such_libcuda.so");
  CHECK_CONTAINS(api.error, "cannot open the CUDA driver library ./no_such_libcuda.so");
  CHECK(api.cuLaunchKernelEx == nullptr);
}

TEST(AnotherLibraryIsAnError) {
  CHECK_CONTAINS(DriverApi::Load("libm.so.6").error, "libm.so.6 lacks cuGetProcAddress_v2");
}

TEST(EveryRequiredFunctionIsRequired) {
  for (const char* function :
       {"cuGetErrorName", "cuGetErrorString", "cuDeviceGet", "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent",
        "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode", "cuLibraryLoadData",
        "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction",
        "cuTensorMapEncodeTiled", "cuLaunchKernelEx"}) {
    const ScopedEnvironment missing("JAX_FLASH_FAKE_MISSING", function);
    CHECK_CONTAINS(LoadFake().error, std::string("lacks ") + function + ": a driver for CUDA 12.0");
  }
}

TEST(FunctionsNewIn12_4AreOptional) {
  const ScopedEnvironment missing("JAX_FLASH_FAKE_MISSING",
                                  "cuLibraryGetKernelCount,cuKernelGetParamInfo");
  const DriverApi api = LoadFake();
  CHECK_EQ(api.error, "");
  CHECK(api.cuKernelGetParamInfo == nullptr);
  CHECK(api.cuLibraryGetKernelCount == nullptr);
}

}  // namespace
}  // namespace jax_flash::testing
