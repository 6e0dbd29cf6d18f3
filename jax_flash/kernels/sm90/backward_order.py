"""Order warp of the deterministic backward kernel: whose turn it is to add to dQ.

Float addition does not associate, so equal bits need one order of summation: for each query tile,
the key tiles add in a fixed order, kept by a semaphore in global memory that counts how many have
added. This warp polls the semaphore and posts the result so that neither the round trips to
global memory nor the fence before the post is waited for by the warps that compute::

    order warp   wait for the semaphore to reach our turn -> "turn" barrier
    consumers    wait for "turn" (long since complete), add dQ, arrive on "added"
    order warp   wait for "added" -> fence -> count up the semaphore

Blocks start in the order of their turns (see ``backward``), and a block waits only
for blocks that have earlier turns, so the wait always ends.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.visibility import view_of_query_tile


@cute.jit
def turn_of(ctx: cutlass.Constexpr, tile: Int32):
    """Returns how many key tiles add to a query tile before this block's."""
    queries = view_of_query_tile(ctx.visibility, ctx.batch, tile)
    if cutlass.const_expr(ctx.descending):
        turn = queries.end - 1 - ctx.key_tile
    else:
        turn = ctx.key_tile - queries.begin
    return turn


@cute.jit
def order(ctx: cutlass.Constexpr, begin: Int32, end: Int32):
    """Keeps the turns of one block; one warp runs it."""
    lane = cute.arch.lane_idx()
    turn_barrier, added_barrier = ctx.turn_barrier, ctx.added_barrier
    semaphores, head_tile = ctx.dq_semaphores, ctx.head_tile
    phase = Int32(0)
    for member in cutlass.range(ctx.heads_per_group, unroll=1):
        head = ctx.key_head * ctx.heads_per_group + member
        for tile in cutlass.range(begin, end, unroll=1):
            semaphore = semaphores + head_tile(head, tile)
            turn = turn_of(ctx, tile)
            if lane == 0:
                count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
                while count < turn:
                    count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
                cute.arch.mbarrier_arrive(turn_barrier)
            cute.arch.sync_warp()
            cute.arch.mbarrier_wait(added_barrier, phase)
            if lane == 0:
                # The consumers' additions happened before "added"; the fence passes that on to
                # whoever reads the semaphore.
                cute.arch.fence_acq_rel_gpu()
                cute.arch.red(
                    semaphore, Int32(1), op="add", dtype="s32", sem="release", scope="gpu"
                )
            phase = phase ^ 1
