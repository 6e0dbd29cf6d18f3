"""Kernel variants: the compile-time key of one cubin, and its stable, readable name."""

from dataclasses import dataclass
from enum import Enum

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import FULL, BandMask


class KernelRole(Enum):
    """What a kernel does; the value is the first word of its name."""

    FORWARD = "forward"
    """Output and log-sum-exp."""
    ROW_STATISTICS = "row_statistics"
    """First step of backward: ``rowsum(dO * O) - dlse`` and the base-2 log-sum-exp; zeroes the
    accumulator and the semaphores that the next kernel uses."""
    BACKWARD = "backward"
    """dK, dV and the float32 accumulator of dQ."""
    FINISH_DQ = "finish_dq"
    """Last step of backward: dQ from its accumulator."""


class DType(Enum):
    """Element types of queries, keys and values that kernels support."""

    BF16 = "bf16"
    F16 = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """The compile-time key of one cubin.

    ``band`` and ``deterministic`` are fixed to their defaults for the roles that do not depend on
    them, so that one cubin serves all.
    """

    role: KernelRole
    arch: Arch
    dtype: DType
    head_dims: tuple[int, int]
    """D and Dv of the tile; the operands' may be smaller."""
    band: BandMask = FULL
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuses keys that name no distinct kernel."""
        if self.role in (KernelRole.ROW_STATISTICS, KernelRole.FINISH_DQ) and (
            self.band != FULL or self.deterministic
        ):
            raise ValueError(f"{self.role.value} kernels depend on neither band nor determinism")
        if self.role is KernelRole.FORWARD and self.deterministic:
            raise ValueError("every forward kernel is deterministic; leave deterministic=False")

    @property
    def name(self) -> str:
        """Stable name, ``<arch>/<role>_<dtype>_d<D>[v<Dv>][_<band>][_deterministic]``."""
        words = [self.role.value, self.dtype.value, _dims_name(*self.head_dims)]
        if self.role in (KernelRole.FORWARD, KernelRole.BACKWARD):
            words.append(self.band.name)
        if self.deterministic:
            words.append("deterministic")
        return f"{self.arch.value}/{'_'.join(words)}"


def _dims_name(head_dim: int, value_head_dim: int) -> str:
    return f"d{head_dim}" if head_dim == value_head_dim else f"d{head_dim}v{value_head_dim}"
