// Launching one kernel of a call.

#ifndef JAX_FLASH_FFI_LAUNCH_H_
#define JAX_FLASH_FFI_LAUNCH_H_

#include "ffi/call.h"
#include "ffi/cuda_driver_types.h"
#include "ffi/kernel.h"
#include "ffi/status.h"

namespace jax_flash {

// Launches a kernel on `stream`, of a device that it is prepared for. Allocates nothing, takes no
// lock and waits for nothing, so that it may run while the stream is captured into a graph.
ffi::Error Launch(const Call& call, const Kernel& kernel, int device_ordinal, cuda::Stream stream);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_LAUNCH_H_
