// The fake driver's books, and what its functions share.

#ifndef JAX_FLASH_FFI_TESTS_FAKE_STATE_H_
#define JAX_FLASH_FFI_TESTS_FAKE_STATE_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/cuda_driver_types.h"
#include "ffi/tests/fake_cuda.h"

namespace jax_flash::cuda {

struct ContextObject {
  int device = 0;
  int retained = 0;
};

struct KernelObject {
  std::string symbol;
  std::vector<std::pair<size_t, size_t>> parameters;  // offset, bytes
  int max_dynamic_shared_bytes[testing::kFakeDevices];
  bool non_portable_cluster[testing::kFakeDevices] = {};
  bool loaded[testing::kFakeDevices] = {};
};

struct LibraryObject {
  std::vector<std::unique_ptr<KernelObject>> kernels;
};

// Guards everything in Books.
extern std::mutex mutex;

struct Books {
  std::vector<std::unique_ptr<LibraryObject>> libraries;
  ContextObject contexts[testing::kFakeDevices];
};
extern Books books;

bool Known(const KernelObject* kernel);
bool Known(const LibraryObject* library);
bool IsDevice(Device device);

// Null if `text` is not a fake cubin.
std::unique_ptr<LibraryObject> ParseCubin(const char* text);

// An environment variable, or "".
std::string_view Environment(const char* name);

// The failure that the environment asks of `function`, or kSuccess.
Result Injected(std::string_view function);

void Log(const std::string& line);

// In fake_launch.cc.
Result FakeTensorMapEncodeTiled(TensorMap* tensor_map, TensorMapDataType data_type, uint32_t rank,
                                void* address, const uint64_t* extents, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* element_strides,
                                TensorMapInterleave interleave, TensorMapSwizzle swizzle,
                                TensorMapL2Promotion l2_promotion,
                                TensorMapOutOfBoundsFill out_of_bounds_fill);
Result FakeLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters,
                          void** extra);

}  // namespace jax_flash::cuda

#endif  // JAX_FLASH_FFI_TESTS_FAKE_STATE_H_
