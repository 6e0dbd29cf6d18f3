// That ffi/cuda_driver_types.h declares what cuda.h declares. Built where a CUDA toolkit is found;
// it passes when it compiles.

#include <cuda.h>

#include <type_traits>

#include "ffi/cuda_driver_types.h"
#include "ffi/driver_api.h"
#include "ffi/tests/check.h"

namespace jax_flash::testing {
namespace {

#define SAME_NUMBER(ours, theirs) static_assert(static_cast<int>(cuda::ours) == theirs)
#define SAME_SIZE(ours, theirs) static_assert(sizeof(cuda::ours) == sizeof(theirs))
#define SAME_FIELD(ours, our_field, theirs, their_field)                            \
  static_assert(offsetof(cuda::ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(cuda::ours::our_field) == sizeof(theirs::their_field))

SAME_NUMBER(Result::kSuccess, CUDA_SUCCESS);
SAME_NUMBER(Result::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME_NUMBER(Result::kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME_NUMBER(Result::kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
SAME_NUMBER(Result::kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME_NUMBER(Result::kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME_NUMBER(Result::kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME_NUMBER(Result::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME_NUMBER(Result::kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME_NUMBER(DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_NUMBER(DeviceAttribute::kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_NUMBER(DeviceAttribute::kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_NUMBER(FunctionAttribute::kMaxDynamicSharedSizeBytes,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME_NUMBER(FunctionAttribute::kNonPortableClusterSizeAllowed,
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME_NUMBER(StreamCaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME_NUMBER(StreamCaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME_NUMBER(StreamCaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_NUMBER(LaunchAttributeId::kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME_NUMBER(LaunchAttributeId::kProgrammaticStreamSerialization,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME_NUMBER(TensorMapDataType::kUint8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
SAME_NUMBER(TensorMapDataType::kUint16, CU_TENSOR_MAP_DATA_TYPE_UINT16);
SAME_NUMBER(TensorMapDataType::kUint32, CU_TENSOR_MAP_DATA_TYPE_UINT32);
SAME_NUMBER(TensorMapDataType::kInt32, CU_TENSOR_MAP_DATA_TYPE_INT32);
SAME_NUMBER(TensorMapDataType::kUint64, CU_TENSOR_MAP_DATA_TYPE_UINT64);
SAME_NUMBER(TensorMapDataType::kInt64, CU_TENSOR_MAP_DATA_TYPE_INT64);
SAME_NUMBER(TensorMapDataType::kFloat16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME_NUMBER(TensorMapDataType::kFloat32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
SAME_NUMBER(TensorMapDataType::kFloat64, CU_TENSOR_MAP_DATA_TYPE_FLOAT64);
SAME_NUMBER(TensorMapDataType::kBfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME_NUMBER(TensorMapInterleave::kNone, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME_NUMBER(TensorMapSwizzle::kNone, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME_NUMBER(TensorMapSwizzle::k32B, CU_TENSOR_MAP_SWIZZLE_32B);
SAME_NUMBER(TensorMapSwizzle::k64B, CU_TENSOR_MAP_SWIZZLE_64B);
SAME_NUMBER(TensorMapSwizzle::k128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME_NUMBER(TensorMapL2Promotion::kNone, CU_TENSOR_MAP_L2_PROMOTION_NONE);
SAME_NUMBER(TensorMapL2Promotion::kL2_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_64B);
SAME_NUMBER(TensorMapL2Promotion::kL2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME_NUMBER(TensorMapL2Promotion::kL2_256B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME_NUMBER(TensorMapOutOfBoundsFill::kZeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

SAME_SIZE(Result, CUresult);
SAME_SIZE(Device, CUdevice);
SAME_SIZE(Stream, CUstream);
SAME_SIZE(Kernel, CUkernel);
SAME_SIZE(DeviceAttribute, CUdevice_attribute);
SAME_SIZE(FunctionAttribute, CUfunction_attribute);
SAME_SIZE(StreamCaptureMode, CUstreamCaptureMode);
SAME_SIZE(TensorMapDataType, CUtensorMapDataType);
SAME_SIZE(TensorMapSwizzle, CUtensorMapSwizzle);
SAME_SIZE(TensorMap, CUtensorMap);
SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME_SIZE(LaunchAttributeValue, CUlaunchAttributeValue);
SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME_FIELD(LaunchAttribute, id, CUlaunchAttribute, id);
SAME_FIELD(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_FIELD(LaunchAttributeValue, cluster_dimension, CUlaunchAttributeValue, clusterDim);
SAME_FIELD(LaunchAttributeValue, programmatic_stream_serialization_allowed, CUlaunchAttributeValue,
           programmaticStreamSerializationAllowed);
SAME_FIELD(LaunchConfig, grid_x, CUlaunchConfig, gridDimX);
SAME_FIELD(LaunchConfig, grid_y, CUlaunchConfig, gridDimY);
SAME_FIELD(LaunchConfig, grid_z, CUlaunchConfig, gridDimZ);
SAME_FIELD(LaunchConfig, block_x, CUlaunchConfig, blockDimX);
SAME_FIELD(LaunchConfig, block_y, CUlaunchConfig, blockDimY);
SAME_FIELD(LaunchConfig, block_z, CUlaunchConfig, blockDimZ);
SAME_FIELD(LaunchConfig, shared_memory_bytes, CUlaunchConfig, sharedMemBytes);
SAME_FIELD(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_FIELD(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_FIELD(LaunchConfig, attribute_count, CUlaunchConfig, numAttrs);

// Each pointer must take as many arguments as the function, each passed the same way.
template <typename Ours, typename Theirs>
struct SamePassing : std::false_type {};
template <typename... Ours, typename... Theirs>
struct SamePassing<cuda::Result (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<((sizeof(Ours) == sizeof(Theirs) &&
                           std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) &&
                          ...)> {};

#define SAME_CALL(function) \
  static_assert(SamePassing<decltype(DriverApi::function), decltype(&::function)>::value)

SAME_CALL(cuGetErrorName);
SAME_CALL(cuGetErrorString);
SAME_CALL(cuDeviceGet);
SAME_CALL(cuDeviceGetAttribute);
SAME_CALL(cuDevicePrimaryCtxRetain);
SAME_CALL(cuThreadExchangeStreamCaptureMode);
SAME_CALL(cuLibraryLoadData);
SAME_CALL(cuLibraryGetKernel);
SAME_CALL(cuLibraryGetKernelCount);
SAME_CALL(cuKernelSetAttribute);
SAME_CALL(cuKernelGetFunction);
SAME_CALL(cuKernelGetParamInfo);
SAME_CALL(cuTensorMapEncodeTiled);
SAME_CALL(cuLaunchKernelEx);
static_assert(SamePassing<decltype(DriverApi::cuDevicePrimaryCtxRelease),
                          decltype(&::cuDevicePrimaryCtxRelease_v2)>::value);
static_assert(
    SamePassing<decltype(DriverApi::cuCtxPushCurrent), decltype(&::cuCtxPushCurrent_v2)>::value);
static_assert(
    SamePassing<decltype(DriverApi::cuCtxPopCurrent), decltype(&::cuCtxPopCurrent_v2)>::value);

TEST(DeclarationsAgreeWithCudaH) {
  // A tensor map is aligned by whoever stores it, and the driver asks for 64 bytes.
  CHECK_EQ(alignof(cuda::TensorMap), size_t{64});
}

}  // namespace
}  // namespace jax_flash::testing
