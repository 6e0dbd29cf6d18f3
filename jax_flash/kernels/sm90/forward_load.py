"""Producer warp of the forward kernel: TMA loads of Q, K and V."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def load(ctx: cutlass.Constexpr, begin: Int32, end: Int32):
    """Loads each consumer's queries, then key and value tiles ``end - 1`` down to ``begin``."""
    for consumer in cutlass.range_constexpr(ctx.num_consumers):
        barrier = ctx.query_barriers + consumer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, ctx.query.tile_bytes)
        tile = ctx.query_tile * ctx.num_consumers + consumer
        ctx.query.load(consumer, tile, ctx.head, ctx.batch, barrier)
    # Bound methods are read once: the DSL would carry `ctx` through the loop as if they changed it.
    load_key, load_value = ctx.key.load, ctx.value.load
    key_head = ctx.head // ctx.heads_per_group
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state = ctx.producer_state()
    value_state = ctx.producer_state()
    for step in cutlass.range(end - begin, unroll=1):
        tile = end - 1 - step
        key_pipeline.producer_acquire(key_state)
        barrier = key_pipeline.producer_get_barrier(key_state)
        load_key(key_state.index, tile, key_head, ctx.batch, barrier)
        key_state.advance()
        value_pipeline.producer_acquire(value_state)
        barrier = value_pipeline.producer_get_barrier(value_state)
        load_value(value_state.index, tile, key_head, ctx.batch, barrier)
        value_state.advance()
