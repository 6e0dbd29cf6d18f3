"""Tiles of work from a counter in global memory, handed out to the warps of a block.

The warp that loads takes a tile, early enough that the wait for the counter is hidden, and passes
its rank to the others through shared memory::

    load    wait for "empty" -> add 1 to the counter, store its last value -> arrive on "full"
    others  wait for "full" -> read the rank -> arrive on "empty"

Every block ends with a rank that is past the last tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.sm90 import pipelines

SLOTS = 2
"""Ranks that a block keeps: of this round and of the next."""


class TileCounter(NamedTuple):
    """The counter, and where a block keeps the ranks that it has taken."""

    taken: cute.Pointer
    """How many tiles all blocks have taken, in global memory. Zero before the kernel starts."""
    ranks: cute.Tensor
    full_barriers: cute.Pointer
    empty_barriers: cute.Pointer


def allocate(memory: cutlass.memory.SmemAllocator, taken: cute.Pointer) -> TileCounter:
    """Allocates the shared memory of a block for a counter, ``taken``."""
    return TileCounter(
        taken,
        memory.allocate_tensor(Int32, cute.make_layout(SLOTS), byte_alignment=8),
        memory.allocate_array(cutlass.Int64, SLOTS),
        memory.allocate_array(cutlass.Int64, SLOTS),
    )


def init_barriers(counter: TileCounter, readers: int) -> None:
    """Initialises the barriers, in one warp, for so many warps that call ``read_rank``."""
    pipelines.init_barriers(counter.full_barriers, SLOTS, 1)
    pipelines.init_barriers(counter.empty_barriers, SLOTS, readers)


@cute.jit
def take_rank(counter: cutlass.Constexpr, round_: Int32):
    """Takes the tile of a round, in the one warp that does; returns its rank.

    ``counter`` is the block's ``TileCounter``, or None where tiles are not handed out: then the
    rank is the round.
    """
    rank = round_
    if cutlass.const_expr(counter is not None):
        slot, phase = round_ % SLOTS, round_ // SLOTS % 2
        # The first of each find theirs empty: waiting for the phase before it returns at once.
        cute.arch.mbarrier_wait(counter.empty_barriers + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            # Relaxed: what the tiles before wrote is read behind semaphores of its own.
            rank = cute.arch.atomic_add(counter.taken, Int32(1), sem="relaxed", scope="gpu")
            counter.ranks[slot] = rank
            cute.arch.mbarrier_arrive(counter.full_barriers + slot)
        rank = cute.arch.shuffle_sync(rank, offset=0)
    return rank


@cute.jit
def read_rank(counter: cutlass.Constexpr, round_: Int32):
    """Returns, in each other warp, the rank that was taken for a round."""
    rank = round_
    if cutlass.const_expr(counter is not None):
        slot, phase = round_ % SLOTS, round_ // SLOTS % 2
        cute.arch.mbarrier_wait(counter.full_barriers + slot, phase)
        # Every lane has read it once this is known to be the same in all of them.
        rank = cute.arch.make_warp_uniform(counter.ranks[slot])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(counter.empty_barriers + slot)
    return rank
