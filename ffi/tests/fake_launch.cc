// The fake driver's launches and tensor maps.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "ffi/tests/fake_state.h"

namespace jax_flash::cuda {
namespace {

using testing::FakeTensorMap;

template <typename T>
std::string Join(const T* numbers, size_t count) {
  std::ostringstream text;
  for (size_t i = 0; i < count; ++i) text << (i == 0 ? "" : ", ") << numbers[i];
  return text.str();
}

std::string Hex(const void* bytes, size_t count) {
  std::string text;
  char digits[3];
  for (size_t i = 0; i < count; ++i) {
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char*>(bytes)[i]);
    text += digits;
  }
  return text;
}

uint32_t ElementBytes(TensorMapDataType type) {
  switch (type) {
    case TensorMapDataType::kUint8:
      return 1;
    case TensorMapDataType::kUint16:
    case TensorMapDataType::kFloat16:
    case TensorMapDataType::kBfloat16:
      return 2;
    case TensorMapDataType::kUint32:
    case TensorMapDataType::kInt32:
    case TensorMapDataType::kFloat32:
      return 4;
    case TensorMapDataType::kUint64:
    case TensorMapDataType::kInt64:
    case TensorMapDataType::kFloat64:
      return 8;
  }
  return 0;
}

uint32_t SwizzleBytes(TensorMapSwizzle swizzle) {
  return swizzle == TensorMapSwizzle::kNone ? 0 : 16u << static_cast<int>(swizzle);
}

// The documented requirements for interleave NONE.
bool IsValid(const FakeTensorMap& map, uint32_t element_bytes, uint32_t swizzle_bytes) {
  if (map.address % 16 != 0) return false;
  for (int i = 0; i < 4; ++i) {
    if (map.extents[i] == 0 || map.extents[i] > (uint64_t{1} << 32)) return false;
    if (map.box[i] == 0 || map.box[i] > 256) return false;
    if (map.element_strides[i] == 0 || map.element_strides[i] > 8) return false;
  }
  for (const uint64_t stride : map.strides) {
    if (stride % 16 != 0 || stride >= (uint64_t{1} << 40)) return false;
  }
  const uint32_t row_bytes = map.box[0] * element_bytes;
  return row_bytes % 16 == 0 && (swizzle_bytes == 0 || row_bytes <= swizzle_bytes);
}

struct LaunchAttributes {
  unsigned int cluster[3] = {1, 1, 1};
  bool has_cluster = false;
  bool programmatic = false;
};

bool Read(const LaunchConfig& config, LaunchAttributes* attributes) {
  for (unsigned int i = 0; i < config.attribute_count; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    if (attribute.id == LaunchAttributeId::kClusterDimension) {
      const auto& cluster = attribute.value.cluster_dimension;
      attributes->has_cluster = true;
      attributes->cluster[0] = cluster.x;
      attributes->cluster[1] = cluster.y;
      attributes->cluster[2] = cluster.z;
    } else if (attribute.id == LaunchAttributeId::kProgrammaticStreamSerialization) {
      attributes->programmatic = attribute.value.programmatic_stream_serialization_allowed != 0;
    } else {
      return false;
    }
  }
  return true;
}

bool IsValid(const LaunchConfig& config, const LaunchAttributes& attributes,
             const KernelObject& kernel, int device) {
  const unsigned int grid[3] = {config.grid_x, config.grid_y, config.grid_z};
  const uint64_t threads = uint64_t{config.block_x} * config.block_y * config.block_z;
  unsigned int cluster_size = 1;
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || grid[i] > (i == 0 ? 0x7fffffffu : 65535u)) return false;
    if (attributes.cluster[i] == 0 || grid[i] % attributes.cluster[i] != 0) return false;
    cluster_size *= attributes.cluster[i];
  }
  if (cluster_size > (kernel.non_portable_cluster[device] ? 16u : 8u)) return false;
  if (config.shared_memory_bytes >
      static_cast<unsigned int>(kernel.max_dynamic_shared_bytes[device])) {
    return false;
  }
  return threads > 0 && threads <= 1024;
}

void LogLaunch(const LaunchConfig& config, const LaunchAttributes& attributes,
               const KernelObject& kernel, int device, void** parameters) {
  std::ostringstream line;
  const unsigned int grid[3] = {config.grid_x, config.grid_y, config.grid_z};
  const unsigned int block[3] = {config.block_x, config.block_y, config.block_z};
  line << "{\"call\": \"cuLaunchKernelEx\", \"kernel\": \"" << kernel.symbol << "\", \"grid\": ["
       << Join(grid, 3) << "], \"block\": [" << Join(block, 3)
       << "], \"shared_memory_bytes\": " << config.shared_memory_bytes << ", \"cluster\": ";
  if (attributes.has_cluster) {
    line << "[" << Join(attributes.cluster, 3) << "]";
  } else {
    line << "null";
  }
  line << ", \"programmatic_launch\": " << (attributes.programmatic ? "true" : "false")
       << ", \"device\": " << device << ", \"parameters\": [";
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    line << (i == 0 ? "\"" : ", \"") << Hex(parameters[i], kernel.parameters[i].second) << "\"";
  }
  line << "]}";
  Log(line.str());
}

}  // namespace

Result FakeTensorMapEncodeTiled(TensorMap* tensor_map, TensorMapDataType data_type, uint32_t rank,
                                void* address, const uint64_t* extents, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* element_strides,
                                TensorMapInterleave interleave, TensorMapSwizzle swizzle,
                                TensorMapL2Promotion l2_promotion,
                                TensorMapOutOfBoundsFill out_of_bounds_fill) {
  if (reinterpret_cast<uintptr_t>(tensor_map) % 64 != 0 || rank != 4) return Result::kInvalidValue;
  FakeTensorMap map{};
  map.magic = testing::kFakeTensorMapMagic;
  map.address = reinterpret_cast<uintptr_t>(address);
  std::copy_n(extents, 4, map.extents);
  std::copy_n(strides, 3, map.strides);
  std::copy_n(box, 4, map.box);
  std::copy_n(element_strides, 4, map.element_strides);
  map.rank = rank;
  map.data_type = static_cast<int32_t>(data_type);
  map.interleave = static_cast<int32_t>(interleave);
  map.swizzle = static_cast<int32_t>(swizzle);
  map.l2_promotion = static_cast<int32_t>(l2_promotion);
  map.out_of_bounds_fill = static_cast<int32_t>(out_of_bounds_fill);
  if (!IsValid(map, ElementBytes(data_type), SwizzleBytes(swizzle))) return Result::kInvalidValue;
  std::memcpy(tensor_map, &map, sizeof(map));
  return Result::kSuccess;
}

Result FakeLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters,
                          void** extra) {
  auto* kernel = reinterpret_cast<Kernel>(function);
  const uintptr_t stream = reinterpret_cast<uintptr_t>(config->stream);
  const auto device = static_cast<int>(stream - testing::kFakeStreams);
  if (!Known(kernel) || stream < testing::kFakeStreams || !IsDevice(device)) {
    return Result::kInvalidHandle;
  }
  // The real driver would load the kernel now, which a capture forbids.
  if (!kernel->loaded[device]) return Result::kStreamCaptureUnsupported;
  LaunchAttributes attributes;
  if (extra != nullptr || !Read(*config, &attributes) ||
      !IsValid(*config, attributes, *kernel, device)) {
    return Result::kInvalidValue;
  }
  LogLaunch(*config, attributes, *kernel, device, parameters);
  return Result::kSuccess;
}

}  // namespace jax_flash::cuda
