// The part of the CUDA driver's binary interface that jax_flash uses, declared here so that
// building needs no CUDA toolkit. Field order, sizes and numbers are the driver's;
// ffi/tests/cuda_abi_test.cc compares every one of them with cuda.h where a toolkit is installed.

#ifndef JAX_FLASH_FFI_CUDA_DRIVER_TYPES_H_
#define JAX_FLASH_FFI_CUDA_DRIVER_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace jax_flash::cuda {

using Device = int;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Library = struct LibraryObject*;
using Kernel = struct KernelObject*;
using Function = struct FunctionObject*;

enum class Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kStreamCaptureUnsupported = 900,
};

enum class DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};

enum class FunctionAttribute : int {
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum class StreamCaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

enum class LaunchAttributeId : int {
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
};

union LaunchAttributeValue {
  char padding[64];
  struct {
    unsigned int x;
    unsigned int y;
    unsigned int z;
  } cluster_dimension;
  int programmatic_stream_serialization_allowed;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[4];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned int grid_x;
  unsigned int grid_y;
  unsigned int grid_z;
  unsigned int block_x;
  unsigned int block_y;
  unsigned int block_z;
  unsigned int shared_memory_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned int attribute_count;
};

// An opaque descriptor, filled in by cuTensorMapEncodeTiled and passed to a kernel by value.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

enum class TensorMapDataType : int {
  kUint8 = 0,
  kUint16 = 1,
  kUint32 = 2,
  kInt32 = 3,
  kUint64 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum class TensorMapInterleave : int { kNone = 0 };
enum class TensorMapSwizzle : int { kNone = 0, k32B = 1, k64B = 2, k128B = 3 };
enum class TensorMapL2Promotion : int { kNone = 0, kL2_64B = 1, kL2_128B = 2, kL2_256B = 3 };
enum class TensorMapOutOfBoundsFill : int { kZeros = 0 };

static_assert(sizeof(TensorMap) == 128);
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

}  // namespace jax_flash::cuda

#endif  // JAX_FLASH_FFI_CUDA_DRIVER_TYPES_H_
