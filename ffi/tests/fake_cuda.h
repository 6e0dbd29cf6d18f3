// libfakecuda.so: a CUDA driver for tests on machines without one. It keeps the books that the real
// driver keeps (libraries, kernels, contexts), refuses what the real one documents as an error, and
// logs what it is asked to do. It computes nothing.
//
// Environment, read at every call:
//   JAX_FLASH_FAKE_LOG                 file to which one JSON object a line is appended.
//   JAX_FLASH_FAKE_FAIL                "<function>:<CUresult>": that function fails.
//   JAX_FLASH_FAKE_MISSING             comma-separated functions that cuGetProcAddress does not
//   know. JAX_FLASH_FAKE_COMPUTE_CAPABILITY  "<major>.<minor>", 9.0 if unset.
//
// A cubin is a text file: the line "fake cubin", then for each kernel a line
//   kernel <symbol> <offset>:<bytes> ...
// with its parameters. Devices are 0 to 7; device d has 13 + d multiprocessors, and its stream the
// handle 0x5000 + d.

#ifndef JAX_FLASH_FFI_TESTS_FAKE_CUDA_H_
#define JAX_FLASH_FFI_TESTS_FAKE_CUDA_H_

#include <cstdint>

namespace jax_flash::testing {

inline constexpr int kFakeDevices = 8;
inline constexpr int kFakeMultiprocessors = 13;
inline constexpr uintptr_t kFakeStreams = 0x5000;
inline constexpr uint64_t kFakeTensorMapMagic = 0x70614d726f736e54;  // "TnsorMap"

// What the fake cuTensorMapEncodeTiled writes: its arguments.
struct FakeTensorMap {
  uint64_t magic;
  uint64_t address;
  uint64_t extents[4];
  uint64_t strides[3];
  uint32_t box[4];
  uint32_t element_strides[4];
  uint32_t rank;
  int32_t data_type;
  int32_t interleave;
  int32_t swizzle;
  int32_t l2_promotion;
  int32_t out_of_bounds_fill;
};
static_assert(sizeof(FakeTensorMap) == 128);

}  // namespace jax_flash::testing

#endif  // JAX_FLASH_FFI_TESTS_FAKE_CUDA_H_
