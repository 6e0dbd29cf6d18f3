// Errors as XLA reports them: a code, and a text "jax_flash: <what> (file:line)".

#ifndef JAX_FLASH_FFI_STATUS_H_
#define JAX_FLASH_FFI_STATUS_H_

#include <string>
#include <string_view>
#include <type_traits>

#include "ffi/cuda_driver_types.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

namespace ffi = ::xla::ffi;

// Where an error was made. Taken as a default argument, it names the caller's line.
struct SourceLine {
  const char* file;
  int line;
  static constexpr SourceLine Here(const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Appends one part of a text. Streams are avoided: in a process that holds several copies of the
// C++ library (ours is linked statically), using one can fail for want of its locale facet.
template <typename Part>
void AppendTo(std::string* text, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    text->append(std::to_string(part));
  } else {
    text->append(part);
  }
}

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::string text;
  (AppendTo(&text, parts), ...);
  return text;
}

ffi::Error MakeError(ffi::ErrorCode code, std::string_view what,
                     SourceLine line = SourceLine::Here());

ffi::Error InvalidArgument(std::string_view what, SourceLine line = SourceLine::Here());

// `operation` is the driver function that returned `result`; `kernel` the kernel it was called for.
ffi::Error DriverError(std::string_view operation, cuda::Result result, std::string_view kernel,
                       SourceLine line = SourceLine::Here());

}  // namespace jax_flash

#define JAX_FLASH_RETURN_IF_ERROR(expression) \
  if (::xla::ffi::Error error_ = (expression); error_.failure()) return error_

// For calls of a DriverApi function by its name.
#define JAX_FLASH_RETURN_IF_DRIVER_ERROR(kernel, function, ...)                                \
  if (::jax_flash::cuda::Result result_ = ::jax_flash::DriverApi::Get().function(__VA_ARGS__); \
      result_ != ::jax_flash::cuda::Result::kSuccess)                                          \
  return ::jax_flash::DriverError(#function, result_, kernel)

#endif  // JAX_FLASH_FFI_STATUS_H_
