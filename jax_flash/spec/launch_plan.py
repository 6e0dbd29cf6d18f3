"""How a kernel is launched, and the buffers and kernel sequence of the two operations.

A grid is a product of ``ceil(value / divisor)`` factors laid out along x, so that heads times
batch never meet the 65,535 limit of y and z. The first factor varies fastest.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS, FULL, BandMask
from jax_flash.spec.buffers import (
    D_BIAS,
    D_OUTPUT,
    DENSE_FEATURES,
    INPUTS,
    KEY_AXES,
    OPTIONAL_OPERANDS,
    QUERY_AXES,
    RESULTS,
    ROW_AXES,
    ROW_STATISTICS,
    SEGMENT_OPERANDS,
    SEQUENCE_FEATURES,
    VALUE_AXES,
    Buffer,
)
from jax_flash.spec.problem import Feature, Support, support_of
from jax_flash.spec.tile import SplitBackwardTile
from jax_flash.spec.tile_table import (
    HeadDims,
    backward_tile,
    forward_tile,
    has_short_tile,
)
from jax_flash.spec.variant import (
    DType,
    KernelRole,
    KernelVariant,
    backward_bias_tile_of,
    backward_tile_of,
    forward_tile_of,
    fused_backward_tile_of,
    split_backward_tile_of,
)

ROW_KERNEL_THREADS = 256
"""Threads of a row-statistics or finish-dQ block; a block owns one query tile of one head."""

# Resident blocks overlap loading a tile with finishing the one before. On one H200 (bf16, D=128,
# full) that gave 550 instead of 488 TFLOP/s at T=1024, 626 instead of 619 at T=8192.
_ANY_LENGTH = 2**31 - 1

# At D=256 the next queries cannot be loaded early, and causal tiles, which differ in length, gain
# nothing. Resident against not, TFLOP/s at T = 512, 1024, 2048, 4096, 8192, 16384 (runs 18 and 19):
# D=64 223/185, 292/258, 375/352, 437/420, 470/463, 498/495; D=128 310/237, 434/357, 506/447,
# 584/541, 590/573, 631/617; (192, 128) -, -, 508/490, -, 623/615, -; D=256 284/304, 413/411,
# 512/517, 602/597, 647/645, 662/659.
_NOT_RESIDENT_IF_CAUSAL = (256, 256)

# Key tiles handed out by a counter against dealt out, TFLOP/s of the backward kernel at T = 512,
# 1024, 2048, 4096, 8192, 16384 (runs 33 to 36): D=128 causal 328/302, 436/420, 501/499, 536/517,
# 579/571, 590/591, heads 32 over 8 at 4096 547/536; D=128 full 462/465, 533/531, 556/566, -,
# 586/594, -; D=64 causal 286/289, 375/375, 437/440, -, 504/517, -. Against a block for every tile,
# deterministic: D=128 full 462/407, 517/489, 545/530, 571/550, 580/572, 585/578; causal 314/285,
# 415/389, 484/461, 538/520, 564/545, 576/562; D=64 causal 295/245, 368/327, 423/400, 458/441,
# 472/459, 473/471.
_HANDED_OUT_IF_CAUSAL = (128, 128)

# With documents of any length nobody knows in advance which tiles take longest, and the order in
# which the hardware starts blocks shares them out better, unless all are short: at T=16384, with 16
# documents, forward blocks took 0.89 ms resident and 0.75 not, backward ones 2.01 and 1.65
# (2026-11-30_nvidia-h200_visible_area_resident.csv, and of commit 8835512 the file without that).
_RAGGED_RESIDENT_UP_TO = {64: 4096, 128: 1024}


class Dealing(Enum):
    """How the blocks of a kernel get their tiles of work."""

    ONE_EACH = auto()
    """The grid has a block for every tile."""
    DEALT = auto()
    """Each has a share from the start. The grid may have a block for every tile, or fewer."""
    HANDED_OUT = auto()
    """Whoever needs one takes the next from a counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFactor:
    """One factor of the grid: ``ceil(value / divisor)`` of a dimension of the problem."""

    value: str
    divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Launch facts of a kernel that do not depend on the problem."""

    threads: int
    shared_memory_bytes: int
    grid: tuple[GridFactor, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic_launch: bool = False
    """May start before the previous kernel on the stream has finished (it waits by itself)."""
    resident_up_to: int = 0
    """With at most this many queries the grid is no larger than the device's multiprocessors, and
    each block works through several tiles; with more, there is a block for every tile."""
    dealing: Dealing = Dealing.ONE_EACH

    def blocks(self, dimensions: dict[str, int]) -> int:
        """Returns the number of blocks for named dimensions, e.g. ``{"batch": 2, ...}``."""
        total = 1
        for factor in self.grid:
            total *= -(-dimensions[factor.value] // factor.divisor)
        return total


def launch_plan(variant: KernelVariant) -> LaunchPlan:
    """Returns how to launch ``variant``."""
    heads = GridFactor(value="query_heads")
    resident_up_to, dealing = 0, Dealing.ONE_EACH
    if variant.role is KernelRole.FORWARD:
        forward = forward_tile_of(variant)
        tiles = GridFactor(value="query_length", divisor=forward.tile_q)
        threads, shared_memory_bytes = forward.threads, forward.shared_memory_bytes
        resident_up_to = _ANY_LENGTH
        if variant.support is not Support.BAND:
            resident_up_to = _RAGGED_RESIDENT_UP_TO.get(forward.head_dim, 0)
        elif variant.band.upper and variant.head_dims == _NOT_RESIDENT_IF_CAUSAL:
            resident_up_to = 0
        if resident_up_to > 0:
            dealing = Dealing.DEALT
    elif variant.role is KernelRole.BACKWARD:
        backward = fused_backward_tile_of(variant)
        tiles = GridFactor(value="key_length", divisor=backward.tile_kv)
        heads = GridFactor(value="key_heads")
        threads, shared_memory_bytes = backward.threads, backward.shared_memory_bytes
        dealing = _dealing_of_backward(variant)
        if dealing is not Dealing.ONE_EACH:
            resident_up_to = _ANY_LENGTH
    elif variant.role is KernelRole.BACKWARD_BIAS:
        return _backward_bias_plan(variant)
    elif variant.role is KernelRole.BACKWARD_KV:
        split = split_backward_tile_of(variant)
        tiles = GridFactor(value="key_length", divisor=split.tile_kv)
        heads = GridFactor(value="key_heads")
        threads, shared_memory_bytes = split.threads, split.kv_shared_memory_bytes
    elif variant.role is KernelRole.BACKWARD_Q:
        split = split_backward_tile_of(variant)
        tiles = GridFactor(value="query_length", divisor=split.owned_queries)
        threads, shared_memory_bytes = split.threads, split.q_shared_memory_bytes
    else:
        tiles = GridFactor(value="query_length", divisor=backward_tile_of(variant).tile_q)
        threads, shared_memory_bytes = ROW_KERNEL_THREADS, 0
        if variant.role is KernelRole.FINISH_DQ:
            shared_memory_bytes = fused_backward_tile_of(variant).staged_dq_bytes
    return LaunchPlan(
        threads=threads,
        shared_memory_bytes=shared_memory_bytes,
        grid=(tiles, heads, GridFactor(value="batch")),
        resident_up_to=resident_up_to,
        dealing=dealing,
    )


def _dealing_of_backward(variant: KernelVariant) -> Dealing:
    """Returns how key tiles get to blocks; deterministic ones wait for tiles of lower ranks.

    Those must have been taken before, by blocks that run: handed out they are, and also with a
    block for every tile, as the hardware starts blocks in order. Dealt out they might not be.
    """
    if variant.support is Support.RAGGED and variant.head_dims == (64, 64):
        return Dealing.ONE_EACH  # With a loop over tiles the compiler serialises its matmuls.
    if variant.deterministic or (variant.band.upper and variant.head_dims == _HANDED_OUT_IF_CAUSAL):
        return Dealing.HANDED_OUT
    return Dealing.DEALT if variant.support is Support.BAND else Dealing.ONE_EACH


def _backward_bias_plan(variant: KernelVariant) -> LaunchPlan:
    tile = backward_bias_tile_of(variant)
    return LaunchPlan(
        threads=tile.threads,
        shared_memory_bytes=tile.shared_memory_bytes,
        grid=(
            GridFactor(value="bias_keys", divisor=tile.tile_kv),
            GridFactor(value="bias_queries", divisor=tile.tile_q),
            GridFactor(value="bias_heads"),
            GridFactor(value="bias_batch"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A sequence of kernels that the launcher runs in one call."""

    target: str
    """Versioned name of the FFI target."""
    kernels: tuple[KernelVariant, ...]
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    """What the caller wants first, then workspaces: never assumed to be zero."""
    tile_q: int
    """Queries of a tile, which ``padded_query_length`` and ``query_tiles`` are counted in."""
    tile_kv: int
    """Keys of a tile, which ``key_tiles`` are counted in."""
    padded_head_dim: int
    """D of the tile."""
    packs_heads: bool = False
    """Whether the query heads of a group are rows of one head (``ops.packed_heads``)."""

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(operand.name for operand in self.operands)


def _optional_operands(
    features: frozenset[Feature], used: tuple[Feature, ...]
) -> tuple[Buffer, ...]:
    operands = tuple(OPTIONAL_OPERANDS[feature] for feature in used if feature in features)
    return operands + (SEGMENT_OPERANDS if Feature.SEGMENT_IDS in features else ())


def forward_operation(
    arch: Arch,
    dtype: DType,
    head_dims: HeadDims,
    band: BandMask,
    features: frozenset[Feature] = frozenset(),
    *,
    short: bool = False,
    packs_heads: bool = False,
) -> Operation:
    """Returns the forward operation, of a call with ``features``: output and log-sum-exp.

    ``short`` says that the call has few queries (``tile_table.is_short``), ``packs_heads`` that the
    query heads of a group are rows of one head. Kernels of a band alone take a row for a query, so
    they run such a call if nothing depends on where a query is.
    """
    support = support_of(features)
    if packs_heads and band != FULL and support is Support.BAND:
        support, band = Support.RAGGED, BOTH_BOUNDS
    short = short and support is Support.BAND and has_short_tile(arch, head_dims, band)
    tile = forward_tile(arch, head_dims, band, support=support, short=short)
    kernel = KernelVariant(
        role=KernelRole.FORWARD,
        arch=arch,
        dtype=dtype,
        head_dims=head_dims,
        band=band,
        support=support,
        short=short,
    )
    return Operation(
        target="jax_flash_forward_v1",
        kernels=(kernel,),
        operands=(
            *INPUTS,
            *_optional_operands(features, (Feature.SINKS, *SEQUENCE_FEATURES, *DENSE_FEATURES)),
        ),
        results=RESULTS,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        padded_head_dim=head_dims[0],
        packs_heads=packs_heads,
    )


def backward_operation(
    arch: Arch,
    dtype: DType,
    head_dims: HeadDims,
    band: BandMask,
    features: frozenset[Feature] = frozenset(),
    *,
    deterministic: bool,
) -> Operation:
    """Returns the backward operation: row statistics, then the gradients.

    These are the main kernel and finish-dQ, or where the tile is split the kernel of dK and dV and
    that of dQ, both of which are deterministic in any case. Sinks are no operand: the log-sum-exp
    accounts for them, and their own gradient is a sum over the row statistics.
    """
    plain_tile = backward_tile(arch, head_dims)
    support = support_of(features)
    if support is Support.RAGGED and isinstance(plain_tile, SplitBackwardTile):
        support = Support.GENERAL  # Wide heads have no ragged kernels of gradients.
    tile = backward_tile(arch, head_dims, support=support)
    base = KernelVariant(
        role=KernelRole.ROW_STATISTICS,
        arch=arch,
        dtype=dtype,
        head_dims=head_dims,
        # Ragged and general kernels share a tile, and with it this kernel and finish dQ.
        support=Support.BAND if tile == plain_tile else Support.GENERAL,
    )
    workspaces = [*ROW_STATISTICS]
    if isinstance(tile, SplitBackwardTile):
        roles = (KernelRole.BACKWARD_KV, KernelRole.BACKWARD_Q)
        gradients = [replace(base, role=role, band=band, support=support) for role in roles]
    else:
        main = replace(
            base, role=KernelRole.BACKWARD, band=band, deterministic=deterministic, support=support
        )
        gradients = [main, replace(base, role=KernelRole.FINISH_DQ)]
        workspaces += [
            Buffer(
                name="dq_accumulator",
                dtype="float32",
                axes=("query_heads", "padded_query_length", "padded_head_dim"),
            ),
            Buffer(name="dq_semaphores", dtype="int32", axes=("query_heads", "query_tiles")),
            Buffer(name="tile_counter", dtype="int32", axes=()),
        ]
    return Operation(
        target="jax_flash_backward_v1",
        kernels=(base, *gradients),
        operands=(
            *INPUTS,
            *RESULTS,
            D_OUTPUT,
            Buffer(name="d_lse", dtype="float32", axes=ROW_AXES),
            *_optional_operands(features, (*SEQUENCE_FEATURES, *DENSE_FEATURES)),
        ),
        results=(
            Buffer(name="d_query", dtype="input", axes=QUERY_AXES),
            Buffer(name="d_key", dtype="input", axes=KEY_AXES),
            Buffer(name="d_value", dtype="input", axes=VALUE_AXES),
            *workspaces,
        ),
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        padded_head_dim=head_dims[0],
    )


def backward_bias_operation(
    arch: Arch, dtype: DType, head_dims: HeadDims, features: frozenset[Feature]
) -> Operation:
    """Returns the operation of a bias's gradient, which takes results of the backward operation.

    It is one of its own, so that XLA leaves it out where nobody asks for that gradient.
    """
    kernel = KernelVariant(
        role=KernelRole.BACKWARD_BIAS,
        arch=arch,
        dtype=dtype,
        head_dims=head_dims,
        band=BOTH_BOUNDS,
        support=Support.GENERAL,
    )
    tile = backward_bias_tile_of(kernel)
    return Operation(
        target="jax_flash_backward_bias_v1",
        kernels=(kernel,),
        operands=(
            *INPUTS,
            D_OUTPUT,
            *ROW_STATISTICS,
            *_optional_operands(features, (*SEQUENCE_FEATURES, *DENSE_FEATURES)),
        ),
        results=(D_BIAS,),
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        padded_head_dim=head_dims[0],
    )
