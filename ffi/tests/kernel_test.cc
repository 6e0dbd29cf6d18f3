// Loading kernels: what goes wrong, and how it is said.

#include "ffi/kernel.h"

#include "ffi/sha256.h"
#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

// Prepares a kernel that must fail with `code`, twice: the second time must give the same error
// without another try.
std::string Failure(Kernel& kernel, ffi::ErrorCode code) {
  TakeLog();
  const ffi::Error first = kernel.Prepare(0);
  CHECK_EQ(static_cast<int>(*first.errc()), static_cast<int>(code));
  CHECK_CONTAINS(first.message(), "jax_flash: ");
  CHECK_CONTAINS(first.message(), Concat("[kernel ", kernel.spec().name, "] (kernel.cc:"));
  TakeLog();
  CHECK_EQ(kernel.Prepare(0).message(), first.message());
  CHECK(TakeLog().empty());
  return first.message();
}

std::string Failure(const KernelSpec& spec, ffi::ErrorCode code) {
  Kernel kernel(spec);
  return Failure(kernel, code);
}

// A kernel whose cubin has the given text, correctly listed.
KernelSpec WithCubin(const std::string& variant, const std::string& cubin) {
  KernelSpec spec = ForwardSpec(variant);
  spec.path = WriteFile(variant + "_other.cubin", cubin);
  spec.sha256 = Sha256Hex(cubin);
  return spec;
}

TEST(AMissingFile) {
  KernelSpec spec = ForwardSpec("missing");
  spec.path += ".gone";
  const std::string text = Failure(spec, ffi::ErrorCode::kNotFound);
  CHECK_CONTAINS(text, Concat("cannot open cubin ", spec.path, ": No such file or directory"));
  CHECK_CONTAINS(text, "reinstall jax_flash, or run python -m jax_flash.aot build");
}

TEST(AFileThatIsNotTheListedOne) {
  const KernelSpec spec = ForwardSpec("corrupt");
  WriteFile("corrupt.cubin", "something else");
  const std::string text = Failure(spec, ffi::ErrorCode::kDataLoss);
  CHECK_CONTAINS(text, Concat("cubin ", spec.path, " (14 bytes) is not the file"));
  CHECK_CONTAINS(text, Concat("expected sha256 ", spec.sha256));
  CHECK_CONTAINS(text, Concat("got ", Sha256Hex("something else"), ": reinstall jax_flash"));
}

TEST(AnImageThatTheDriverRefuses) {
  const std::string text = Failure(WithCubin("image", "not a cubin"), ffi::ErrorCode::kInternal);
  CHECK_CONTAINS(text, "cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE 200, refused by the fake");
}

TEST(TwoKernelsInOneCubin) {
  const std::string cubin = "fake cubin\nkernel two_kernel 0:4\nkernel other 0:4\n";
  CHECK_CONTAINS(Failure(WithCubin("two", cubin), ffi::ErrorCode::kFailedPrecondition),
                 "holds 2 kernels; must be 1");
}

TEST(AnotherSymbol) {
  CHECK_CONTAINS(
      Failure(WithCubin("symbol", "fake cubin\nkernel other 0:4\n"), ffi::ErrorCode::kInternal),
      "cuLibraryGetKernel: CUDA_ERROR_NOT_FOUND 500");
}

std::string ParameterFailure(const std::string& variant,
                             const std::vector<KernelArgument>& in_the_cubin) {
  return Failure(WithCubin(variant, FakeCubin(variant + "_kernel", in_the_cubin)),
                 ffi::ErrorCode::kFailedPrecondition);
}

TEST(OtherParametersThanListed) {
  const std::vector<KernelArgument> listed = ForwardSpec("listed").arguments;
  std::vector<KernelArgument> fewer(listed.begin(), listed.end() - 1);
  CHECK_CONTAINS(ParameterFailure("fewer", fewer),
                 "takes only 6 parameters; the manifest lists 7: reinstall");
  std::vector<KernelArgument> resized = listed;
  resized[4] = PointerTo("output", "bf16");
  CHECK_CONTAINS(ParameterFailure("resized", resized), "parameter 4 (scale) of the kernel in ");
  CHECK_CONTAINS(
      ParameterFailure("resized", resized),
      "has 8 bytes at offset 328; the manifest makes it 4 bytes at an offset from 328 to 331");
  std::vector<KernelArgument> moved = listed;
  std::swap(moved[0], moved[1]);
  CHECK_CONTAINS(ParameterFailure("moved", moved), "parameter 0 (query_heads) of the kernel in ");
}

// A kernel of a tensor map, a pointer and an int32 that the driver reports at the given offsets.
KernelSpec WithOffsets(const std::string& variant, size_t map, size_t pointer, size_t integer) {
  KernelSpec spec = MakeSpec(variant, {TensorMapOf("query", "bf16", 64, 64, 128),
                                       PointerTo("output", "bf16"), Int32("batch")});
  const std::string cubin = Concat("fake cubin\nkernel ", variant, "_kernel ", map, ":128 ",
                                   pointer, ":8 ", integer, ":4\n");
  spec.path = WriteFile(variant + "_other.cubin", cubin);
  spec.sha256 = Sha256Hex(cubin);
  return spec;
}

TEST(TheDriverMayPadTheFirstParameter) {
  CHECK_EQ(Kernel(WithOffsets("at_0", 0, 128, 136)).Prepare(0).message(), "");
  CHECK_EQ(Kernel(WithOffsets("at_48", 48, 176, 184)).Prepare(0).message(), "");
  CHECK_CONTAINS(Failure(WithOffsets("at_64", 64, 192, 200), ffi::ErrorCode::kFailedPrecondition),
                 "parameter 0 (query) of the kernel in ");
  CHECK_CONTAINS(Failure(WithOffsets("gap", 0, 136, 144), ffi::ErrorCode::kFailedPrecondition),
                 "has 8 bytes at offset 136; the manifest makes it 8 bytes at an offset from 128");
  CHECK_CONTAINS(Failure(WithOffsets("overlap", 0, 128, 132), ffi::ErrorCode::kFailedPrecondition),
                 "parameter 2 (batch) of the kernel in ");
}

TEST(AnUnreadableFile) {
  KernelSpec spec = ForwardSpec("folder");
  spec.path.erase(spec.path.rfind('/'));
  CHECK_CONTAINS(Failure(spec, ffi::ErrorCode::kNotFound),
                 Concat("cannot read cubin ", spec.path, ": Is a directory"));
}

TEST(AnotherArchitecture) {
  Kernel kernel(ForwardSpec("hopper"));
  {
    const ScopedEnvironment capability("JAX_FLASH_FAKE_COMPUTE_CAPABILITY", "10.0");
    CHECK_CONTAINS(Failure(kernel, ffi::ErrorCode::kFailedPrecondition),
                   "compiled for sm_90a, but device 0 has compute capability 10.0: pass "
                   "implementation=\"xla\"");
  }
  CHECK(kernel.Prepare(1).success());  // another device, another outcome
  KernelSpec spec = ForwardSpec("nonsense");
  spec.name = "hopper/nonsense";
  CHECK_CONTAINS(Failure(spec, ffi::ErrorCode::kInvalidArgument),
                 "architecture \"hopper\" must be like sm_90a");
}

TEST(EveryFailureOfTheDriverIsReported) {
  for (const char* function :
       {"cuDeviceGet", "cuDeviceGetAttribute", "cuLibraryLoadData", "cuLibraryGetKernelCount",
        "cuLibraryGetKernel", "cuKernelGetParamInfo", "cuKernelSetAttribute",
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuKernelGetFunction"}) {
    const std::string fail = Concat(function, ":209");
    const ScopedEnvironment injected("JAX_FLASH_FAKE_FAIL", fail.c_str());
    CHECK_CONTAINS(Failure(ForwardSpec(Concat("fails_", function)), ffi::ErrorCode::kInternal),
                   Concat("jax_flash: ", function, ": CUDA_ERROR_NO_BINARY_FOR_GPU 209, "));
  }
}

TEST(FailuresOfALaunchAreReported) {
  const std::string name = Add(ForwardSpec("launch"));
  for (const char* function : {"cuTensorMapEncodeTiled", "cuLaunchKernelEx"}) {
    const std::string fail = Concat(function, ":1");
    const ScopedEnvironment injected("JAX_FLASH_FAKE_FAIL", fail.c_str());
    const Outcome outcome = ForwardCall(name).Execute();
    CHECK_EQ(outcome.code, XLA_FFI_Error_Code_INTERNAL);
    CHECK_CONTAINS(outcome.message, Concat("jax_flash: ", function, ": CUDA_ERROR_INVALID_VALUE"));
    CHECK_CONTAINS(outcome.message, "[kernel sm_90a/launch] (");
  }
  CHECK(ForwardCall(name).Execute().ok());
}

TEST(AResultThatTheDriverCannotNameIsANumber) {
  const ScopedEnvironment injected("JAX_FLASH_FAKE_FAIL", "cuLibraryLoadData:12345");
  CHECK_CONTAINS(Failure(ForwardSpec("unnamed"), ffi::ErrorCode::kInternal),
                 "cuLibraryLoadData: CUresult 12345 [kernel");
}

TEST(TooMuchSharedMemory) {
  KernelSpec spec = ForwardSpec("shared");
  spec.shared_memory_bytes = 228 * 1024;
  CHECK_CONTAINS(Failure(spec, ffi::ErrorCode::kInternal),
                 "cuKernelSetAttribute: CUDA_ERROR_INVALID_VALUE");
}

}  // namespace
}  // namespace jax_flash::testing
