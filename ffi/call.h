// One FFI call: its buffers and its values, both by name.
//
// Attributes of a call:
//   version   i32, kCallVersion.
//   kernels   names in the kernel table, comma separated, in launch order.
//   operands  a name for each operand, comma separated; results likewise.
//   others    i32, i64 or f32: values that kernel arguments and grids may refer to.
// An operand named query [..., T, N, D], key [..., S, K, D] or value [..., S, K, Dv] adds the
// values that its shape gives: batch (the product of the leading dimensions), query_length (T),
// query_heads (N), key_length (S), key_heads (K), head_dim (D) and value_head_dim (Dv). With query
// and key there are also bias_axes and mask_axes: of an operand bias or mask [..., N, T, S], where
// any dimension may be 1, bit i is set if dimension i of batch, N, T and S is not 1; 0 without the
// operand. A bias adds bias_batch, bias_heads, bias_queries and bias_keys, its sizes, and row
// statistics lse_log2 [..., N, T padded] add padded_query_length.

#ifndef JAX_FLASH_FFI_CALL_H_
#define JAX_FLASH_FFI_CALL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "ffi/status.h"

namespace jax_flash {

inline constexpr int32_t kCallVersion = 1;

struct Buffer {
  std::string_view name;
  void* data = nullptr;
  ffi::DataType type = ffi::DataType::INVALID;
  ffi::Span<const int64_t> dimensions;

  bool empty() const;
  std::string Shape() const;  // "[2, 128, 4, 64]"
};

using Value = std::variant<int64_t, float>;

// Cuts the first name off a comma-separated list.
std::string_view NextName(std::string_view* list);

// Checks the version and gives the `kernels` attribute.
ffi::ErrorOr<std::string_view> KernelsOf(const ffi::Dictionary& attributes);

class Call {
 public:
  // Everything in the call is checked here except what only one kernel asks for. Names and buffers
  // are views of the arguments.
  ffi::Error Parse(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                   const ffi::Dictionary& attributes);

  // A batch of zero: there is nothing to compute.
  bool empty() const { return empty_; }

  // Null if the call has none of that name.
  const Buffer* FindBuffer(std::string_view name) const;
  const Value* FindValue(std::string_view name) const;

  // All names, for error texts.
  std::string BufferNames() const;
  std::string ValueNames() const;

 private:
  static constexpr size_t kMaxBuffers = 32;
  static constexpr size_t kMaxValues = 32;

  struct NamedValue {
    std::string_view name;
    Value value;
  };

  ffi::Error ParseBuffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                          const ffi::Dictionary& attributes);
  ffi::Error ParseValues(const ffi::Dictionary& attributes);
  ffi::Error AddShapeValues();
  ffi::Error AddDenseValues(const Buffer& query, const Buffer& key);
  ffi::Error CheckAgreement(const Buffer& first, const Buffer& second, size_t trailing) const;
  ffi::Error CheckEmptiness();
  ffi::Error AddBuffer(std::string_view name, const ffi::AnyBuffer& buffer);
  ffi::Error AddValue(std::string_view name, Value value);

  std::array<Buffer, kMaxBuffers> buffers_;
  size_t buffer_count_ = 0;
  std::array<NamedValue, kMaxValues> values_;
  size_t value_count_ = 0;
  bool empty_ = false;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_CALL_H_
