"""Producer warp of the forward kernel: TMA loads of Q, K and V."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.division import divide
from jax_flash.kernels.shared.tile_scheduler import work_at


@cute.jit
def load(ctx: cutlass.Constexpr):
    """Loads, for each tile of work, the consumers' queries and the key and value tiles they visit.

    Key tiles come from the last to the first. Loads of the next tile of work start as soon as
    buffers are free, while the consumers finish this one.
    """
    # Bound methods are read once: the DSL would carry `ctx` through the loop as if they changed it.
    load_key, load_value, view_of = ctx.key.load, ctx.value.load, ctx.view_of
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state, value_state = ctx.producer_state(), ctx.producer_state()
    for round_ in cutlass.range(ctx.schedule.places, unroll=1):
        work = work_at(ctx.schedule, round_)
        load_queries(ctx, work, round_)
        key_head = divide(work.head, ctx.heads_per_group)
        batch = work.batch
        view = view_of(work)
        for step in cutlass.range(view.end - view.begin, unroll=1):
            tile = view.end - 1 - step
            key_pipeline.producer_acquire(key_state)
            barrier = key_pipeline.producer_get_barrier(key_state)
            load_key(key_state.index, tile, key_head, batch, barrier)
            key_state.advance()
            value_pipeline.producer_acquire(value_state)
            barrier = value_pipeline.producer_get_barrier(value_state)
            load_value(value_state.index, tile, key_head, batch, barrier)
            value_state.advance()


@cute.jit
def load_queries(ctx: cutlass.Constexpr, work: cutlass.Constexpr, round_: Int32):
    """Loads 64 queries for each consumer, once it has read those that were in their buffer."""
    for consumer in cutlass.range_constexpr(ctx.num_consumers):
        buffer, phase = ctx.query_buffer(consumer, round_)
        full, empty = ctx.query_full + buffer, ctx.query_empty + buffer
        # A buffer is empty at first: waiting for the phase before that returns at once.
        cute.arch.mbarrier_wait(empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, ctx.query.tile_bytes)
        tile = work.tile * ctx.num_consumers + consumer
        ctx.query.load(buffer, tile, work.head, work.batch, full)
