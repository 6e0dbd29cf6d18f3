"""Tuned tiles, one row per kernel family; every row says where its numbers come from."""

from collections.abc import Iterable
from dataclasses import replace

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import FULL, BandMask
from jax_flash.spec.problem import Support
from jax_flash.spec.tile import (
    AnyBackwardTile,
    BackwardBiasTile,
    BackwardTile,
    ForwardTile,
    SplitBackwardTile,
)

# Interleaved timings on one H200 (driver 580.159, bf16, T=8192), TFLOP/s full / causal; all in
# benchmarks/results/2026-11-29_nvidia-h200_variants.csv.
# D=64: 192 queries in three warpgroups 522 / 487; 128 queries in two 416 / 411.
# weight_buffers=2: D=128 680 / 692 instead of 652 / 678, (192, 128) causal 732 instead of 720, but
# D=256 760 / 726 instead of 798 / 764 (2026-11-30_nvidia-h200_variants.csv); D=64 lacks registers.
# D=128: 128 keys a tile 624 / 587; 160 keys 607 / 573; 176 keys do not fit in 240 registers.
# query_stages=2 (run 28): D=64 full 477 instead of 453 at T=2048, 518 and 513 at 8192; D=128 causal
# 328 instead of 312 at T=512, 451 and 433 at 1024, 653 and 649 at 16384. Wider heads have no room.
_FORWARD_TILES = {
    Arch.SM90A: (
        ForwardTile(
            head_dim=64,
            value_head_dim=64,
            tile_q=192,
            tile_kv=128,
            num_stages=2,
            num_consumer_warpgroups=3,
            query_stages=2,
        ),
        ForwardTile(
            head_dim=128,
            value_head_dim=128,
            tile_q=128,
            tile_kv=128,
            num_stages=2,
            num_consumer_warpgroups=2,
            weight_buffers=2,
            query_stages=2,
        ),
        ForwardTile(
            head_dim=192,
            value_head_dim=128,
            tile_q=128,
            tile_kv=128,
            num_stages=2,
            num_consumer_warpgroups=2,
            weight_buffers=2,
            output_in_query=True,
        ),
        ForwardTile(
            head_dim=256,
            value_head_dim=256,
            tile_q=128,
            tile_kv=80,
            num_stages=2,
            num_consumer_warpgroups=2,
            output_in_query=True,
        ),
    ),
}

# dK and dV (64 keys x D, twice) live in registers; S and dP are 64 keys x tile_q each.
# D=128: overlap_d_key 560 / 543, without 517 / 497; three stages instead of two 558 / 543.
# D=64: overlap_d_key needs more than 240 registers with 128 queries a tile.
# Above 128, dK and dV go to a warpgroup each, and dQ to a kernel of its own; stages fill the shared
# memory (227 KB). Nothing was timed against it yet.
_BACKWARD_TILES: dict[Arch, tuple[AnyBackwardTile, ...]] = {
    Arch.SM90A: (
        BackwardTile(
            head_dim=64,
            tile_q=128,
            tile_kv=128,
            num_stages=2,
            num_consumer_warpgroups=2,
            overlap_d_key=False,
        ),
        BackwardTile(
            head_dim=128,
            tile_q=64,
            tile_kv=128,
            num_stages=2,
            num_consumer_warpgroups=2,
            overlap_d_key=True,
        ),
        SplitBackwardTile(
            head_dim=192,
            value_head_dim=128,
            tile_q=64,
            tile_kv=64,
            num_stages=3,
            num_weight_stages=2,
            num_key_stages=3,
            num_value_stages=2,
        ),
        SplitBackwardTile(
            head_dim=256,
            value_head_dim=256,
            tile_q=64,
            tile_kv=64,
            num_stages=2,
            num_weight_stages=2,
            num_key_stages=2,
            num_value_stages=1,
        ),
    ),
}


# S, dP and the gradient's tile are 64 queries x tile_kv each in registers.
_BACKWARD_BIAS_TILES = {
    Arch.SM90A: tuple(
        BackwardBiasTile(
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            tile_q=128,
            tile_kv=64,
            num_stages=num_stages,
            num_consumer_warpgroups=2,
        )
        for head_dim, value_head_dim, num_stages in (
            (64, 64, 2),
            (128, 128, 2),
            (192, 128, 1),
            (256, 256, 1),
        )
    ),
}


HeadDims = tuple[int, int]
"""``(D, Dv)``."""

FORWARD_TILES = {
    (arch, (tile.head_dim, tile.value_head_dim)): tile
    for arch, tiles in _FORWARD_TILES.items()
    for tile in tiles
}
BACKWARD_BIAS_TILES = {
    (arch, (tile.head_dim, tile.value_head_dim)): tile
    for arch, tiles in _BACKWARD_BIAS_TILES.items()
    for tile in tiles
}
BACKWARD_TILES = {
    (arch, (tile.head_dim, tile.value_head_dim)): tile
    for arch, tiles in _BACKWARD_TILES.items()
    for tile in tiles
}

# A query tile of 192 is too long for few queries. On one H200 (TFLOP/s, bf16, run 27) with it and
# with this one, B=32, N=16: full T=128 140/176, 256 179/220, 512 326/326; causal 65/80, 98/123,
# 209/217; B=16, N=32, T=1024 383/386, causal 281/302; but T=2048 454/407, causal 382/362.
SHORT_FORWARD_TILES = {
    (Arch.SM90A, (64, 64)): ForwardTile(
        head_dim=64,
        value_head_dim=64,
        tile_q=128,
        tile_kv=128,
        num_stages=2,
        num_consumer_warpgroups=2,
        query_stages=2,
    ),
}
"""Tiles of forward kernels for calls of few queries (:func:`is_short`), where there is another one
than in :data:`FORWARD_TILES`. They give the same bits."""

# Queries loaded early gain where tiles of work are short, and cost 1.5% where there are many keys
# and no mask: D=128 full T=256 410 instead of 347, 512 509 and 480, 1024 578 and 569, 2048 606 and
# 608, 4096 633 and 638, 8192 636 and 647, 16384 649 and 661 (run 28).
_FULL_FORWARD_TILES = {
    (Arch.SM90A, (128, 128)): replace(FORWARD_TILES[Arch.SM90A, (128, 128)], query_stages=1)
}
"""Tiles of forward kernels without a mask for calls of many queries, where they differ."""


def _with_one_set_of_weights(*head_dims: HeadDims) -> dict[tuple[Arch, HeadDims], ForwardTile]:
    keys = [(Arch.SM90A, dims) for dims in head_dims]
    return {key: replace(FORWARD_TILES[key], weight_buffers=1) for key in keys}


FORWARD_TILES_WITH_SUPPORT = {
    # With segments, three warpgroups of 160 registers have too few of them at D=64. At D=192, with
    # a second set of weights too, the compiler has too few and serialises the matmuls.
    Support.RAGGED: SHORT_FORWARD_TILES | _with_one_set_of_weights((192, 128)),
    # Reading a bias takes the registers that a second set of weights would.
    Support.GENERAL: SHORT_FORWARD_TILES | _with_one_set_of_weights((128, 128), (192, 128)),
}
"""Tiles of forward kernels of more support, where they differ from :data:`FORWARD_TILES`."""

# Likewise 128 queries a tile need more registers than there are at D=64.
BACKWARD_TILES_WITH_SUPPORT = {
    (Arch.SM90A, (64, 64)): BackwardTile(
        head_dim=64,
        tile_q=64,
        tile_kv=128,
        num_stages=2,
        num_consumer_warpgroups=2,
        overlap_d_key=True,
    ),
}
"""Tiles of backward kernels of more support that differ from :data:`BACKWARD_TILES`."""


def is_short(query_length: int, key_length: int) -> bool:
    """Whether a forward call is better off with a kernel for few queries."""
    return query_length <= 256 or max(query_length, key_length) <= 1024


def has_short_tile(arch: Arch, head_dims: HeadDims, band: BandMask) -> bool:
    """Whether there are two forward kernels of a band alone, one of them for few queries."""
    key = arch, head_dims
    return key in SHORT_FORWARD_TILES or (band == FULL and key in _FULL_FORWARD_TILES)


def forward_tile(
    arch: Arch,
    head_dims: HeadDims,
    band: BandMask,
    *,
    support: Support = Support.BAND,
    short: bool = False,
) -> ForwardTile:
    """Returns the tile of a forward kernel."""
    key = arch, head_dims
    plain = FORWARD_TILES[key]
    if support is not Support.BAND:
        return FORWARD_TILES_WITH_SUPPORT[support].get(key, plain)
    if short:
        return SHORT_FORWARD_TILES.get(key, plain)
    return _FULL_FORWARD_TILES.get(key, plain) if band == FULL else plain


def backward_tile(
    arch: Arch, head_dims: HeadDims, *, support: Support = Support.BAND
) -> AnyBackwardTile:
    """Returns the tile of the kernels of the backward operation."""
    plain = BACKWARD_TILES[arch, head_dims]
    if support is Support.BAND:
        return plain
    return BACKWARD_TILES_WITH_SUPPORT.get((arch, head_dims), plain)


def smallest_tile_dims(
    tiles: Iterable[tuple[Arch, HeadDims]], arch: Arch, dims: HeadDims
) -> HeadDims | None:
    """Returns the smallest head dimensions of ``tiles`` that hold ``dims``, if any do.

    ``tiles`` are the keys of :data:`FORWARD_TILES` or :data:`BACKWARD_TILES`.
    """
    of_arch = (padded for of, padded in tiles if of is arch)
    holding = [padded for padded in of_arch if padded[0] >= dims[0] and padded[1] >= dims[1]]
    return min(holding, key=sum, default=None)
