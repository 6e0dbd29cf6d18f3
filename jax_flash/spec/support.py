"""Which kernels are built, and why a problem has none: one source for build, dispatch and docs."""

from itertools import product

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS, FULL, BandMask
from jax_flash.spec.launch_plan import (
    backward_bias_operation,
    backward_operation,
    forward_operation,
)
from jax_flash.spec.problem import GENERAL_FEATURES, RAGGED_FEATURES, AttentionProblem, Feature
from jax_flash.spec.tile_table import (
    BACKWARD_BIAS_TILES,
    BACKWARD_TILES,
    FORWARD_TILES,
    HeadDims,
    smallest_tile_dims,
)
from jax_flash.spec.variant import DType, KernelVariant

KERNEL_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16}
"""Numpy dtype names that kernels exist for."""

_HEAD_DIM_STEP = 8

# The masks that ``band_mask.kernel_band`` maps every band to, and what other kernels add.
_NONE: frozenset[Feature] = frozenset()
_MASKS = (
    (FULL, _NONE),
    (BandMask(upper=True), _NONE),
    (BOTH_BOUNDS, _NONE),
    (BOTH_BOUNDS, RAGGED_FEATURES),
    (BOTH_BOUNDS, GENERAL_FEATURES),
)


def variants_to_build(arch: Arch | None = None) -> tuple[KernelVariant, ...]:
    """Returns every kernel to build, in a stable order, for one target or for all."""
    variants: dict[str, KernelVariant] = {}
    for target in Arch if arch is None else (arch,):
        operations = []
        for dtype, (arch_of_tile, dims), mask in product(DType, FORWARD_TILES, _MASKS):
            if arch_of_tile is target:
                operations += [
                    forward_operation(target, dtype, dims, *mask, short=short)
                    for short in (False, True)
                ]
        for dtype, (arch_of_tile, dims), mask in product(DType, BACKWARD_TILES, _MASKS):
            if arch_of_tile is target:
                operations += [
                    backward_operation(target, dtype, dims, *mask, deterministic=deterministic)
                    for deterministic in (False, True)
                ]
        for dtype, (arch_of_tile, dims) in product(DType, BACKWARD_BIAS_TILES):
            if arch_of_tile is target:
                operations.append(backward_bias_operation(target, dtype, dims, frozenset()))
        for operation in operations:
            variants |= {variant.name: variant for variant in operation.kernels}
    return tuple(variants[name] for name in sorted(variants))


def forward_tile_dims(problem: AttentionProblem, arch: Arch) -> HeadDims | None:
    """Returns the head dimensions of the forward kernel's tile, if there is a kernel."""
    return smallest_tile_dims(FORWARD_TILES, arch, problem.head_dims)


def backward_tile_dims(problem: AttentionProblem, arch: Arch) -> HeadDims | None:
    """Returns the head dimensions of the backward kernels' tile, if there are kernels."""
    return smallest_tile_dims(BACKWARD_TILES, arch, problem.head_dims)


def backward_bias_tile_dims(problem: AttentionProblem, arch: Arch) -> HeadDims | None:
    """Returns the head dimensions of the tile of the bias's gradient, if there is a kernel."""
    return smallest_tile_dims(BACKWARD_BIAS_TILES, arch, problem.head_dims)


def _fits(head_dims: HeadDims) -> bool:
    # Rows must be multiples of the 16 bytes that TMA and vector loads move.
    return all(head_dim > 0 and head_dim % _HEAD_DIM_STEP == 0 for head_dim in head_dims)


def reasons_unsupported(problem: AttentionProblem, arch: Arch) -> tuple[str, ...]:
    """Returns why no kernel of ``arch`` runs ``problem``; empty when one does.

    Each reason is a clause that says what was given and what kernels need.
    """
    reasons = []
    if problem.dtype not in KERNEL_DTYPES:
        reasons.append(f"dtype {problem.dtype} (kernels exist for {' and '.join(KERNEL_DTYPES)})")
    if not _fits(problem.head_dims) or forward_tile_dims(problem, arch) is None:
        reasons.append(
            f"head dimensions D={problem.head_dim}, Dv={problem.value_head_dim} "
            "(kernels exist for multiples of 8 up to 256)"
        )
    for name in ("query_length", "key_length"):
        # A symbolic length cannot be compared with 0; jax.export assumes dimensions of at least 1.
        if isinstance(length := getattr(problem, name), int) and length == 0:
            reasons.append(f"{name}=0 (kernels need at least one query and one key)")
    return tuple(reasons)
