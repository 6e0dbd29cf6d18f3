"""Reduce warps of the backward kernel: add the block's parts of dQ to the global accumulator.

Blocks of different key tiles add to the same rows of dQ. The consumers leave a part in shared
memory, and a warp has it added by one bulk reduction, so that no warp that computes waits for
global memory::

    consumers     wait for "empty", store their share, arrive on "full" of this part's warp
    reduce warp   wait for "full" -> (when deterministic, wait for our turn) -> bulk reduction
                  -> shared memory has been read: arrive on "empty"
                  -> (when deterministic, the sums have landed: count up the semaphore)

Until its sums have landed and the semaphore is counted up, a warp is busy for longer than the
consumers need for a part. So there are two of them when deterministic, each with every second part.

Float addition does not associate, so equal bits need one order of summation: for each query tile,
the key tiles add in a fixed order, kept by a semaphore in global memory that counts how many have
added. Tiles are taken in the order of their turns (see ``spec.turns``), and a tile waits only for
those of earlier turns, so the wait always ends.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.visibility import view_of_query_tile
from jax_flash.kernels.sm90 import dq_accumulator
from jax_flash.kernels.sm90.query_tiles import first_visit, next_visit, number_of_visits
from jax_flash.kernels.sm90.tile_counter import read_rank
from jax_flash.spec.turns import turn_of


def reduce_warps(deterministic: bool) -> int:
    """Returns how many warps take the parts of a block in turns."""
    return 2 if deterministic else 1


@cute.jit
def wait_for_turn(semaphore: cute.Pointer, turn: Int32):
    """Waits until ``turn`` key tiles have added; their sums are then visible to reductions."""
    count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
    while count < turn:
        count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(semaphore: cute.Pointer):
    """Counts this block's reduction, once it has landed."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.fence_proxy("async.global")
    cute.arch.red(semaphore, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def reduce(ctx: cutlass.Constexpr, warp: Int32):
    """Adds the parts of a block that are this warp's, as the consumers visit query tiles."""
    lane = cute.arch.lane_idx()
    full, empty = ctx.dq_full_barriers + warp, ctx.dq_empty_barrier
    semaphores, head_tile = ctx.dq_semaphores, ctx.rows.head_tile
    accumulator, part, tile_shape = ctx.dq_accumulator, ctx.dq_shared, ctx.tile
    schedule, at, counter, warps = ctx.schedule, ctx.at, ctx.counter, ctx.reduce_warps
    part_number = Int32(0)
    round_ = Int32(0)
    place = read_rank(counter, round_)
    while place < schedule.places:
        own = at(place)
        head, tile = first_visit(own)
        for _visit in cutlass.range(number_of_visits(own), unroll=1):
            if part_number % warps == warp:
                place = head_tile(own.batch, head, tile)
                turn = Int32(0)
                if cutlass.const_expr(own.deterministic):
                    queries = view_of_query_tile(own.visibility, own.batch, tile)
                    turn = turn_of(own.key_tile, queries.begin)
                cute.arch.mbarrier_wait(full, part_number // warps % 2)
                # A thread waits for the bulk copies that it issued itself: always the first.
                if lane == 0:
                    if cutlass.const_expr(own.deterministic):
                        wait_for_turn(semaphores + place, turn)
                    destination = dq_accumulator.tile_start(accumulator, tile_shape, place)
                    dq_accumulator.reduce_tile(destination, part, tile_shape)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(empty)
                    if cutlass.const_expr(own.deterministic):
                        pass_turn(semaphores + place)
                cute.arch.sync_warp()
            part_number += 1
            head, tile = next_visit(own, head, tile)
        round_ += 1
        place = read_rank(counter, round_)
