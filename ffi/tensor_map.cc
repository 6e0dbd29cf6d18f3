#include "ffi/tensor_map.h"

#include <cstdint>

#include "ffi/driver_api.h"

namespace jax_flash {
namespace {

// Requirements of cuTensorMapEncodeTiled, whose own refusal does not say which one was violated.
constexpr uint64_t kAlignment = 16;
constexpr uint64_t kMaxExtent = uint64_t{1} << 32;
constexpr uint64_t kMaxStride = uint64_t{1} << 40;
constexpr uint32_t kRank = 4;

cuda::TensorMapSwizzle Swizzle(uint32_t bytes) {
  switch (bytes) {
    case 32:
      return cuda::TensorMapSwizzle::k32B;
    case 64:
      return cuda::TensorMapSwizzle::k64B;
    case 128:
      return cuda::TensorMapSwizzle::k128B;
    default:
      return cuda::TensorMapSwizzle::kNone;
  }
}

}  // namespace

ffi::Error EncodeTensorMap(const KernelSpec& kernel, const KernelArgument& argument,
                           const Buffer& buffer, cuda::TensorMap* tensor_map) {
  const size_t rank = buffer.dimensions.size();
  if (rank < 3) {
    return InvalidArgument(Concat(buffer.name, " has shape ", buffer.Shape(),
                                  "; a tensor map needs at least 3 dimensions [kernel ",
                                  kernel.name, "]"));
  }
  const uint64_t columns = buffer.dimensions[rank - 1];
  const uint64_t heads = buffer.dimensions[rank - 2];
  const uint64_t length = buffer.dimensions[rank - 3];
  uint64_t batch = 1;
  for (size_t i = 0; i + 3 < rank; ++i) batch *= buffer.dimensions[i];

  const uint64_t extents[kRank] = {columns, length, heads, batch};
  const uint64_t element_bytes = argument.dtype->bytes;
  const uint64_t strides[kRank - 1] = {heads * columns * element_bytes, columns * element_bytes,
                                       length * heads * columns * element_bytes};
  const auto refuse = [&](std::string_view what, uint64_t number, std::string_view requirement) {
    return InvalidArgument(Concat("tensor map of ", buffer.name, " ", argument.dtype->name,
                                  buffer.Shape(), ": ", what, " ", number, "; must be ",
                                  requirement, " [kernel ", kernel.name, "]"));
  };
  const auto address = reinterpret_cast<uintptr_t>(buffer.data);
  if (address % kAlignment != 0) return refuse("address", address, "a multiple of 16");
  for (const uint64_t extent : extents) {
    if (extent == 0 || extent >= kMaxExtent) return refuse("extent", extent, "in [1, 2^32)");
  }
  for (const uint64_t stride : strides) {
    if (stride % kAlignment != 0) return refuse("stride in bytes", stride, "a multiple of 16");
    if (stride >= kMaxStride) return refuse("stride in bytes", stride, "below 2^40");
  }

  const uint32_t box[kRank] = {argument.box_columns, argument.box_rows, 1, 1};
  constexpr uint32_t kElementStrides[kRank] = {1, 1, 1, 1};
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(
      kernel.name, cuTensorMapEncodeTiled, tensor_map, argument.dtype->tensor_map_type, kRank,
      buffer.data, extents, strides, box, kElementStrides, cuda::TensorMapInterleave::kNone,
      Swizzle(argument.swizzle_bytes), cuda::TensorMapL2Promotion::kL2_256B,
      cuda::TensorMapOutOfBoundsFill::kZeros);
  return ffi::Error::Success();
}

}  // namespace jax_flash
