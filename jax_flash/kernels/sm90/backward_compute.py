"""Consumer warpgroup of the backward kernel: dK and dV of its 64 keys, its share of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from jax_flash.kernels.shared.dense import exponent_limit
from jax_flash.kernels.shared.padding import clear_padded_rows, clear_rows
from jax_flash.kernels.shared.soft_cap import cap_scores, slope_at
from jax_flash.kernels.shared.tile_ranges import hides_part_of
from jax_flash.kernels.sm90 import dq_accumulator, fragments, wgmma
from jax_flash.kernels.sm90.query_tiles import (
    add_dense,
    clear_query_padding,
    mask_segments,
    mask_tile,
    segments_of_queries,
)
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
def compute(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32, begin: Int32, end: Int32):
    """Visits query tiles ``begin .. end - 1`` of every head of the group, heads outermost.

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
    d_key = wgmma.accumulator(ctx.mma_gradients, ctx.key.columns)
    d_value = wgmma.accumulator(ctx.mma_gradients, ctx.value.columns)
    d_key.fill(0.0)
    d_value.fill(0.0)
    row, column = wgmma.first_row_and_column(thread)
    first_key = (ctx.key_tile * ctx.num_consumers + consumer) * wgmma.ROWS + row
    tile_q = ctx.query.rows
    query_pipeline, d_output_pipeline = ctx.query_pipeline, ctx.d_output_pipeline
    query_state, d_output_state = ctx.consumer_state(), ctx.consumer_state()
    # The last tile's dK matmul runs on while this tile's scores are computed; its queries are
    # released then.
    previous_query_state = ctx.consumer_state()
    has_previous = Int32(0)
    buffer = Int32(0)
    cute.arch.mbarrier_wait(ctx.key_barriers + consumer, 0)
    if cutlass.const_expr(ctx.view.band.ragged):
        clear_key_padding(ctx, consumer, thread)

    for member in cutlass.range(ctx.heads_per_group, unroll=1):
        head = ctx.key_head * ctx.heads_per_group + member
        for tile in cutlass.range(begin, end, unroll=1):
            scores = wgmma.accumulator(ctx.mma_scores, tile_q)
            d_weights = wgmma.accumulator(ctx.mma_scores, tile_q)
            query_pipeline.consumer_wait(query_state)
            queries_segments = segments_of_queries(ctx, tile)
            if cutlass.const_expr(ctx.view.band.ragged):
                clear_query_padding(
                    ctx, queries_segments, query_state, d_output_state, tile, consumer, thread
                )
            warpgroup.fence()
            wgmma.issue(
                ctx.mma_scores, scores, keys, queries[None, None, None, query_state.index], True
            )
            warpgroup.commit_group()
            d_output_pipeline.consumer_wait(d_output_state)
            wgmma.issue(
                ctx.mma_scores,
                d_weights,
                values,
                d_outputs[None, None, None, d_output_state.index],
                True,
            )
            warpgroup.commit_group()
            warpgroup.wait_group(2)
            if has_previous != 0:
                query_pipeline.consumer_release(previous_query_state)
                previous_query_state.advance()
            has_previous = Int32(1)
            warpgroup.wait_group(1)
            score_rows = wgmma.rows_and_columns(scores)
            d_rows = wgmma.rows_and_columns(d_weights)
            row_lse = ctx.lse_log2_shared[None, query_state.index]
            row_delta = ctx.delta_shared[None, d_output_state.index]
            if cutlass.const_expr(ctx.soft_cap is not None):
                cap_scores(ctx.soft_cap, score_rows)
                warpgroup.wait_group(0)
                # While the scores are those of the soft cap alone, which its slope is taken from.
                apply_slope(ctx, score_rows, d_rows, row_delta, column)
            add_dense(ctx, head, score_rows, first_key, tile * tile_q + column)
            if hides_part_of(
                ctx.view.band, tile * tile_q, tile_q, ctx.key_tile * ctx.tile_kv, ctx.tile_kv
            ):
                mask_tile(ctx, score_rows, first_key, tile * tile_q + column)
            mask_segments(ctx, queries_segments, score_rows, first_key, tile * tile_q + column)
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
                d_outputs_transposed[None, None, None, d_output_state.index],
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
                queries_transposed[None, None, None, query_state.index],
                False,
            )
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            d_output_pipeline.consumer_release(d_output_state)
            d_output_state.advance()
            pass_d_query(ctx, d_query, buffer, consumer, thread)
            query_state.advance()
            if cutlass.const_expr(not ctx.tile.overlap_d_key):
                warpgroup.wait_group(0)
            buffer = buffer ^ 1

    warpgroup.wait_group(0)
    # The keys of every warpgroup are read by all; none may be overwritten before all are done.
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMERS,
        number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
    )
    d_key.store(d_key.load() * ctx.scale)
    store_gradients(ctx, d_key, d_value, consumer, thread)


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
        if ctx.view.segments.smallest < 0:
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


@cute.jit
def store_gradients(
    ctx: cutlass.Constexpr,
    d_key: cute.Tensor,
    d_value: cute.Tensor,
    consumer: Int32,
    thread: Int32,
):
    """Stores 64 rows of dK and dV through the shared memory of K and V; TMA clips at S."""
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
        cute.arch.cp_async_bulk_wait_group(0, read=True)
