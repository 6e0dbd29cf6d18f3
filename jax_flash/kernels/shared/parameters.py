"""Parameters that several kernels take, as records; ``spec.kernel_args`` has their order."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_flash.kernels.shared.dense import Dense, DenseArray
from jax_flash.kernels.shared.segments import SegmentArrays
from jax_flash.kernels.shared.sequence import SequenceArrays
from jax_flash.kernels.shared.soft_cap import SoftCap, make_soft_cap
from jax_flash.spec.problem import Support
from jax_flash.spec.variant import KernelVariant


class Features(NamedTuple):
    """What a call may have: null pointers, or 0, where it lacks them."""

    sequences: SequenceArrays
    segments: SegmentArrays
    soft_cap: Float32
    bias: cute.Pointer
    mask: cute.Pointer
    bias_axes: Int32
    mask_axes: Int32
    inverse_scale: Float32


class Sizes(NamedTuple):
    """Lengths of the operands, and their heads."""

    query_length: Int32
    key_length: Int32
    query_heads: Int32
    key_heads: Int32

    @property
    def query_rows(self):
        """Rows of queries: of a sequence, and how many heads have them."""
        return self.query_length, self.query_heads

    @property
    def key_rows(self):
        """Likewise of keys."""
        return self.key_length, self.key_heads


class Bounds(NamedTuple):
    """Lower and upper bound of the band; one that the mask lacks has no meaning."""

    lower: Int32
    upper: Int32


def dense_of(features: Features, sizes: Sizes) -> Dense:
    """Returns what a kernel knows of a bias and a mask."""
    return Dense(
        DenseArray(features.bias, features.bias_axes),
        DenseArray(features.mask, features.mask_axes),
        features.inverse_scale,
        sizes.query_heads,
        sizes.query_length,
        sizes.key_length,
    )


def changes_of_scores(
    variant: KernelVariant, features: Features, sizes: Sizes, scale_log2: Float32
) -> tuple[SoftCap | None, Dense | None]:
    """Returns soft cap, and bias and mask; None in kernels that do not support them."""
    if variant.support is not Support.GENERAL:
        return None, None
    return make_soft_cap(features.soft_cap, scale_log2), dense_of(features, sizes)
