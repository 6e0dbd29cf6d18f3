// A kernel of the table, and its copy in the driver.

#ifndef JAX_FLASH_FFI_KERNEL_H_
#define JAX_FLASH_FFI_KERNEL_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "ffi/cuda_driver_types.h"
#include "ffi/kernel_spec.h"
#include "ffi/status.h"

namespace jax_flash {

inline constexpr int kMaxDevices = 64;

class Kernel {
 public:
  explicit Kernel(KernelSpec spec);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const KernelSpec& spec() const { return spec_; }

  // See ParameterOffsets.
  const std::vector<size_t>& parameter_offsets() const { return parameter_offsets_; }

  // Makes the kernel ready to launch on a device: reads and checks its cubin, loads it, and sets
  // its attributes. Done once for a device; from then on a call is one atomic read. A failure is
  // kept, and reported again by every later call. Any number of threads may call it at once.
  ffi::Error Prepare(int device_ordinal);

  // How many multiprocessors a prepared device has.
  int64_t multiprocessors(int device_ordinal) const { return multiprocessors_[device_ordinal]; }

  // What cuLaunchKernelEx takes, on every prepared device: the driver finds the device by the
  // stream.
  cuda::Function function() const { return reinterpret_cast<cuda::Function>(kernel_); }

 private:
  ffi::Error PrepareOnce(int device_ordinal);
  ffi::Error CheckArch(cuda::Device device, int device_ordinal) const;
  ffi::Error Load();
  ffi::Error LoadCubin();
  ffi::Error CheckParameters() const;
  ffi::Error SetAttributes(cuda::Device device) const;
  ffi::Error LoadIntoContext(cuda::Device device) const;

  const KernelSpec spec_;
  const std::vector<size_t> parameter_offsets_;
  std::array<std::atomic<bool>, kMaxDevices> ready_{};

  // Guards the rest, of which kernel_ is fixed before any ready_ is set, and a device's
  // multiprocessors_ before its own.
  std::mutex mutex_;
  cuda::Kernel kernel_ = nullptr;
  std::array<int, kMaxDevices> multiprocessors_{};
  std::optional<ffi::Error> load_outcome_;
  std::array<std::optional<ffi::Error>, kMaxDevices> device_outcomes_;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_KERNEL_H_
