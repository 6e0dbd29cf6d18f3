#include "ffi/driver_api.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>

namespace jax_flash {
namespace {

using GetProcAddress = cuda::Result (*)(const char* symbol, void** function, int cuda_version,
                                        uint64_t flags, int* symbol_status);

// Asks for the function as of CUDA `version` (major * 1000 + minor * 10): later CUDA releases may
// give the same name another signature.
template <typename Function>
bool Resolve(GetProcAddress get_proc_address, const char* symbol, int version, Function* function) {
  void* address = nullptr;
  int symbol_status = 0;
  const cuda::Result result = get_proc_address(symbol, &address, version, 0, &symbol_status);
  if (result != cuda::Result::kSuccess || address == nullptr) return false;
  *function = reinterpret_cast<Function>(address);
  return true;
}

}  // namespace

DriverApi DriverApi::Load(const char* path) {
  DriverApi api;
  // Never closed: kernels and the driver's own threads live until the process ends.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    api.error = std::string("cannot open the CUDA driver library ") + path + " (" + dlerror() +
                "): install an NVIDIA driver, or pass implementation=\"xla\"";
    return api;
  }
  auto get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) {
    api.error = std::string(path) +
                " lacks cuGetProcAddress_v2: a driver for CUDA 12.0 or later is required";
    return api;
  }

#define JAX_FLASH_REQUIRED(function, version)                                                    \
  if (!Resolve(get_proc_address, #function, version, &api.function)) {                           \
    api.error =                                                                                  \
        std::string(path) + " lacks " #function ": a driver for CUDA 12.0 or later is required"; \
    return api;                                                                                  \
  }
  JAX_FLASH_REQUIRED(cuGetErrorName, 6000)
  JAX_FLASH_REQUIRED(cuGetErrorString, 6000)
  JAX_FLASH_REQUIRED(cuDeviceGet, 2000)
  JAX_FLASH_REQUIRED(cuDeviceGetAttribute, 2000)
  JAX_FLASH_REQUIRED(cuDevicePrimaryCtxRetain, 7000)
  JAX_FLASH_REQUIRED(cuDevicePrimaryCtxRelease, 11000)
  JAX_FLASH_REQUIRED(cuCtxPushCurrent, 4000)
  JAX_FLASH_REQUIRED(cuCtxPopCurrent, 4000)
  JAX_FLASH_REQUIRED(cuThreadExchangeStreamCaptureMode, 10010)
  JAX_FLASH_REQUIRED(cuLibraryLoadData, 12000)
  JAX_FLASH_REQUIRED(cuLibraryGetKernel, 12000)
  JAX_FLASH_REQUIRED(cuKernelSetAttribute, 12000)
  JAX_FLASH_REQUIRED(cuKernelGetFunction, 12000)
  JAX_FLASH_REQUIRED(cuTensorMapEncodeTiled, 12000)
  JAX_FLASH_REQUIRED(cuLaunchKernelEx, 11060)
#undef JAX_FLASH_REQUIRED

  Resolve(get_proc_address, "cuLibraryGetKernelCount", 12040, &api.cuLibraryGetKernelCount);
  Resolve(get_proc_address, "cuKernelGetParamInfo", 12040, &api.cuKernelGetParamInfo);
  return api;
}

const DriverApi& DriverApi::Get() {
  static const DriverApi api = [] {
    const char* path = std::getenv("JAX_FLASH_LIBCUDA");
    return Load(path == nullptr || *path == '\0' ? "libcuda.so.1" : path);
  }();
  return api;
}

}  // namespace jax_flash
