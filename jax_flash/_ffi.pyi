"""Types of the C++ extension (sources in ffi/)."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

# (kind, operand, dtype, box_columns, box_rows, swizzle_bytes)
TensorMapArgument: TypeAlias = tuple[Literal["tensor_map"], str, str, int, int, int]
# (kind, operand, dtype)
PointerArgument: TypeAlias = tuple[Literal["pointer"], str, str]
# (kind, value_name)
ScalarArgument: TypeAlias = tuple[Literal["int32", "float32"], str]
KernelArgument: TypeAlias = TensorMapArgument | PointerArgument | ScalarArgument

ABI_VERSION: int
"""Version of this interface; must equal the manifest's."""

def registrations() -> dict[str, dict[str, object]]:
    """Handler capsules by FFI target name, then stage: what `jax.ffi.register_ffi_target` takes."""

def add_kernel(
    name: str,
    *,
    path: str,
    symbol: str,
    sha256: str,
    threads: int,
    cluster: tuple[int, int, int],
    shared_memory_bytes: int,
    programmatic_launch: bool,
    arguments: Sequence[KernelArgument],
    grid: Sequence[tuple[str, int]],
    resident_up_to: int,
) -> None:
    """Adds one kernel to the process-wide table that FFI calls name. Reads nothing from disk.

    Adding an equal kernel again does nothing.

    Args:
      name: "<arch>/<variant>", for example "sm_90a/forward_bf16_d128_causal".
      path: cubin file, read when a call first needs the kernel.
      symbol: the one kernel in the cubin.
      sha256: digest of the file, 64 hexadecimal digits.
      threads: threads per block.
      cluster: blocks per cluster in x, y, z.
      shared_memory_bytes: dynamic shared memory per block.
      programmatic_launch: let the kernel start before its predecessor on the stream has ended; only
        for kernels that wait for it themselves.
      arguments: kernel parameters in order.
      grid: the number of blocks is the product over (value_name, divisor) of ceil(value / divisor),
        rounded up to a multiple of the cluster's size.
      resident_up_to: in calls whose `query_length` is at most this, the grid has no more blocks
        than the device has multiprocessors (whole clusters, and at least one); 0 for no call.

    Raises:
      ValueError: a field is malformed, or `name` is in the table with different content.
    """

def kernel_names() -> list[str]:
    """Names in the kernel table, sorted."""

def driver_error() -> str:
    """Why the CUDA driver cannot be used, or "" when it can. Resolves the driver on first use."""
