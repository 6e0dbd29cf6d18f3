"""Kernel variants: the compile-time key of one cubin, and its stable, readable name."""

from dataclasses import dataclass
from enum import Enum

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS, FULL, BandMask
from jax_flash.spec.problem import Support
from jax_flash.spec.tile import (
    AnyBackwardTile,
    BackwardBiasTile,
    BackwardTile,
    ForwardTile,
    SplitBackwardTile,
)
from jax_flash.spec.tile_table import (
    BACKWARD_BIAS_TILES,
    backward_tile,
    forward_tile,
    has_short_tile,
)


class KernelRole(Enum):
    """What a kernel does; the value is the first word of its name."""

    FORWARD = "forward"
    """Output and log-sum-exp."""
    ROW_STATISTICS = "row_statistics"
    """First step of backward: ``rowsum(dO * O) - dlse`` and the base-2 log-sum-exp; zeroes the
    accumulator, the semaphores and the tile counter where the next kernel uses any."""
    BACKWARD = "backward"
    """dK, dV and the float32 accumulator of dQ."""
    FINISH_DQ = "finish_dq"
    """Last step of backward: dQ from its accumulator."""
    BACKWARD_BIAS = "backward_bias"
    """Gradient of a dense bias, from the row statistics; always general."""
    BACKWARD_KV = "backward_kv"
    """dK and dV alone, where the tile is a ``SplitBackwardTile``."""
    BACKWARD_Q = "backward_q"
    """dQ alone, likewise."""

    @property
    def depends_on_band(self) -> bool:
        """Whether each mask has its own kernel."""
        return self not in (KernelRole.ROW_STATISTICS, KernelRole.FINISH_DQ)


_RAGGED_ROLES = (KernelRole.FORWARD, KernelRole.BACKWARD)


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
    support: Support = Support.BAND
    """Which features there are beyond a band; with any, the band has both bounds, and absent ones
    are null pointers and zeros. Kernels that serve all masks name the support of their tile."""
    short: bool = False
    """Whether a forward kernel is for few queries, with a tile of its own."""

    def __post_init__(self) -> None:
        """Refuses keys that name no distinct kernel."""
        serves_all = not self.role.depends_on_band
        if serves_all and (self.band != FULL or self.deterministic):
            raise ValueError(f"{self.role.value} kernels depend on neither band nor determinism")
        if (
            serves_all
            and self.support is not Support.BAND
            and backward_tile_of(self) == backward_tile(self.arch, self.head_dims)
        ):
            raise ValueError(f"this {self.role.value} kernel has the same tile when not general")
        if self.support is Support.RAGGED and self.role not in _RAGGED_ROLES:
            raise ValueError(f"there is no ragged {self.role.value} kernel; a general one serves")
        if self.support is not Support.BAND and not serves_all and self.band != BOTH_BOUNDS:
            raise ValueError(
                f"a {self.support.value} kernel has both bounds, not the band {self.band.name}"
            )
        if self.role is KernelRole.BACKWARD_BIAS and self.support is not Support.GENERAL:
            raise ValueError("kernels of a bias's gradient are general")
        if self.short and (
            self.role is not KernelRole.FORWARD
            or self.support is not Support.BAND
            or not has_short_tile(self.arch, self.head_dims, self.band)
        ):
            raise ValueError(f"no {self.role.value} kernel of {self.head_dims} for few queries")
        if self.deterministic and self.role is not KernelRole.BACKWARD:
            raise ValueError(
                f"every {self.role.value} kernel is deterministic; leave deterministic=False"
            )

    @property
    def name(self) -> str:
        """Stable name, ``<arch>/<role>_<dtype>_d<D>[v<Dv>][_<mask>][_deterministic][_short]``."""
        words = [self.role.value, self.dtype.value, _dims_name(*self.head_dims)]
        if self.support is not Support.BAND:
            words.append(self.support.value)
        elif self.role.depends_on_band:
            words.append(self.band.name)
        if self.deterministic:
            words.append("deterministic")
        if self.short:
            words.append("short")
        return f"{self.arch.value}/{'_'.join(words)}"


def _dims_name(head_dim: int, value_head_dim: int) -> str:
    return f"d{head_dim}" if head_dim == value_head_dim else f"d{head_dim}v{value_head_dim}"


def forward_tile_of(variant: KernelVariant) -> ForwardTile:
    """Returns the tile of a forward kernel."""
    return forward_tile(
        variant.arch,
        variant.head_dims,
        variant.band,
        support=variant.support,
        short=variant.short,
    )


def backward_tile_of(variant: KernelVariant) -> AnyBackwardTile:
    """Returns the tile of a kernel of the backward operation."""
    return backward_tile(variant.arch, variant.head_dims, support=variant.support)


def backward_bias_tile_of(variant: KernelVariant) -> BackwardBiasTile:
    """Returns the tile of a kernel of a bias's gradient."""
    return BACKWARD_BIAS_TILES[variant.arch, variant.head_dims]


def fused_backward_tile_of(variant: KernelVariant) -> BackwardTile:
    """Returns the tile of a kernel of an operation that computes all gradients in one.

    Raises:
      ValueError: the operation of these head dimensions has a pair of kernels.
    """
    tile = backward_tile_of(variant)
    if not isinstance(tile, BackwardTile):
        raise ValueError(f"{variant.name}: head dimensions {variant.head_dims} have a split tile")
    return tile


def split_backward_tile_of(variant: KernelVariant) -> SplitBackwardTile:
    """Returns the tile of a kernel of an operation with one kernel for dK and dV, one for dQ.

    Raises:
      ValueError: the operation of these head dimensions computes all gradients in one.
    """
    tile = backward_tile_of(variant)
    if not isinstance(tile, SplitBackwardTile):
        raise ValueError(f"{variant.name}: head dimensions {variant.head_dims} have no split tile")
    return tile
