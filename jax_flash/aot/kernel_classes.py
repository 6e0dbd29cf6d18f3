"""Which class builds the kernels of each role; importing this does not import ``cutlass``."""

from dataclasses import dataclass

from jax_flash.spec.variant import KernelRole


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClass:
    """Where the class is defined; the sources that this module imports decide the cubin."""

    module: str
    name: str


KERNEL_CLASSES = {
    KernelRole.FORWARD: KernelClass(module="jax_flash.kernels.sm90.forward", name="ForwardKernel"),
    KernelRole.ROW_STATISTICS: KernelClass(
        module="jax_flash.kernels.shared.row_statistics", name="RowStatisticsKernel"
    ),
    KernelRole.BACKWARD: KernelClass(
        module="jax_flash.kernels.sm90.backward", name="BackwardKernel"
    ),
    KernelRole.FINISH_DQ: KernelClass(
        module="jax_flash.kernels.sm90.finish_dq", name="FinishDqKernel"
    ),
    KernelRole.BACKWARD_BIAS: KernelClass(
        module="jax_flash.kernels.sm90.backward_bias", name="BackwardBiasKernel"
    ),
    KernelRole.BACKWARD_KV: KernelClass(
        module="jax_flash.kernels.sm90.backward_kv", name="BackwardKvKernel"
    ),
    KernelRole.BACKWARD_Q: KernelClass(
        module="jax_flash.kernels.sm90.backward_q", name="BackwardQKernel"
    ),
}
