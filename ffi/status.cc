#include "ffi/status.h"

#include "ffi/driver_api.h"

namespace jax_flash {
namespace {

// Compilers put the build's path in front of the file name; an error text must not carry it.
std::string_view BaseName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

}  // namespace

ffi::Error MakeError(ffi::ErrorCode code, std::string_view what, SourceLine line) {
  return ffi::Error(code,
                    Concat("jax_flash: ", what, " (", BaseName(line.file), ":", line.line, ")"));
}

ffi::Error InvalidArgument(std::string_view what, SourceLine line) {
  return MakeError(ffi::ErrorCode::kInvalidArgument, what, line);
}

ffi::Error DriverError(std::string_view operation, cuda::Result result, std::string_view kernel,
                       SourceLine line) {
  const DriverApi& driver = DriverApi::Get();
  const char* name = nullptr;
  const char* meaning = nullptr;
  // Both fail on a result newer than the driver, and then leave nothing to print but the number.
  if (driver.cuGetErrorName(result, &name) != cuda::Result::kSuccess) name = nullptr;
  if (driver.cuGetErrorString(result, &meaning) != cuda::Result::kSuccess) meaning = nullptr;
  return MakeError(ffi::ErrorCode::kInternal,
                   Concat(operation, ": ", name == nullptr ? "CUresult" : name, " ",
                          static_cast<int>(result), meaning == nullptr ? "" : ", ",
                          meaning == nullptr ? "" : meaning, " [kernel ", kernel, "]"),
                   line);
}

}  // namespace jax_flash
