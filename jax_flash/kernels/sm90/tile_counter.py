"""Tiles of work from a counter in global memory, handed out to the warps of a block.

The warp that loads takes a tile, early enough that the wait for the counter is hidden, and passes
its rank to the others through shared memory::

    load    wait for "empty" -> add 1 to the counter, store its last value -> arrive on "full"
    others  wait for "full" -> read the rank -> arrive on "empty"

There are two ranks in shared memory, of this round and of the next. Every block ends with a rank
that is past the last tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.sm90 import pipelines

ROUNDS_AHEAD = 2


class TileCounter(NamedTuple):
    """The counter, and where a block keeps the ranks that it has taken."""

    counter: cute.Pointer
    """Zero before the kernel starts."""
    ranks: cute.Tensor
    full_barriers: cute.Pointer
    empty_barriers: cute.Pointer


def allocate(memory: cutlass.memory.SmemAllocator, counter: cute.Pointer) -> TileCounter:
    """Allocates shared memory for what is taken from ``counter``, which is in global memory."""
    return TileCounter(
        counter,
        memory.allocate_tensor(Int32, cute.make_layout(ROUNDS_AHEAD), byte_alignment=8),
        memory.allocate_array(cutlass.Int64, ROUNDS_AHEAD),
        memory.allocate_array(cutlass.Int64, ROUNDS_AHEAD),
    )


def init_barriers(tiles: TileCounter, readers: int) -> None:
    """Initialises the barriers, in one warp, for so many warps that call ``read_rank``."""
    pipelines.init_barriers(tiles.full_barriers, ROUNDS_AHEAD, 1)
    pipelines.init_barriers(tiles.empty_barriers, ROUNDS_AHEAD, readers)


@cute.jit
def take_rank(tiles: cutlass.Constexpr, round_: Int32):
    """Takes the tile of a round, in the one warp that does; returns its rank.

    ``tiles`` is the block's ``TileCounter``, or None where tiles are not handed out: then the rank
    is the round.
    """
    rank = round_
    if cutlass.const_expr(tiles is not None):
        slot, phase = round_ % ROUNDS_AHEAD, round_ // ROUNDS_AHEAD % 2
        # The first of each find theirs empty: waiting for the phase before it returns at once.
        cute.arch.mbarrier_wait(tiles.empty_barriers + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            # Relaxed: what the tiles before wrote is read behind semaphores of its own.
            rank = cute.arch.atomic_add(tiles.counter, Int32(1), sem="relaxed", scope="gpu")
            tiles.ranks[slot] = rank
            cute.arch.mbarrier_arrive(tiles.full_barriers + slot)
        rank = cute.arch.shuffle_sync(rank, offset=0)
    return rank


@cute.jit
def read_rank(tiles: cutlass.Constexpr, round_: Int32):
    """Returns, in each other warp, the rank that was taken for a round."""
    rank = round_
    if cutlass.const_expr(tiles is not None):
        slot, phase = round_ % ROUNDS_AHEAD, round_ // ROUNDS_AHEAD % 2
        cute.arch.mbarrier_wait(tiles.full_barriers + slot, phase)
        # Every lane has read it once this is known to be the same in all of them.
        rank = cute.arch.make_warp_uniform(tiles.ranks[slot])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(tiles.empty_barriers + slot)
    return rank
