#include "ffi/kernel.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "ffi/arch.h"
#include "ffi/driver_api.h"
#include "ffi/sha256.h"

namespace jax_flash {
namespace {

constexpr char kRemedy[] = "reinstall jax_flash, or run python -m jax_flash.aot build";

// The largest cluster that every device of an architecture takes.
constexpr uint32_t kPortableClusterSize = 8;

// Loading a module is among the calls that a stream capture elsewhere in the process forbids unless
// the calling thread says that it does not concern the capture.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { DriverApi::Get().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { DriverApi::Get().cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cuda::StreamCaptureMode mode_ = cuda::StreamCaptureMode::kRelaxed;
};

// With C's files rather than a stream, for the reason given at AppendTo.
ffi::Error ReadCubin(const KernelSpec& spec, std::string* cubin) {
  const auto cannot = [&](const char* what) {
    return MakeError(ffi::ErrorCode::kNotFound,
                     Concat("cannot ", what, " cubin ", spec.path, ": ", std::strerror(errno), ": ",
                            kRemedy, " [kernel ", spec.name, "]"));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(spec.path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) return cannot("open");
  char chunk[4096];
  while (const size_t count = std::fread(chunk, 1, sizeof(chunk), file.get())) {
    cubin->append(chunk, count);
  }
  if (std::ferror(file.get()) != 0) return cannot("read");
  const std::string digest = Sha256Hex(*cubin);
  if (digest != spec.sha256) {
    return MakeError(
        ffi::ErrorCode::kDataLoss,
        Concat("cubin ", spec.path, " (", cubin->size(),
               " bytes) is not the file that the manifest", " lists: expected sha256 ", spec.sha256,
               ", got ", digest, ": ", kRemedy, " [kernel ", spec.name, "]"));
  }
  return ffi::Error::Success();
}

}  // namespace

Kernel::Kernel(KernelSpec spec)
    : spec_(std::move(spec)), parameter_offsets_(ParameterOffsets(spec_.arguments)) {}

ffi::Error Kernel::Prepare(int device_ordinal) {
  if (device_ordinal < 0 || device_ordinal >= kMaxDevices) {
    return InvalidArgument(Concat("device ordinal ", device_ordinal, " is not between 0 and ",
                                  kMaxDevices - 1, " [kernel ", spec_.name, "]"));
  }
  if (ready_[device_ordinal].load(std::memory_order_acquire)) return ffi::Error::Success();

  const std::lock_guard lock(mutex_);
  std::optional<ffi::Error>& outcome = device_outcomes_[device_ordinal];
  if (!outcome) {
    outcome = PrepareOnce(device_ordinal);
    if (outcome->success()) ready_[device_ordinal].store(true, std::memory_order_release);
  }
  return *outcome;
}

ffi::Error Kernel::PrepareOnce(int device_ordinal) {
  const DriverApi& driver = DriverApi::Get();
  if (!driver.error.empty()) {
    return MakeError(ffi::ErrorCode::kFailedPrecondition,
                     Concat(driver.error, " [kernel ", spec_.name, "]"));
  }
  const RelaxedCaptureMode relaxed;
  cuda::Device device = 0;
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuDeviceGet, &device, device_ordinal);
  JAX_FLASH_RETURN_IF_ERROR(CheckArch(device, device_ordinal));
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuDeviceGetAttribute,
                                   &multiprocessors_[device_ordinal],
                                   cuda::DeviceAttribute::kMultiprocessorCount, device);
  if (!load_outcome_) load_outcome_ = Load();
  JAX_FLASH_RETURN_IF_ERROR(*load_outcome_);
  JAX_FLASH_RETURN_IF_ERROR(SetAttributes(device));
  return LoadIntoContext(device);
}

ffi::Error Kernel::CheckArch(cuda::Device device, int device_ordinal) const {
  const std::optional<Arch> arch = Arch::Parse(spec_.arch());
  if (!arch) {
    return InvalidArgument(Concat("architecture \"", spec_.arch(),
                                  "\" must be like sm_90a [kernel ", spec_.name, "]"));
  }
  int major = 0;
  int minor = 0;
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuDeviceGetAttribute, &major,
                                   cuda::DeviceAttribute::kComputeCapabilityMajor, device);
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuDeviceGetAttribute, &minor,
                                   cuda::DeviceAttribute::kComputeCapabilityMinor, device);
  if (arch->RunsOn(major, minor)) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kFailedPrecondition,
                   Concat("the kernel is compiled for ", spec_.arch(), ", but device ",
                          device_ordinal, " has compute capability ", major, ".", minor,
                          ": pass implementation=\"xla\", or use a device of that architecture",
                          " [kernel ", spec_.name, "]"));
}

ffi::Error Kernel::Load() {
  JAX_FLASH_RETURN_IF_ERROR(LoadCubin());
  return CheckParameters();
}

ffi::Error Kernel::LoadCubin() {
  std::string cubin;
  JAX_FLASH_RETURN_IF_ERROR(ReadCubin(spec_, &cubin));
  // Never unloaded: launches may be queued until the process ends.
  cuda::Library library = nullptr;
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuLibraryLoadData, &library, cubin.data(), nullptr,
                                   nullptr, 0, nullptr, nullptr, 0);
  if (DriverApi::Get().cuLibraryGetKernelCount != nullptr) {
    unsigned int count = 0;
    JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuLibraryGetKernelCount, &count, library);
    if (count != 1) {
      return MakeError(ffi::ErrorCode::kFailedPrecondition,
                       Concat("cubin ", spec_.path, " holds ", count,
                              " kernels; must be 1: ", kRemedy, " [kernel ", spec_.name, "]"));
    }
  }
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuLibraryGetKernel, &kernel_, library,
                                   spec_.symbol.c_str());
  return ffi::Error::Success();
}

// A cubin that is not what the manifest describes would read its arguments from wrong places.
ffi::Error Kernel::CheckParameters() const {
  const DriverApi& driver = DriverApi::Get();
  if (driver.cuKernelGetParamInfo == nullptr) return ffi::Error::Success();
  const size_t declared = spec_.arguments.size();
  size_t end = 0;
  // One more parameter than declared is not looked for: asking for it is an error, which tools such
  // as compute-sanitizer report. The build compares the number with the compiled kernel's.
  for (size_t i = 0; i < declared; ++i) {
    size_t offset = 0;
    size_t bytes = 0;
    const cuda::Result result = driver.cuKernelGetParamInfo(kernel_, i, &offset, &bytes);
    if (result == cuda::Result::kInvalidValue) {
      return MakeError(ffi::ErrorCode::kFailedPrecondition,
                       Concat("the kernel in ", spec_.path, " takes only ", i,
                              " parameters; the manifest lists ", declared, ": ", kRemedy,
                              " [kernel ", spec_.name, "]"));
    }
    if (result != cuda::Result::kSuccess) {
      return DriverError("cuKernelGetParamInfo", result, spec_.name);
    }
    // Parameters follow each other with no more padding than their alignment asks for. How much
    // that is depends on where the driver's parameter space begins: on an H200 with driver 580, a
    // tensor map that comes first lies at offset 48.
    const KernelArgument& argument = spec_.arguments[i];
    if (bytes != argument.bytes() || offset < end || offset >= end + argument.alignment()) {
      return MakeError(
          ffi::ErrorCode::kFailedPrecondition,
          Concat("parameter ", i, " (", argument.name, ") of the kernel in ", spec_.path, " has ",
                 bytes, " bytes at offset ", offset, "; the manifest makes it ", argument.bytes(),
                 " bytes at an offset from ", end, " to ", end + argument.alignment() - 1, ": ",
                 kRemedy, " [kernel ", spec_.name, "]"));
    }
    end = offset + bytes;
  }
  return ffi::Error::Success();
}

ffi::Error Kernel::SetAttributes(cuda::Device device) const {
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuKernelSetAttribute,
                                   cuda::FunctionAttribute::kMaxDynamicSharedSizeBytes,
                                   static_cast<int>(spec_.shared_memory_bytes), kernel_, device);
  if (spec_.cluster_size() > kPortableClusterSize) {
    JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuKernelSetAttribute,
                                     cuda::FunctionAttribute::kNonPortableClusterSizeAllowed, 1,
                                     kernel_, device);
  }
  return ffi::Error::Success();
}

// The driver would otherwise copy the code to the device at the first launch, which synchronises
// the device and is not allowed while a graph is captured. XLA uses the primary context.
ffi::Error Kernel::LoadIntoContext(cuda::Device device) const {
  cuda::Context context = nullptr;
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec_.name, cuDevicePrimaryCtxRetain, &context, device);
  const DriverApi& driver = DriverApi::Get();
  cuda::Result result = driver.cuCtxPushCurrent(context);
  const char* operation = "cuCtxPushCurrent";
  if (result == cuda::Result::kSuccess) {
    cuda::Function function = nullptr;
    result = driver.cuKernelGetFunction(&function, kernel_);
    operation = "cuKernelGetFunction";
    driver.cuCtxPopCurrent(&context);
  }
  driver.cuDevicePrimaryCtxRelease(device);
  if (result != cuda::Result::kSuccess) return DriverError(operation, result, spec_.name);
  return ffi::Error::Success();
}

}  // namespace jax_flash
