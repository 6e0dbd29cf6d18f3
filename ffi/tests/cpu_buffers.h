// Numbers of a call's buffers, read and written in plain loops.

#ifndef JAX_FLASH_FFI_TESTS_CPU_BUFFERS_H_
#define JAX_FLASH_FFI_TESTS_CPU_BUFFERS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/call.h"
#include "ffi/status.h"

namespace jax_flash {

// `numbers` stays as it is where the call has no such operand.
ffi::Error ReadFloats(const Call& call, std::string_view name, std::vector<float>* numbers);
ffi::Error ReadIntegers(const Call& call, std::string_view name, std::vector<int64_t>* numbers);

ffi::Error Write(const Call& call, std::string_view name, const std::vector<float>& numbers);

// NaN in every element of a workspace that a caller must not look at.
void Spoil(const Call& call, std::string_view name);

// 0 where the call has no such value.
int64_t Integer(const Call& call, std::string_view name);
float Float(const Call& call, std::string_view name);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_TESTS_CPU_BUFFERS_H_
