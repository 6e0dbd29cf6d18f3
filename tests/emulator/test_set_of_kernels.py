"""What holds for all kernels together: how many there are, and what the build says of each."""

from __future__ import annotations

from pathlib import Path

from jax_flash.aot.instruction_mix import CLASS_NAMES
from jax_flash.spec.manifest import read_manifest
from jax_flash.spec.support import variants_to_build
from jax_flash.spec.variant import KernelRole

MOST_KERNELS = 150
MOST_BYTES = 40 * 2**20


def test_the_set_is_small(kernel_directory: Path) -> None:
    """Features are a kernel's arguments wherever that costs nothing; else they would multiply."""
    cubins = read_manifest(kernel_directory).cubins
    assert len(cubins) == len(variants_to_build()) < MOST_KERNELS
    assert sum((kernel_directory / cubin.file).stat().st_size for cubin in cubins) < MOST_BYTES


def test_every_kernel_is_described(kernel_directory: Path) -> None:
    without_softmax = {KernelRole.ROW_STATISTICS.value, KernelRole.FINISH_DQ.value}
    for cubin in read_manifest(kernel_directory).cubins:
        assert cubin.spill_bytes == 0, cubin.name
        assert 16 <= cubin.registers <= 255, cubin.name
        assert cubin.instructions, cubin.name
        assert cubin.instructions.keys() <= set(CLASS_NAMES), cubin.name
        assert "local_memory" not in cubin.instructions, cubin.name
        if not cubin.name.split("/")[1].startswith(tuple(without_softmax)):
            assert cubin.instructions["tensor_core"] > 0, cubin.name
            assert cubin.instructions["exp2"] > 0, cubin.name
