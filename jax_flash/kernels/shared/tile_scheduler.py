"""Order of work of the forward kernel: which query tile, head and batch element comes next.

The grid is as large as the device holds at a time, and each block works through several tiles, so
that loading one overlaps finishing another. The order changes speed alone: no result depends on
which block computes it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.division import divide

HEADS_IN_SECTION = 8
"""Heads whose keys and values are worked on at a time, so that they stay in the L2 cache."""


class Schedule(NamedTuple):
    """The work of one block."""

    block: Int32
    blocks: Int32
    query_tiles: Int32
    query_heads: Int32
    rounds: Int32
    """Tiles of this block."""
    longest_first: bool


class Work(NamedTuple):
    """One query tile of one head."""

    query_tile: Int32
    head: Int32
    batch: Int32


@cute.jit
def _position(block: Int32, blocks: Int32, round_: Int32):
    """Returns a block's place in a round; every other round runs backwards.

    With the longest tiles first, the block that got the longest of one round so gets the shortest
    of the next.
    """
    return block if round_ % 2 == 0 else blocks - 1 - block


@cute.jit
def make_schedule(
    query_tiles: Int32, query_heads: Int32, batch: Int32, longest_first: cutlass.Constexpr
):
    """Returns the calling block's share of all query tiles."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    total = query_tiles * query_heads * batch
    rounds = Int32(1)
    if blocks < total:
        rounds = divide(total, blocks)
        if _position(block, blocks, rounds) < total - rounds * blocks:
            rounds += 1
    return Schedule(block, blocks, query_tiles, query_heads, rounds, longest_first)


@cute.jit
def work_of_round(schedule: cutlass.Constexpr, round_: Int32):
    """Returns the tile that a block works on in a round.

    With ``longest_first`` (causal: the last queries see the most keys) the tiles of a section of
    heads are ordered by length, so that short ones fill the end. Otherwise all tiles of a head
    follow each other, to read its keys and values from the L2 cache.
    """
    rank = round_ * schedule.blocks + _position(schedule.block, schedule.blocks, round_)
    tiles, heads = schedule.query_tiles, schedule.query_heads
    if cutlass.const_expr(not schedule.longest_first):
        head_and_batch = divide(rank, tiles)
        batch = divide(head_and_batch, heads)
        return Work(rank - head_and_batch * tiles, head_and_batch - batch * heads, batch)
    tiles_of_batch = tiles * heads
    batch = divide(rank, tiles_of_batch)
    in_batch = rank - batch * tiles_of_batch
    first_head = divide(in_batch, tiles * HEADS_IN_SECTION) * HEADS_IN_SECTION
    section_heads = cutlass.min(heads - first_head, HEADS_IN_SECTION)
    in_section = in_batch - first_head * tiles
    place = divide(in_section, section_heads)
    head = first_head + in_section - place * section_heads
    return Work(tiles - 1 - place, head, batch)
