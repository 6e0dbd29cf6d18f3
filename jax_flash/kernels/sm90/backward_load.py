"""Producer warp of a block that owns keys: TMA loads of K and V, then of Q and dO tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from jax_flash.kernels.sm90.query_tiles import first_visit, next_visit, number_of_visits
from jax_flash.kernels.sm90.tile_counter import take_rank


@cute.jit
def load_rows(
    source: cute.Tensor,
    destination: cute.Tensor,
    tile: Int32,
    stage: Int32,
    barrier: cute.Pointer,
):
    """Issues the bulk copy of a tile of row statistics from ``(tile_q, tiles)`` to a stage."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, source[None, tile], destination[None, stage], mbar_ptr=barrier)


@cute.jit
def load(ctx: cutlass.Constexpr):
    """Loads, in each round, the block's keys and values, then the query tiles that see them."""
    schedule, at, counter, empty = ctx.schedule, ctx.at, ctx.counter, ctx.key_empty_barrier
    query_state, d_output_state = ctx.producer_state(), ctx.producer_state()
    round_ = Int32(0)
    place = take_rank(counter, round_)
    while place < schedule.places:
        own = at(place)
        # The first round finds the buffers empty: waiting for the phase before it returns at once.
        cute.arch.mbarrier_wait(empty, (round_ + 1) % 2)
        load_keys(own)
        query_state, d_output_state = load_queries(own, query_state, d_output_state)
        round_ += 1
        place = take_rank(counter, round_)


@cute.jit
def load_keys(ctx: cutlass.Constexpr):
    """Loads 64 keys and values for each consumer."""
    for consumer in cutlass.range_constexpr(ctx.num_consumers):
        barrier = ctx.key_full_barriers + consumer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                barrier, ctx.key.tile_bytes + ctx.value.tile_bytes
            )
        tile = ctx.key_tile * ctx.num_consumers + consumer
        ctx.key.load(consumer, tile, ctx.key_head, ctx.batch, barrier)
        ctx.value.load(consumer, tile, ctx.key_head, ctx.batch, barrier)


@cute.jit
def load_queries(ctx: cutlass.Constexpr, query_state: PipelineState, d_output_state: PipelineState):
    """Loads the query tiles that a block visits.

    Q comes with the log-sum-exp, dO with delta. Returns the pipelines' positions.
    """
    # Bound methods are read once: the DSL would carry `ctx` through the loop as if they changed it.
    load_query, load_d_output = ctx.query.load, ctx.d_output.load
    rows_of_head, rows = ctx.rows.of_head, ctx.rows
    query_pipeline, d_output_pipeline = ctx.query_pipeline, ctx.d_output_pipeline
    head, tile = first_visit(ctx)
    for _visit in cutlass.range(number_of_visits(ctx), unroll=1):
        lse_log2 = rows_of_head(rows.lse_log2, ctx.batch, head)
        delta = rows_of_head(rows.delta, ctx.batch, head)
        query_pipeline.producer_acquire(query_state)
        barrier = query_pipeline.producer_get_barrier(query_state)
        load_query(query_state.index, tile, head, ctx.batch, barrier)
        load_rows(lse_log2, ctx.lse_log2_shared, tile, query_state.index, barrier)
        query_state.advance()
        d_output_pipeline.producer_acquire(d_output_state)
        barrier = d_output_pipeline.producer_get_barrier(d_output_state)
        load_d_output(d_output_state.index, tile, head, ctx.batch, barrier)
        load_rows(delta, ctx.delta_shared, tile, d_output_state.index, barrier)
        d_output_state.advance()
        head, tile = next_visit(ctx, head, tile)
    return query_state, d_output_state
