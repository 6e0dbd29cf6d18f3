#include "ffi/tests/fake_cuda.h"

#include <cstdio>
#include <cstring>

#include "ffi/tests/fake_state.h"

namespace jax_flash::cuda {
namespace {

constexpr int kMaxSharedBytes = 227 * 1024;

thread_local std::vector<Context> context_stack;
thread_local StreamCaptureMode capture_mode = StreamCaptureMode::kGlobal;

Result FakeDeviceGet(Device* device, int ordinal) {
  if (!IsDevice(ordinal)) return Result::kInvalidValue;
  *device = ordinal;
  return Result::kSuccess;
}

Result FakeDeviceGetAttribute(int* value, DeviceAttribute attribute, Device device) {
  if (!IsDevice(device)) return Result::kInvalidValue;
  std::ostringstream line;
  line << "{\"call\": \"cuDeviceGetAttribute\", \"attribute\": " << static_cast<int>(attribute)
       << ", \"device\": " << device << "}";
  Log(line.str());
  int major = 9;
  int minor = 0;
  const std::string capability(Environment("JAX_FLASH_FAKE_COMPUTE_CAPABILITY"));
  if (!capability.empty()) std::sscanf(capability.c_str(), "%d.%d", &major, &minor);
  switch (attribute) {
    case DeviceAttribute::kMultiprocessorCount:
      *value = testing::kFakeMultiprocessors + device;
      return Result::kSuccess;
    case DeviceAttribute::kComputeCapabilityMajor:
      *value = major;
      return Result::kSuccess;
    case DeviceAttribute::kComputeCapabilityMinor:
      *value = minor;
      return Result::kSuccess;
  }
  return Result::kInvalidValue;
}

Result FakeErrorName(Result result, const char** name) {
  *name = nullptr;
  if (result == Result::kInvalidValue) *name = "CUDA_ERROR_INVALID_VALUE";
  if (result == Result::kInvalidImage) *name = "CUDA_ERROR_INVALID_IMAGE";
  if (result == Result::kNoBinaryForGpu) *name = "CUDA_ERROR_NO_BINARY_FOR_GPU";
  if (result == Result::kInvalidHandle) *name = "CUDA_ERROR_INVALID_HANDLE";
  if (result == Result::kNotFound) *name = "CUDA_ERROR_NOT_FOUND";
  if (result == Result::kStreamCaptureUnsupported) *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
  return *name == nullptr ? Result::kInvalidValue : Result::kSuccess;
}

Result FakeErrorString(Result result, const char** meaning) {
  const Result known = FakeErrorName(result, meaning);
  if (known == Result::kSuccess) *meaning = "refused by the fake driver";
  return known;
}

Result FakePrimaryCtxRetain(Context* context, Device device) {
  if (!IsDevice(device)) return Result::kInvalidValue;
  *context = &books.contexts[device];
  ++books.contexts[device].retained;
  books.contexts[device].device = device;
  return Result::kSuccess;
}

Result FakePrimaryCtxRelease(Device device) {
  if (!IsDevice(device) || books.contexts[device].retained == 0) return Result::kInvalidContext;
  --books.contexts[device].retained;
  return Result::kSuccess;
}

Result FakeCtxPush(Context context) {
  if (context == nullptr || context->retained == 0) return Result::kInvalidContext;
  context_stack.push_back(context);
  return Result::kSuccess;
}

Result FakeCtxPop(Context* context) {
  if (context_stack.empty()) return Result::kInvalidContext;
  *context = context_stack.back();
  context_stack.pop_back();
  return Result::kSuccess;
}

Result FakeExchangeCaptureMode(StreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return Result::kSuccess;
}

Result FakeLibraryLoadData(Library* library, const void* code, void*, void**, unsigned int, void*,
                           void**, unsigned int) {
  if (capture_mode != StreamCaptureMode::kRelaxed) return Result::kStreamCaptureUnsupported;
  std::unique_ptr<LibraryObject> parsed = ParseCubin(static_cast<const char*>(code));
  if (parsed == nullptr) return Result::kInvalidImage;
  Log("{\"call\": \"cuLibraryLoadData\", \"kernels\": " + std::to_string(parsed->kernels.size()) +
      "}");
  *library = parsed.get();
  books.libraries.push_back(std::move(parsed));
  return Result::kSuccess;
}

Result FakeLibraryGetKernelCount(unsigned int* count, Library library) {
  if (!Known(library)) return Result::kInvalidHandle;
  *count = static_cast<unsigned int>(library->kernels.size());
  return Result::kSuccess;
}

Result FakeLibraryGetKernel(Kernel* kernel, Library library, const char* symbol) {
  if (!Known(library)) return Result::kInvalidHandle;
  for (const auto& candidate : library->kernels) {
    if (candidate->symbol == symbol) {
      *kernel = candidate.get();
      return Result::kSuccess;
    }
  }
  return Result::kNotFound;
}

Result FakeKernelGetParamInfo(Kernel kernel, size_t index, size_t* offset, size_t* bytes) {
  if (!Known(kernel)) return Result::kInvalidHandle;
  if (index >= kernel->parameters.size()) return Result::kInvalidValue;
  *offset = kernel->parameters[index].first;
  *bytes = kernel->parameters[index].second;
  return Result::kSuccess;
}

Result FakeKernelSetAttribute(FunctionAttribute attribute, int value, Kernel kernel,
                              Device device) {
  if (!Known(kernel)) return Result::kInvalidHandle;
  if (!IsDevice(device)) return Result::kInvalidValue;
  if (attribute == FunctionAttribute::kMaxDynamicSharedSizeBytes) {
    if (value < 0 || value > kMaxSharedBytes) return Result::kInvalidValue;
    kernel->max_dynamic_shared_bytes[device] = value;
  } else {
    kernel->non_portable_cluster[device] = value != 0;
  }
  std::ostringstream line;
  line << "{\"call\": \"cuKernelSetAttribute\", \"kernel\": \"" << kernel->symbol
       << "\", \"attribute\": " << static_cast<int>(attribute) << ", \"value\": " << value
       << ", \"device\": " << device << "}";
  Log(line.str());
  return Result::kSuccess;
}

Result FakeKernelGetFunction(Function* function, Kernel kernel) {
  if (!Known(kernel)) return Result::kInvalidHandle;
  if (context_stack.empty()) return Result::kInvalidContext;
  if (capture_mode != StreamCaptureMode::kRelaxed) return Result::kStreamCaptureUnsupported;
  const int device = context_stack.back()->device;
  kernel->loaded[device] = true;
  *function = reinterpret_cast<Function>(kernel);
  std::ostringstream line;
  line << "{\"call\": \"cuKernelGetFunction\", \"kernel\": \"" << kernel->symbol
       << "\", \"device\": " << device << ", \"context_depth\": " << context_stack.size()
       << ", \"context_references\": " << context_stack.back()->retained << "}";
  Log(line.str());
  return Result::kSuccess;
}

// What cuGetProcAddress hands out: the function behind the lock and the injected failures.
template <const char* const& name, auto function>
struct Entry;

template <const char* const& name, typename... Arguments, Result (*function)(Arguments...)>
struct Entry<name, function> {
  static Result Call(Arguments... arguments) {
    if (const Result injected = Injected(name); injected != Result::kSuccess) return injected;
    const std::lock_guard lock(mutex);
    return function(arguments...);
  }
};

}  // namespace
}  // namespace jax_flash::cuda

extern "C" __attribute__((visibility("default"))) jax_flash::cuda::Result cuGetProcAddress_v2(
    const char* symbol, void** function, int, uint64_t, int* symbol_status) {
  using namespace jax_flash::cuda;
  std::stringstream missing{std::string(Environment("JAX_FLASH_FAKE_MISSING"))};
  *symbol_status = 1;
  *function = nullptr;
  for (std::string name; std::getline(missing, name, ',');) {
    if (name == symbol) return Result::kNotFound;
  }
#define JAX_FLASH_FAKE(name, implementation)                                     \
  {                                                                              \
    static constexpr const char* kName = #name;                                  \
    if (std::strcmp(symbol, kName) == 0) {                                       \
      *function = reinterpret_cast<void*>(&Entry<kName, &implementation>::Call); \
      *symbol_status = 0;                                                        \
      return Result::kSuccess;                                                   \
    }                                                                            \
  }
  JAX_FLASH_FAKE(cuGetErrorName, FakeErrorName)
  JAX_FLASH_FAKE(cuGetErrorString, FakeErrorString)
  JAX_FLASH_FAKE(cuDeviceGet, FakeDeviceGet)
  JAX_FLASH_FAKE(cuDeviceGetAttribute, FakeDeviceGetAttribute)
  JAX_FLASH_FAKE(cuDevicePrimaryCtxRetain, FakePrimaryCtxRetain)
  JAX_FLASH_FAKE(cuDevicePrimaryCtxRelease, FakePrimaryCtxRelease)
  JAX_FLASH_FAKE(cuCtxPushCurrent, FakeCtxPush)
  JAX_FLASH_FAKE(cuCtxPopCurrent, FakeCtxPop)
  JAX_FLASH_FAKE(cuThreadExchangeStreamCaptureMode, FakeExchangeCaptureMode)
  JAX_FLASH_FAKE(cuLibraryLoadData, FakeLibraryLoadData)
  JAX_FLASH_FAKE(cuLibraryGetKernel, FakeLibraryGetKernel)
  JAX_FLASH_FAKE(cuLibraryGetKernelCount, FakeLibraryGetKernelCount)
  JAX_FLASH_FAKE(cuKernelGetParamInfo, FakeKernelGetParamInfo)
  JAX_FLASH_FAKE(cuKernelSetAttribute, FakeKernelSetAttribute)
  JAX_FLASH_FAKE(cuKernelGetFunction, FakeKernelGetFunction)
  JAX_FLASH_FAKE(cuTensorMapEncodeTiled, FakeTensorMapEncodeTiled)
  JAX_FLASH_FAKE(cuLaunchKernelEx, FakeLaunchKernelEx)
#undef JAX_FLASH_FAKE
  return Result::kNotFound;
}
