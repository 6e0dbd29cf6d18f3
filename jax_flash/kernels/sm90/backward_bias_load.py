"""Producer warp of the kernel of a bias's gradient: TMA loads of Q with K, and of dO with V."""

import cutlass
import cutlass.cute as cute

from jax_flash.kernels.shared.division import divide


@cute.jit
def load(ctx: cutlass.Constexpr):
    """Loads what the consumers multiply, in their order, as soon as buffers are free."""
    # Bound methods are read once: the DSL would carry `ctx` through the loop as if they changed it.
    load_query, load_key = ctx.query.load, ctx.key.load
    load_d_output, load_value = ctx.d_output.load, ctx.value.load
    scores_pipeline, weights_pipeline = ctx.scores_pipeline, ctx.weights_pipeline
    scores_state, weights_state = ctx.producer_state(), ctx.producer_state()
    batches, heads, query_tiles, _ = ctx.share
    consumers, keys_of = ctx.num_consumers, ctx.keys_of
    for batch in cutlass.range(batches.begin, batches.end, unroll=1):
        for head in cutlass.range(heads.begin, heads.end, unroll=1):
            key_head = divide(head, ctx.heads_per_group)
            for query_tile in cutlass.range(query_tiles.begin, query_tiles.end, unroll=1):
                _, begin, end = keys_of(batch, query_tile)
                for key_tile in cutlass.range(begin, end, unroll=1):
                    scores_pipeline.producer_acquire(scores_state)
                    barrier = scores_pipeline.producer_get_barrier(scores_state)
                    stage = scores_state.index
                    for consumer in cutlass.range_constexpr(consumers):
                        rows = query_tile * consumers + consumer
                        load_query(stage * consumers + consumer, rows, head, batch, barrier)
                    load_key(stage, key_tile, key_head, batch, barrier)
                    scores_state.advance()
                    weights_pipeline.producer_acquire(weights_state)
                    barrier = weights_pipeline.producer_get_barrier(weights_state)
                    stage = weights_state.index
                    for consumer in cutlass.range_constexpr(consumers):
                        rows = query_tile * consumers + consumer
                        load_d_output(stage * consumers + consumer, rows, head, batch, barrier)
                    load_value(stage, key_tile, key_head, batch, barrier)
                    weights_state.advance()
