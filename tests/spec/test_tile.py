"""Tiles check themselves, and those in the table fit the hardware."""

from typing import Any

import pytest

from jax_flash.spec.arch import Arch
from jax_flash.spec.tile import AnyBackwardTile, BackwardTile, ForwardTile, SplitBackwardTile
from jax_flash.spec.tile_table import (
    BACKWARD_TILES,
    BACKWARD_TILES_WITH_SUPPORT,
    FORWARD_TILES,
    FORWARD_TILES_WITH_SUPPORT,
)

BACKWARD: dict[str, Any] = {
    "head_dim": 64,
    "tile_q": 128,
    "tile_kv": 128,
    "num_stages": 2,
    "num_consumer_warpgroups": 2,
}
FORWARD: dict[str, Any] = BACKWARD | {"value_head_dim": 64}
BACKWARD["overlap_d_key"] = False
SPLIT: dict[str, Any] = {
    "head_dim": 256,
    "value_head_dim": 192,
    "tile_q": 64,
    "tile_kv": 64,
    "num_stages": 2,
    "num_weight_stages": 1,
    "num_key_stages": 2,
    "num_value_stages": 1,
}


@pytest.mark.parametrize(
    ("fields", "change", "text"),
    [
        (FORWARD, {"head_dim": 40}, "head dimension 40 is not a multiple of 64 up to 256"),
        (FORWARD, {"value_head_dim": 32}, "head dimension 32 is not a multiple of 64 up to 256"),
        (
            FORWARD | {"output_in_query": True},
            {"value_head_dim": 128},
            "output_in_query: 128 columns do not fit into 64",
        ),
        (FORWARD, {"tile_q": 192}, "tile_q=192 is not 64 rows for each of 2 consumer"),
        (FORWARD, {"tile_kv": 120}, "tile_kv=120 is not a multiple of 16 up to 256"),
        (FORWARD, {"tile_kv": 272}, "tile_kv=272 is not a multiple of 16 up to 256"),
        (FORWARD, {"num_stages": 1}, "num_stages=1: overlap needs at least 2"),
        (FORWARD, {"query_stages": 3}, "query_stages=3 is not 1 or 2"),
        (
            FORWARD | {"output_in_query": True},
            {"query_stages": 2},
            "query_stages=2, and the output takes the only one",
        ),
        (BACKWARD, {"head_dim": 320}, "head dimension 320 is not a multiple of 64 up to 256"),
        (BACKWARD, {"tile_kv": 64}, "tile_kv=64 is not 64 rows for each of 2 consumer"),
        (BACKWARD, {"tile_q": 96}, "tile_q=96 is not a multiple of 64"),
        (BACKWARD, {"num_stages": 0}, "num_stages=0 is not positive"),
        (SPLIT, {"value_head_dim": 72}, "head dimension 72 is not a multiple of 64 up to 256"),
        (SPLIT, {"tile_q": 192}, "tile_q=192 is neither 64 nor 128"),
        (SPLIT, {"tile_kv": 128}, "tile_kv=128 is not the 64 rows of a warpgroup"),
        (SPLIT, {"num_stages": 0}, "num_stages=0 is not positive"),
        (SPLIT, {"num_weight_stages": 0}, "num_weight_stages=0 is not positive"),
        (SPLIT, {"num_value_stages": 0}, "num_value_stages=0 is not positive"),
        (SPLIT, {"num_key_stages": 1}, "num_key_stages=1: .* needs at least 2"),
    ],
)
def test_a_tile_that_the_instructions_cannot_do_is_refused(fields, change, text):
    tile = {id(BACKWARD): BackwardTile, id(SPLIT): SplitBackwardTile}.get(id(fields), ForwardTile)
    tile(**fields)
    with pytest.raises(ValueError, match=text):
        tile(**(fields | change))


def shared_memory_bytes(tile: ForwardTile | AnyBackwardTile) -> tuple[int, ...]:
    """Returns what the kernels of a tile need."""
    if isinstance(tile, SplitBackwardTile):
        return tile.kv_shared_memory_bytes, tile.q_shared_memory_bytes
    return (tile.shared_memory_bytes,)


@pytest.mark.parametrize(
    "table",
    [
        FORWARD_TILES,
        *FORWARD_TILES_WITH_SUPPORT.values(),
        BACKWARD_TILES,
        BACKWARD_TILES_WITH_SUPPORT,
    ],
)
def test_tiles_fit_a_block(table):
    for (arch, head_dims), tile in table.items():
        assert (tile.head_dim, tile.value_head_dim) == head_dims
        assert max(shared_memory_bytes(tile)) <= arch.limits.shared_memory_bytes
        assert tile.threads <= 1024


def test_shared_memory_of_a_forward_tile_by_hand():
    tile = ForwardTile(**FORWARD)
    # Q, O, two stages of K and of V, 128 rows of 64 two-byte elements each; 1 KiB of barriers.
    assert tile.shared_memory_bytes == 6 * 128 * 64 * 2 + 1024
    assert ForwardTile(**FORWARD, query_stages=2).shared_memory_bytes == 7 * 128 * 64 * 2 + 1024
    assert tile.threads == 3 * 128
    assert Arch.SM90A.limits.shared_memory_bytes == 227 * 1024


def test_shared_memory_of_a_split_tile_by_hand():
    tile = SplitBackwardTile(**SPLIT)
    # K and V; two stages of Q and dO, each row with two float32; P as float32; 1 KiB of barriers.
    rows = 64 * (256 + 192) * 2
    assert tile.kv_shared_memory_bytes == rows + 2 * (rows + 64 * 8) + 64 * 64 * 4 + 1024
    # Q and dO of 128 queries, two stages of K, one of V.
    assert tile.q_shared_memory_bytes == 2 * rows + 64 * (2 * 256 + 192) * 2 + 1024
    assert tile.threads == 3 * 128
