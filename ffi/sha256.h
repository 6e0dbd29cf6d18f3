// SHA-256 (FIPS 180-4).

#ifndef JAX_FLASH_FFI_SHA256_H_
#define JAX_FLASH_FFI_SHA256_H_

#include <string>
#include <string_view>

namespace jax_flash {

// The digest of `bytes` as 64 lower-case hexadecimal digits.
std::string Sha256Hex(std::string_view bytes);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_SHA256_H_
