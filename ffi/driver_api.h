// The CUDA driver's functions, resolved at run time: the extension links no CUDA library, so
// importing it works on a machine without a driver.

#ifndef JAX_FLASH_FFI_DRIVER_API_H_
#define JAX_FLASH_FFI_DRIVER_API_H_

#include <string>

#include "ffi/cuda_driver_types.h"

namespace jax_flash {

struct DriverApi {
  template <typename... Arguments>
  using Call = cuda::Result (*)(Arguments...);

  Call<cuda::Result, const char**> cuGetErrorName = nullptr;
  Call<cuda::Result, const char**> cuGetErrorString = nullptr;
  Call<cuda::Device*, int> cuDeviceGet = nullptr;
  Call<int*, cuda::DeviceAttribute, cuda::Device> cuDeviceGetAttribute = nullptr;
  Call<cuda::Context*, cuda::Device> cuDevicePrimaryCtxRetain = nullptr;
  Call<cuda::Device> cuDevicePrimaryCtxRelease = nullptr;
  Call<cuda::Context> cuCtxPushCurrent = nullptr;
  Call<cuda::Context*> cuCtxPopCurrent = nullptr;
  Call<cuda::StreamCaptureMode*> cuThreadExchangeStreamCaptureMode = nullptr;
  Call<cuda::Library*, const void*, void*, void**, unsigned int, void*, void**, unsigned int>
      cuLibraryLoadData = nullptr;
  Call<cuda::Kernel*, cuda::Library, const char*> cuLibraryGetKernel = nullptr;
  Call<cuda::FunctionAttribute, int, cuda::Kernel, cuda::Device> cuKernelSetAttribute = nullptr;
  Call<cuda::Function*, cuda::Kernel> cuKernelGetFunction = nullptr;
  Call<cuda::TensorMap*, cuda::TensorMapDataType, uint32_t, void*, const uint64_t*, const uint64_t*,
       const uint32_t*, const uint32_t*, cuda::TensorMapInterleave, cuda::TensorMapSwizzle,
       cuda::TensorMapL2Promotion, cuda::TensorMapOutOfBoundsFill>
      cuTensorMapEncodeTiled = nullptr;
  Call<const cuda::LaunchConfig*, cuda::Function, void**, void**> cuLaunchKernelEx = nullptr;

  // New in 12.4; null in an older driver, whose users go without the checks that need them.
  Call<unsigned int*, cuda::Library> cuLibraryGetKernelCount = nullptr;
  Call<cuda::Kernel, size_t, size_t*, size_t*> cuKernelGetParamInfo = nullptr;

  // Why the driver cannot be used; empty when it can, and then every function above that is not
  // marked as optional is set.
  std::string error;

  // Resolves the functions from the library at `path`.
  static DriverApi Load(const char* path);

  // The process's driver, resolved on first use from $JAX_FLASH_LIBCUDA, else libcuda.so.1.
  static const DriverApi& Get();
};

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_DRIVER_API_H_
