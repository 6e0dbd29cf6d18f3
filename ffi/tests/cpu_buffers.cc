#include "ffi/tests/cpu_buffers.h"

#include <cmath>
#include <cstring>

namespace jax_flash {
namespace {

float FromBfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float number;
  std::memcpy(&number, &wide, sizeof(number));
  return number;
}

// Rounds to nearest, ties to even.
uint16_t ToBfloat16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  if (std::isnan(number)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int64_t Elements(const Buffer& buffer) {
  int64_t count = 1;
  for (const int64_t size : buffer.dimensions) count *= size;
  return count;
}

ffi::Error Unsupported(const Buffer& buffer) {
  return InvalidArgument(Concat(buffer.name, " has an element type that cpu_attention lacks"));
}

}  // namespace

ffi::Error ReadFloats(const Call& call, std::string_view name, std::vector<float>* numbers) {
  const Buffer* buffer = call.FindBuffer(name);
  if (buffer == nullptr) return ffi::Error::Success();
  numbers->resize(Elements(*buffer));
  for (size_t i = 0; i < numbers->size(); ++i) {
    if (buffer->type == ffi::DataType::F32) {
      (*numbers)[i] = static_cast<const float*>(buffer->data)[i];
    } else if (buffer->type == ffi::DataType::BF16) {
      (*numbers)[i] = FromBfloat16(static_cast<const uint16_t*>(buffer->data)[i]);
    } else {
      return Unsupported(*buffer);
    }
  }
  return ffi::Error::Success();
}

ffi::Error ReadIntegers(const Call& call, std::string_view name, std::vector<int64_t>* numbers) {
  const Buffer* buffer = call.FindBuffer(name);
  if (buffer == nullptr) return ffi::Error::Success();
  const int64_t count = Elements(*buffer);
  if (buffer->type == ffi::DataType::S32) {
    const auto* data = static_cast<const int32_t*>(buffer->data);
    numbers->assign(data, data + count);
  } else if (buffer->type == ffi::DataType::PRED) {
    const auto* data = static_cast<const uint8_t*>(buffer->data);
    numbers->assign(data, data + count);
  } else {
    return Unsupported(*buffer);
  }
  return ffi::Error::Success();
}

ffi::Error Write(const Call& call, std::string_view name, const std::vector<float>& numbers) {
  const Buffer* buffer = call.FindBuffer(name);
  if (buffer == nullptr || Elements(*buffer) != static_cast<int64_t>(numbers.size())) {
    return InvalidArgument(Concat("cpu_attention computes ", numbers.size(), " numbers of ", name,
                                  ", and the call has no such result"));
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (buffer->type == ffi::DataType::F32) {
      static_cast<float*>(buffer->data)[i] = numbers[i];
    } else if (buffer->type == ffi::DataType::BF16) {
      static_cast<uint16_t*>(buffer->data)[i] = ToBfloat16(numbers[i]);
    } else {
      return Unsupported(*buffer);
    }
  }
  return ffi::Error::Success();
}

void Spoil(const Call& call, std::string_view name) {
  const Buffer* buffer = call.FindBuffer(name);
  if (buffer != nullptr) std::memset(buffer->data, 0xff, 4 * Elements(*buffer));
}

int64_t Integer(const Call& call, std::string_view name) {
  const Value* value = call.FindValue(name);
  return value == nullptr ? 0 : std::get<int64_t>(*value);
}

float Float(const Call& call, std::string_view name) {
  const Value* value = call.FindValue(name);
  return value == nullptr ? 0 : std::get<float>(*value);
}

}  // namespace jax_flash
