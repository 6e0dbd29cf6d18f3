// Element types by the short names that the kernel manifest uses ("bf16", "f32", "s32", ...).

#ifndef JAX_FLASH_FFI_DTYPE_H_
#define JAX_FLASH_FFI_DTYPE_H_

#include <optional>
#include <string>
#include <string_view>

#include "ffi/cuda_driver_types.h"
#include "ffi/status.h"

namespace jax_flash {

struct Dtype {
  std::string_view name;
  ffi::DataType type;
  uint32_t bytes;
  cuda::TensorMapDataType tensor_map_type;
};

// The dtype called `name`, or null.
const Dtype* FindDtype(std::string_view name);

// The name of `type`, for error texts.
std::string DtypeName(ffi::DataType type);

// All names, for error texts.
std::string DtypeNames();

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_DTYPE_H_
