"""Consumer warpgroup of the backward kernel: dK and dV of its 64 keys, its share of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from jax_flash.kernels.shared.dense import exponent_limit
from jax_flash.kernels.shared.padding import clear_padded_rows, clear_rows
from jax_flash.kernels.shared.soft_cap import cap_scores, slope_at
from jax_flash.kernels.shared.tile_ranges import hides_part_of
from jax_flash.kernels.sm90 import dq_accumulator, fragments, pipelines, wgmma
from jax_flash.kernels.sm90.query_tiles import (
    add_dense,
    clear_query_padding,
    first_visit,
    mask_segments,
    mask_tile,
    next_visit,
    number_of_visits,
    segments_of_queries,
)
from jax_flash.kernels.sm90.tile_counter import read_rank
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


def shared_operands(ctx, consumer: Int32, thread: Int32):
    """Returns the matmul operands that stay where they are for the whole block.

    All are ``wgmma`` fragments; the last mode of those that are pipelined is the stage.
    """
    scores, gradients, dq = (
        mma.get_slice(thread) for mma in (ctx.mma_scores, ctx.mma_gradients, ctx.mma_dq)
    )
    keys = ctx.mma_scores.make_fragment_A(scores.partition_A(ctx.key.shared))
    values = ctx.mma_scores.make_fragment_A(scores.partition_A(ctx.value.shared))
    # dQ = dS K: the warpgroups share its rows (one 64-query block each) or its columns.
    row_block = consumer if ctx.dq_splits_rows else 0
    column_block = 0 if ctx.dq_splits_rows else consumer
    d_scores = cute.local_tile(
        wgmma.transposed(ctx.d_scores_shared), (wgmma.ROWS, wgmma.ROWS), (row_block, 0, None)
    )
    key_columns = cute.local_tile(
        wgmma.transposed(ctx.key.shared), (ctx.dq_columns, wgmma.ROWS), (column_block, 0, None)
    )
    return (
        keys[None, None, None, consumer],
        values[None, None, None, consumer],
        ctx.mma_scores.make_fragment_B(scores.partition_B(ctx.query.shared)),
        ctx.mma_scores.make_fragment_B(scores.partition_B(ctx.d_output.shared)),
        ctx.mma_gradients.make_fragment_B(
            gradients.partition_B(wgmma.transposed(ctx.query.shared))
        ),
        ctx.mma_gradients.make_fragment_B(
            gradients.partition_B(wgmma.transposed(ctx.d_output.shared))
        ),
        ctx.mma_dq.make_fragment_A(dq.partition_A(d_scores)),
        ctx.mma_dq.make_fragment_B(dq.partition_B(key_columns)),
    )


@cute.jit
def compute(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32):
    """Visits, in each round, the query tiles of every head of the group that see the block's keys.

    Scores are computed transposed (keys in rows), so that P and dS are already in the registers
    that the dV and dK matmuls read them from; only dS also goes through shared memory, for dQ.
    """
    (
        keys,
        values,
        queries,
        d_outputs,
        queries_transposed,
        d_outputs_transposed,
        d_scores_operand,
        key_columns,
    ) = shared_operands(ctx, consumer, thread)
    row, column = wgmma.first_row_and_column(thread)
    tile_q = ctx.query.rows
    query_pipeline, d_output_pipeline = ctx.query_pipeline, ctx.d_output_pipeline
    state = ctx.consumer_state()  # of both pipelines, which run in step
    buffer = Int32(0)
    schedule, at, counter = ctx.schedule, ctx.at, ctx.counter

    round_ = Int32(0)
    place = read_rank(counter, round_)
    while place < schedule.places:
        own = at(place)
        d_key = wgmma.accumulator(ctx.mma_gradients, ctx.key.columns)
        d_value = wgmma.accumulator(ctx.mma_gradients, ctx.value.columns)
        d_key.fill(0.0)
        d_value.fill(0.0)
        first_key = (own.key_tile * ctx.num_consumers + consumer) * wgmma.ROWS + row
        has_previous = Int32(0)
        cute.arch.mbarrier_wait(ctx.key_full_barriers + consumer, round_ % 2)
        if cutlass.const_expr(own.view.band.ragged):
            clear_key_padding(own, consumer, thread)
        start_overwriting_staging(ctx, round_, thread)

        head, tile = first_visit(own)
        for _visit in cutlass.range(number_of_visits(own), unroll=1):
            scores = wgmma.accumulator(ctx.mma_scores, tile_q)
            d_weights = wgmma.accumulator(ctx.mma_scores, tile_q)
            query_pipeline.consumer_wait(state)
            queries_segments = segments_of_queries(own, tile)
            if cutlass.const_expr(own.view.band.ragged):
                clear_query_padding(own, queries_segments, state, tile, consumer, thread)
            warpgroup.fence()
            wgmma.issue(ctx.mma_scores, scores, keys, queries[None, None, None, state.index], True)
            warpgroup.commit_group()
            d_output_pipeline.consumer_wait(state)
            wgmma.issue(
                ctx.mma_scores,
                d_weights,
                values,
                d_outputs[None, None, None, state.index],
                True,
            )
            warpgroup.commit_group()
            warpgroup.wait_group(2)
            # The last tile's dK matmul ran on until these scores were wanted.
            if has_previous != 0:
                pipelines.release(query_pipeline, stage_before(ctx, state))
            has_previous = Int32(1)
            warpgroup.wait_group(1)
            score_rows = wgmma.rows_and_columns(scores)
            d_rows = wgmma.rows_and_columns(d_weights)
            row_lse = ctx.lse_log2_shared[None, state.index]
            row_delta = ctx.delta_shared[None, state.index]
            if cutlass.const_expr(ctx.soft_cap is not None):
                cap_scores(ctx.soft_cap, score_rows)
                warpgroup.wait_group(0)
                # Before anything else changes the scores, which the slope is taken from.
                apply_slope(ctx, score_rows, d_rows, row_delta, column)
            add_dense(own, head, score_rows, first_key, tile * tile_q + column)
            if hides_part_of(
                own.view.band, tile * tile_q, tile_q, own.key_tile * ctx.tile_kv, ctx.tile_kv
            ):
                mask_tile(own, score_rows, first_key, tile * tile_q + column)
            mask_segments(own, queries_segments, score_rows, first_key, tile * tile_q + column)
            if cutlass.const_expr(ctx.soft_cap is not None):
                to_weights(ctx, score_rows, row_lse, column)
                multiply(score_rows, d_rows)
                d_scores = wgmma.converted(d_weights, ctx.dtype)
                weights = wgmma.converted(scores, ctx.dtype)
            else:
                to_weights(ctx, score_rows, row_lse, column)
                weights = wgmma.converted(scores, ctx.dtype)
                warpgroup.wait_group(0)
                to_d_scores(score_rows, d_rows, row_delta, column)
                d_scores = wgmma.converted(d_weights, ctx.dtype)
            warpgroup.fence()
            wgmma.issue(
                ctx.mma_gradients,
                d_value,
                wgmma.as_operand_a(weights),
                d_outputs_transposed[None, None, None, state.index],
                False,
            )
            warpgroup.commit_group()
            stage = buffer * ctx.num_consumers + consumer
            wgmma.store_rows(
                ctx.mma_scores, d_scores, ctx.d_scores_shared[None, None, stage], thread
            )
            cute.arch.fence_proxy("async.shared", space="cta")
            # Every warpgroup's dS is in shared memory past this barrier. It also tells that the
            # other buffer has been read: its reader waited for its matmul before arriving here.
            cute.arch.barrier(
                barrier_id=NamedBarrier.CONSUMERS,
                number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
            )
            d_query = wgmma.accumulator(ctx.mma_dq, ctx.dq_columns)
            for source in cutlass.range_constexpr(ctx.num_consumers):
                wgmma.issue(
                    ctx.mma_dq,
                    d_query,
                    d_scores_operand[None, None, None, buffer * ctx.num_consumers + source],
                    key_columns[None, None, None, source],
                    source == 0,
                )
            warpgroup.commit_group()
            wgmma.issue(
                ctx.mma_gradients,
                d_key,
                wgmma.as_operand_a(d_scores),
                queries_transposed[None, None, None, state.index],
                False,
            )
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            pipelines.release(d_output_pipeline, state.index)
            pass_d_query(ctx, d_query, buffer, consumer, thread)
            state.advance()
            if cutlass.const_expr(not ctx.tile.overlap_d_key):
                warpgroup.wait_group(0)
            buffer = buffer ^ 1
            head, tile = next_visit(own, head, tile)

        warpgroup.wait_group(0)
        release_keys(ctx)
        if has_previous != 0:
            pipelines.release(query_pipeline, stage_before(ctx, state))
        d_key.store(d_key.load() * ctx.scale)
        store_gradients(own, (d_key, d_value), buffer, consumer, thread)
        round_ += 1
        place = read_rank(counter, round_)
    # Shared memory must outlive the last stores' reads of it.
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def clear_key_padding(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32):
    """Zeroes the keys and values past the key length, once: padding may hold NaN."""
    band, key_length = ctx.view.band, ctx.visibility.defaults.key_length
    barrier = NamedBarrier.CONSUMER_0 + consumer
    first_key = (ctx.key_tile * ctx.num_consumers + consumer) * wgmma.ROWS
    if band.key_length < cutlass.min(first_key + wgmma.ROWS, key_length):
        for operand in (ctx.key, ctx.value):
            clear_rows(
                operand.shared[None, None, consumer],
                band.key_length - first_key,
                thread,
                WARPGROUP_THREADS,
            )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
    if cutlass.const_expr(ctx.visibility.segments is not None):
        ids = ctx.visibility.key_ids(ctx.batch)
        if ctx.view.segments.padded:
            for operand in (ctx.key, ctx.value):
                clear_padded_rows(
                    operand.shared[None, None, consumer], ids, first_key, thread, WARPGROUP_THREADS
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def to_weights(
    ctx: cutlass.Constexpr, scores: cute.Tensor, lse_log2: cute.Tensor, first_column: Int32
):
    """Replaces transposed scores by ``P = 2^(scores * scale_log2 - lse_log2)``.

    A row that saw no key, and a row past the last query, has ``lse_log2 = +inf``: P is 0.
    """
    limit = None
    if cutlass.const_expr(ctx.dense is not None):
        limit = exponent_limit(ctx.dense)
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        offset = lse_log2[first_column + wgmma.column_offset(column)]
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            exponent = scores[row, column] * ctx.scale_log2 - offset
            if cutlass.const_expr(ctx.dense is not None):
                exponent = cute.arch.fmin(exponent, limit, nan=True)
            scores[row, column] = cute.math.exp2(exponent, fastmath=True)


@cute.jit
def apply_slope(
    ctx: cutlass.Constexpr,
    scores: cute.Tensor,
    d_weights: cute.Tensor,
    delta: cute.Tensor,
    first_column: Int32,
):
    """Replaces transposed dP by ``(dP - delta) * slope``, the slope of the soft cap."""
    soft_cap = ctx.soft_cap
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        offset = delta[first_column + wgmma.column_offset(column)]
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            d_weights[row, column] = d_weights[row, column] - offset
    if soft_cap.bound > 0.0:
        inverse_bound = cute.arch.rcp_approx(soft_cap.bound)
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                slope = slope_at(soft_cap, scores[row, column], inverse_bound)
                d_weights[row, column] = d_weights[row, column] * slope


@cute.jit
def multiply(weights: cute.Tensor, d_weights: cute.Tensor):
    """Multiplies the second fragment by the first, in place."""
    for row in cutlass.range_constexpr(cute.size(weights, mode=[0])):
        d_weights[row, None].store(d_weights[row, None].load() * weights[row, None].load())


@cute.jit
def to_d_scores(
    weights: cute.Tensor, d_weights: cute.Tensor, delta: cute.Tensor, first_column: Int32
):
    """Replaces transposed dP by ``dS = P * (dP - delta)``."""
    for column in cutlass.range_constexpr(cute.size(weights, mode=[1])):
        offset = delta[first_column + wgmma.column_offset(column)]
        for row in cutlass.range_constexpr(cute.size(weights, mode=[0])):
            d_weights[row, column] = weights[row, column] * (d_weights[row, column] - offset)


@cute.jit
def pass_d_query(
    ctx: cutlass.Constexpr, d_query: cute.Tensor, phase: Int32, consumer: Int32, thread: Int32
):
    """Passes this warpgroup's share of dQ to the reduce warp, through shared memory."""
    # The last part must have been read; before the first, this returns at once.
    cute.arch.mbarrier_wait(ctx.dq_empty_barrier, phase ^ 1)
    destination = dq_accumulator.fragment_of(ctx.dq_shared, ctx.tile, consumer, thread)
    fragments.store(destination, d_query)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.dq_full_barriers + phase % ctx.reduce_warps)


def stage_before(ctx, state: PipelineState) -> Int32:
    """Returns the stage that comes before that of ``state``."""
    return (state.index + ctx.tile.num_stages - 1) % ctx.tile.num_stages


@cute.jit
def release_keys(ctx: cutlass.Constexpr):
    """Lets the producer overwrite the keys and values; this warp's last matmul has read them."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.key_empty_barrier)


@cute.jit
def start_overwriting_staging(ctx: cutlass.Constexpr, round_: Int32, thread: Int32):
    """Waits until the stores of the last round, of all warpgroups, have read what they store."""
    if round_ > 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(
            barrier_id=NamedBarrier.CONSUMERS,
            number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
        )


@cute.jit
def store_gradients(
    ctx: cutlass.Constexpr,
    gradients: cutlass.Constexpr,
    phase: Int32,
    consumer: Int32,
    thread: Int32,
):
    """Stores 64 rows of dK through the shared memory of dS, of dV through that of dQ.

    Args:
      ctx: of this round.
      gradients: dK and dV, scaled.
      phase: that the next part of dQ would have.
      consumer: warpgroup.
      thread: of the warpgroup.
    """
    # The reduce warp has read the last part of dQ, which every warpgroup had to compute first: all
    # have read dS, too.
    cute.arch.mbarrier_wait(ctx.dq_empty_barrier, phase ^ 1)
    d_key, d_value = gradients
    for gradient, operand in ((d_key, ctx.d_key), (d_value, ctx.d_value)):
        wgmma.store_rows(
            ctx.mma_gradients,
            wgmma.converted(gradient, ctx.dtype),
            operand.shared[None, None, consumer],
            thread,
        )
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMER_0 + consumer, number_of_threads=WARPGROUP_THREADS
    )
    store_d_key, store_d_value = ctx.d_key.store, ctx.d_value.store
    tile = ctx.key_tile * ctx.num_consumers + consumer
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        store_d_key(consumer, tile, ctx.key_head, ctx.batch)
        store_d_value(consumer, tile, ctx.key_head, ctx.batch)
