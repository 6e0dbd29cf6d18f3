#include "ffi/launch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ffi/driver_api.h"
#include "ffi/tensor_map.h"

namespace jax_flash {
namespace {

constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();

ffi::Error FindInteger(const Call& call, const KernelSpec& kernel, std::string_view name,
                       int64_t* integer) {
  const Value* value = call.FindValue(name);
  if (value == nullptr || !std::holds_alternative<int64_t>(*value)) {
    return InvalidArgument(
        Concat(value == nullptr ? "the call has no value " : "value must be an integer: ", name,
               "; it has ", call.ValueNames(), " [kernel ", kernel.name, "]"));
  }
  *integer = std::get<int64_t>(*value);
  return ffi::Error::Success();
}

// The most blocks that the grid may have: those that the device holds at a time, or any number.
ffi::Error FindGridLimit(const Call& call, const KernelSpec& kernel, int64_t multiprocessors,
                         int64_t* limit) {
  *limit = kMaxGridX;
  if (kernel.resident_up_to == 0) return ffi::Error::Success();
  int64_t query_length = 0;
  JAX_FLASH_RETURN_IF_ERROR(FindInteger(call, kernel, "query_length", &query_length));
  if (query_length <= kernel.resident_up_to) {
    const int64_t cluster = kernel.cluster[0];
    *limit = std::max(multiprocessors / cluster, int64_t{1}) * cluster;
  }
  return ffi::Error::Success();
}

ffi::Error EvaluateGrid(const Call& call, const KernelSpec& kernel, int64_t multiprocessors,
                        uint32_t* grid_x) {
  int64_t blocks = 1;
  for (const GridFactor& factor : kernel.grid) {
    int64_t value = 0;
    JAX_FLASH_RETURN_IF_ERROR(FindInteger(call, kernel, factor.value_name, &value));
    const int64_t count = value / factor.divisor + (value % factor.divisor > 0 ? 1 : 0);
    if (count <= 0 || count > kMaxGridX / blocks) {
      return InvalidArgument(Concat("grid of ", blocks, " x ceil(", factor.value_name, " = ", value,
                                    " / ", factor.divisor, ") blocks; must be in [1, 2^31)",
                                    " [kernel ", kernel.name, "]"));
    }
    blocks *= count;
  }
  const int64_t cluster = kernel.cluster[0];
  const int64_t rounded = (blocks + cluster - 1) / cluster * cluster;
  if (rounded > kMaxGridX) {
    return InvalidArgument(
        Concat("grid of ", rounded, " blocks; must be in [1, 2^31) [kernel ", kernel.name, "]"));
  }
  int64_t limit = 0;
  JAX_FLASH_RETURN_IF_ERROR(FindGridLimit(call, kernel, multiprocessors, &limit));
  *grid_x = static_cast<uint32_t>(std::min(rounded, limit));
  return ffi::Error::Success();
}

ffi::Error PackBuffer(const Call& call, const KernelSpec& kernel, const KernelArgument& argument,
                      void* parameter) {
  const Buffer* buffer = call.FindBuffer(argument.name);
  if (buffer == nullptr && argument.kind == ArgumentKind::kOptionalPointer) {
    std::memset(parameter, 0, sizeof(void*));
    return ffi::Error::Success();
  }
  if (buffer == nullptr) {
    return InvalidArgument(Concat("the call has no operand or result ", argument.name, "; it has ",
                                  call.BufferNames(), " [kernel ", kernel.name, "]"));
  }
  if (buffer->type != argument.dtype->type) {
    return InvalidArgument(Concat(buffer->name, " is ", DtypeName(buffer->type),
                                  "; the kernel takes ", argument.dtype->name, " [kernel ",
                                  kernel.name, "]"));
  }
  if (argument.kind == ArgumentKind::kTensorMap) {
    return EncodeTensorMap(kernel, argument, *buffer, static_cast<cuda::TensorMap*>(parameter));
  }
  std::memcpy(parameter, &buffer->data, sizeof(buffer->data));
  return ffi::Error::Success();
}

ffi::Error PackInt32(const Call& call, const KernelSpec& kernel, std::string_view name,
                     void* parameter) {
  int64_t integer = 0;
  JAX_FLASH_RETURN_IF_ERROR(FindInteger(call, kernel, name, &integer));
  const auto narrow = static_cast<int32_t>(integer);
  if (narrow != integer) {
    return InvalidArgument(Concat("value ", name, " = ", integer,
                                  " does not fit the int32 that the kernel takes [kernel ",
                                  kernel.name, "]"));
  }
  std::memcpy(parameter, &narrow, sizeof(narrow));
  return ffi::Error::Success();
}

ffi::Error PackFloat32(const Call& call, const KernelSpec& kernel, std::string_view name,
                       void* parameter) {
  const Value* value = call.FindValue(name);
  if (value == nullptr || !std::holds_alternative<float>(*value)) {
    return InvalidArgument(
        Concat(value == nullptr ? "the call has no value " : "value must be a float32: ", name,
               "; it has ", call.ValueNames(), " [kernel ", kernel.name, "]"));
  }
  std::memcpy(parameter, &std::get<float>(*value), sizeof(float));
  return ffi::Error::Success();
}

ffi::Error Pack(const Call& call, const KernelSpec& kernel, const KernelArgument& argument,
                void* parameter) {
  switch (argument.kind) {
    case ArgumentKind::kTensorMap:
    case ArgumentKind::kPointer:
    case ArgumentKind::kOptionalPointer:
      return PackBuffer(call, kernel, argument, parameter);
    case ArgumentKind::kInt32:
      return PackInt32(call, kernel, argument.name, parameter);
    case ArgumentKind::kFloat32:
      return PackFloat32(call, kernel, argument.name, parameter);
  }
  return InvalidArgument(Concat("unknown kind of argument [kernel ", kernel.name, "]"));
}

// Fills in the attributes that the kernel needs, and returns how many.
unsigned int SetLaunchAttributes(const KernelSpec& kernel, cuda::LaunchAttribute* attributes) {
  unsigned int count = 0;
  if (kernel.cluster_size() > 1) {
    cuda::LaunchAttribute& cluster = attributes[count++];
    cluster.id = cuda::LaunchAttributeId::kClusterDimension;
    cluster.value.cluster_dimension = {kernel.cluster[0], kernel.cluster[1], kernel.cluster[2]};
  }
  if (kernel.programmatic_launch) {
    cuda::LaunchAttribute& overlap = attributes[count++];
    overlap.id = cuda::LaunchAttributeId::kProgrammaticStreamSerialization;
    overlap.value.programmatic_stream_serialization_allowed = 1;
  }
  return count;
}

}  // namespace

ffi::Error Launch(const Call& call, const Kernel& kernel, int device_ordinal, cuda::Stream stream) {
  const KernelSpec& spec = kernel.spec();
  uint32_t grid_x = 0;
  JAX_FLASH_RETURN_IF_ERROR(
      EvaluateGrid(call, spec, kernel.multiprocessors(device_ordinal), &grid_x));

  // Laid out as in the kernel's parameter space, which keeps every argument aligned.
  alignas(cuda::TensorMap) std::byte parameters[kMaxParameterBytes];
  void* addresses[kMaxArguments];
  for (size_t i = 0; i < spec.arguments.size(); ++i) {
    addresses[i] = parameters + kernel.parameter_offsets()[i];
    JAX_FLASH_RETURN_IF_ERROR(Pack(call, spec, spec.arguments[i], addresses[i]));
  }

  cuda::LaunchAttribute attributes[2] = {};
  const cuda::LaunchConfig config = {
      /*grid_x=*/grid_x,
      /*grid_y=*/1,
      /*grid_z=*/1,
      /*block_x=*/spec.threads,
      /*block_y=*/1,
      /*block_z=*/1,
      /*shared_memory_bytes=*/spec.shared_memory_bytes,
      /*stream=*/stream,
      /*attributes=*/attributes,
      /*attribute_count=*/SetLaunchAttributes(spec, attributes),
  };
  JAX_FLASH_RETURN_IF_DRIVER_ERROR(spec.name, cuLaunchKernelEx, &config, kernel.function(),
                                   addresses, nullptr);
  return ffi::Error::Success();
}

}  // namespace jax_flash
