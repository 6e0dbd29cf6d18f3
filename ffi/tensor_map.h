// Tensor maps (TMA descriptors) of a call's buffers.

#ifndef JAX_FLASH_FFI_TENSOR_MAP_H_
#define JAX_FLASH_FFI_TENSOR_MAP_H_

#include "ffi/call.h"
#include "ffi/cuda_driver_types.h"
#include "ffi/kernel_spec.h"
#include "ffi/status.h"

namespace jax_flash {

// Describes a row-major buffer [..., L, H, C] as 4 dimensions, fastest first: C, L, H, and the
// product of the leading ones. A copy moves box_rows rows of one head; what lies outside the buffer
// reads as zero and is not written.
ffi::Error EncodeTensorMap(const KernelSpec& kernel, const KernelArgument& argument,
                           const Buffer& buffer, cuda::TensorMap* tensor_map);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_TENSOR_MAP_H_
