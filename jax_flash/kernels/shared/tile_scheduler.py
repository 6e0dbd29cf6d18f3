"""Order of work: which tile, of queries or of keys, head and batch element comes next.

The grid is as large as the device holds at a time, and each block works through several tiles, so
that loading one overlaps finishing another. The order changes speed alone: no result depends on
which block computes it.

Dealt out, a block knows its share from the start. Tiles of one length are dealt out in turns. Under
a causal mask the last queries see the most keys, and blocks that got more than their share would
end late. So most tiles are dealt out in pairs of one total length, a tile and its mirror image;
those left at the end longest first, back and forth.

Handed out, every block takes the next tile from a counter when it needs one, the longest of some
heads first (``sm90.tile_counter``). A tile is taken after those of lower ranks, by a block that
runs: it may wait for them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.division import divide
from jax_flash.spec.launch_plan import Dealing

ROUNDS_AT_THE_END = 4
"""Tiles of a block, at least, that are not dealt out in pairs: enough to even out the rest."""


class Schedule(NamedTuple):
    """The work of one block."""

    block: Int32
    blocks: Int32
    tiles: Int32
    """Of a head."""
    heads_of_batch: Int32
    heads: Int32
    """Of all batch elements."""
    places: Int32
    """What the places that ``work_at`` takes are below: the rounds of this block, 0, 1, ..., or
    where tiles are handed out the ranks of all tiles."""
    shares: "Shares | None"
    """None where all tiles are of one length."""
    heads_in_section: Int32
    """As in ``make_schedule``."""
    dealing: Dealing
    """Likewise."""


class Shares(NamedTuple):
    """How tiles of different lengths are dealt out."""

    paired_heads: Int32
    """Heads whose tiles are all in pairs."""
    paired_rounds: Int32
    """Pairs of a block; where those of ``paired_heads`` are too few, the longest tiles of the other
    heads come with their shortest."""
    pairs_of_rest: Int32
    """How many of these there are."""


class Work(NamedTuple):
    """One tile of one head."""

    tile: Int32
    head: Int32
    batch: Int32


@cute.jit
def make_schedule(
    tiles: Int32,
    heads_of_batch: Int32,
    batch: Int32,
    differ_in_length: cutlass.Constexpr,
    heads_in_section: Int32,
    dealing: cutlass.Constexpr,
):
    """Returns the calling block's share of all tiles.

    Args:
      tiles: of a head.
      heads_of_batch: of a batch element.
      batch: batch elements.
      differ_in_length: whether the later tiles of a head take longer.
      heads_in_section: heads whose tiles start side by side where they are not dealt out: few, so
        that what their tiles share stays in the L2 cache.
      dealing: how blocks get their tiles. Where they are not dealt out, the last tiles of a head
        start first, whether they take longer or the others wait for them.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    heads = heads_of_batch * batch
    places, shares = Int32(1), None
    if cutlass.const_expr(dealing is Dealing.DEALT):
        places, shares = _share(block, blocks, tiles, heads, differ_in_length)
    if cutlass.const_expr(dealing is Dealing.HANDED_OUT):
        places = tiles * heads
    return Schedule(
        block, blocks, tiles, heads_of_batch, heads, places, shares, heads_in_section, dealing
    )


@cute.jit
def _share(
    block: Int32, blocks: Int32, tiles: Int32, heads: Int32, differ_in_length: cutlass.Constexpr
):
    """Returns the number of tiles of a block, and how they are dealt out if they differ."""
    if cutlass.const_expr(not differ_in_length):
        return divide(tiles * heads - block + blocks - 1, blocks), None
    rounds = Int32(1)
    shares = Shares(Int32(0), Int32(0), Int32(0))
    if blocks < tiles * heads:
        to_pair = divide(tiles * heads, Int32(2)) - blocks * (ROUNDS_AT_THE_END // 2)
        two_heads = divide(cutlass.max(to_pair, 0), tiles)
        pairs = two_heads * tiles
        paired_rounds = divide(pairs + blocks - 1, blocks)
        shares = Shares(2 * two_heads, paired_rounds, paired_rounds * blocks - pairs)
        rest = tiles * (heads - 2 * two_heads) - 2 * shares.pairs_of_rest
        whole_rounds = divide(rest, blocks)
        rounds = 2 * paired_rounds + whole_rounds
        if _place_in_round(block, blocks, whole_rounds) < rest - whole_rounds * blocks:
            rounds += 1
    return rounds, shares


@cute.jit
def _place_in_round(block: Int32, blocks: Int32, round_: Int32):
    """Returns a block's place in a round; every other round runs backwards.

    With the longest tiles first, the block that got the longest of one round so gets the shortest
    of the next.
    """
    return block if round_ % 2 == 0 else blocks - 1 - block


@cute.jit
def work_at(schedule: cutlass.Constexpr, place: Int32):
    """Returns the tile that a block works on: in a round, or the one of a rank (``places``)."""
    block, blocks, tiles = schedule.block, schedule.blocks, schedule.tiles
    heads, shares = schedule.heads, schedule.shares
    tile, head = Int32(0), Int32(0)
    if cutlass.const_expr(schedule.dealing is Dealing.ONE_EACH):
        tile, head = _last_of_section(block, tiles, heads, schedule.heads_in_section)
    elif cutlass.const_expr(schedule.dealing is Dealing.HANDED_OUT):
        tile, head = _last_of_section(place, tiles, heads, schedule.heads_in_section)
    elif cutlass.const_expr(shares is None):
        # All tiles of a head follow each other, to read its keys and values from the L2 cache.
        rank = place * blocks + block
        head = divide(rank, tiles)
        tile = rank - head * tiles
    elif blocks >= tiles * heads:
        tile, head = _last_of_section(block, tiles, heads, schedule.heads_in_section)
    else:
        tile, head = _tile_of_share(block, blocks, tiles, heads, shares, place)
    batch = divide(head, schedule.heads_of_batch)
    return Work(tile, head - batch * schedule.heads_of_batch, batch)


@cute.jit
def _last_of_section(rank: Int32, tiles: Int32, heads: Int32, heads_in_section: Int32):
    """Returns tile and head at a rank when the last tiles of a section of heads come first.

    They are taken in this order: if the last take longest, short ones fill the end.
    """
    first_head = divide(rank, tiles * heads_in_section) * heads_in_section
    section_heads = cutlass.min(heads - first_head, heads_in_section)
    in_section = rank - first_head * tiles
    place = divide(in_section, section_heads)
    return tiles - 1 - place, first_head + in_section - place * section_heads


@cute.jit
def _tile_of_share(
    block: Int32,
    blocks: Int32,
    tiles: Int32,
    heads: Int32,
    shares: cutlass.Constexpr,
    round_: Int32,
):
    """Returns tile and head of a block in a round."""
    half = round_ % 2
    pair = divide(round_, Int32(2)) * blocks + block - divide(shares.paired_heads, Int32(2)) * tiles
    other_heads = heads - shares.paired_heads
    tile, head = Int32(0), Int32(0)
    if pair < 0:
        pair += divide(shares.paired_heads, Int32(2)) * tiles
        two_heads = divide(pair, tiles)
        place = pair - two_heads * tiles
        tile = place if half == 1 else tiles - 1 - place
        head = 2 * two_heads + half
    else:
        rank = pair if half == 0 else other_heads * tiles - 1 - pair
        round_at_end = round_ - 2 * shares.paired_rounds
        if round_at_end >= 0:
            place = _place_in_round(block, blocks, round_at_end)
            rank = shares.pairs_of_rest + round_at_end * blocks + place
        place = divide(rank, other_heads)
        tile = tiles - 1 - place
        head = shares.paired_heads + rank - place * other_heads
    return tile, head
