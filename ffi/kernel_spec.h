// What the manifest says of one kernel: where its cubin is, how it is launched, and what each of
// its parameters is made from.

#ifndef JAX_FLASH_FFI_KERNEL_SPEC_H_
#define JAX_FLASH_FFI_KERNEL_SPEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/dtype.h"

namespace jax_flash {

// Bounds that let a launch be packed on the stack; a kernel's parameters may take 4 KiB anyway.
inline constexpr size_t kMaxArguments = 64;
inline constexpr size_t kMaxParameterBytes = 4096;

// kOptionalPointer is null where the call lacks the operand.
enum class ArgumentKind { kTensorMap, kPointer, kOptionalPointer, kInt32, kFloat32 };

struct KernelArgument {
  ArgumentKind kind;
  // The operand or result of the call, or the value for kInt32 and kFloat32.
  std::string name;
  // Not for kInt32 and kFloat32.
  const Dtype* dtype = nullptr;
  // kTensorMap only: what one TMA copy moves, and how it is spread over shared memory.
  uint32_t box_columns = 0;
  uint32_t box_rows = 0;
  uint32_t swizzle_bytes = 0;

  size_t bytes() const;
  size_t alignment() const;
  bool operator==(const KernelArgument& other) const;
};

// One factor of the grid's size: ceil(value / divisor).
struct GridFactor {
  std::string value_name;
  int64_t divisor;

  bool operator==(const GridFactor& other) const;
};

struct KernelSpec {
  std::string name;  // "<arch>/<variant>"
  std::string path;
  std::string symbol;
  std::string sha256;
  uint32_t threads;
  std::array<uint32_t, 3> cluster;
  uint32_t shared_memory_bytes;
  bool programmatic_launch;
  std::vector<KernelArgument> arguments;
  std::vector<GridFactor> grid;
  // In a call with at most this query_length, the grid has no more blocks than the device has
  // multiprocessors. 0: in none.
  int64_t resident_up_to;

  std::string_view arch() const { return std::string_view(name).substr(0, name.find('/')); }
  uint32_t cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
  bool operator==(const KernelSpec& other) const;
};

// Offset of each argument in the kernel's parameter space (each at its natural alignment), and last
// the space's size.
std::vector<size_t> ParameterOffsets(const std::vector<KernelArgument>& arguments);

// What is wrong with `spec`, or an empty string.
std::string Validate(const KernelSpec& spec);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_KERNEL_SPEC_H_
