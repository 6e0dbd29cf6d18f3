#include "ffi/handlers.h"

#include <cstdint>
#include <string_view>

#include "ffi/call.h"
#include "ffi/cuda_driver_types.h"
#include "ffi/kernel.h"
#include "ffi/kernel_table.h"
#include "ffi/launch.h"
#include "ffi/status.h"

namespace jax_flash {
namespace {

ffi::ErrorOr<Kernel*> FindPrepared(std::string_view name, int32_t device_ordinal) {
  Kernel* kernel = KernelTable::Get().Find(name);
  if (kernel == nullptr) {
    return ffi::Unexpected(MakeError(
        ffi::ErrorCode::kNotFound,
        Concat("no kernel \"", name, "\" in this build: run the program with the jax_flash release",
               " that exported it, or build the kernel with python -m jax_flash.aot build")));
  }
  if (ffi::Error error = kernel->Prepare(device_ordinal); error.failure()) {
    return ffi::Unexpected(std::move(error));
  }
  return kernel;
}

ffi::Error Prepare(int32_t device_ordinal, ffi::RemainingArgs, ffi::RemainingRets,
                   ffi::Dictionary attributes) {
  ffi::ErrorOr<std::string_view> kernels = KernelsOf(attributes);
  if (kernels.has_error()) return kernels.error();
  while (!kernels->empty()) {
    const ffi::ErrorOr<Kernel*> kernel = FindPrepared(NextName(&*kernels), device_ordinal);
    if (kernel.has_error()) return kernel.error();
  }
  return ffi::Error::Success();
}

ffi::Error Execute(cuda::Stream stream, int32_t device_ordinal, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  ffi::ErrorOr<std::string_view> kernels = KernelsOf(attributes);
  if (kernels.has_error()) return kernels.error();
  Call call;
  JAX_FLASH_RETURN_IF_ERROR(call.Parse(operands, results, attributes));
  if (call.empty()) return ffi::Error::Success();
  while (!kernels->empty()) {
    // Prepared already, unless XLA came here without the prepare stage.
    const ffi::ErrorOr<Kernel*> kernel = FindPrepared(NextName(&*kernels), device_ordinal);
    if (kernel.has_error()) return kernel.error();
    JAX_FLASH_RETURN_IF_ERROR(Launch(call, **kernel, device_ordinal, stream));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_flash

namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashPrepare, jax_flash::Prepare,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashExecute, jax_flash::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jax_flash::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

#ifdef JAX_FLASH_TESTING
namespace jax_flash {
namespace {

ffi::Error ExecuteOnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                        ffi::Dictionary attributes) {
  return Execute(reinterpret_cast<cuda::Stream>(uintptr_t{0x5000}), 0, operands, results,
                 attributes);
}

}  // namespace
}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashExecuteOnCpu, jax_flash::ExecuteOnCpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
#endif
