"""Consumer warpgroups of the kernel of dK and dV: one sums dV, the other dK, of the same 64 keys.

Both are the same loop on other operands: a matmul of the keys with a query tile, arithmetic on its
64 x tile_q result, and a matmul of the outcome, from registers, that adds to the gradient::

    dV:  S^T  = K Q^T    P  = 2^(S * scale_log2 - lse_log2)     dV += P^T dO
    dK:  dP^T = V dO^T   dS = P * (dP - delta)                  dK += dS^T Q

The gradient's matmul of one tile and the first matmul of the next are issued together, and the
arithmetic of either warpgroup runs while the tensor cores are at the matmuls of the other: dS
waits for P, so the two are out of step by themselves.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineTmaAsync

from jax_flash.kernels.shared.dense import exponent_limit
from jax_flash.kernels.shared.padding import TileRows, clear_padding, holds_padding
from jax_flash.kernels.shared.soft_cap import cap_scores, slope_at
from jax_flash.kernels.shared.tile_ranges import hides_part_of
from jax_flash.kernels.sm90 import fragments, pipelines, wgmma
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
from jax_flash.kernels.sm90.tma import TmaOperand
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


class Side(NamedTuple):
    """What one warpgroup works on."""

    consumer: int
    keys: TmaOperand
    """A operand of the first matmul: K, or V."""
    keys_barrier: cute.Pointer
    queries: TmaOperand
    """B operand of the first matmul: Q, or dO."""
    pipeline: PipelineTmaAsync
    """Of ``queries``."""
    statistics: cute.Tensor
    """Of the rows of ``queries``, ``(tile_q, stages)``: lse_log2, or delta."""
    other_queries: TmaOperand
    """B operand of the second matmul: dO, or Q."""
    other_pipeline: PipelineTmaAsync
    mma: cute.TiledMma
    """Of the gradient."""


@cute.jit
def compute_d_value(ctx: cutlass.Constexpr, thread: Int32, begin: Int32, end: Int32):
    """Sums dV over query tiles ``begin .. end - 1`` of every head of the group, and stores it."""
    side = Side(
        consumer=0,
        keys=ctx.key,
        keys_barrier=ctx.key_barrier,
        queries=ctx.query,
        pipeline=ctx.query_pipeline,
        statistics=ctx.lse_log2_shared,
        other_queries=ctx.d_output,
        other_pipeline=ctx.d_output_pipeline,
        mma=ctx.mma_d_value,
    )
    state = ctx.weights_writer_state()
    d_value = accumulate(ctx, side, to_weights, state, thread, begin, end)
    store_gradient(ctx, side, d_value, ctx.d_value, thread)


@cute.jit
def compute_d_key(ctx: cutlass.Constexpr, thread: Int32, begin: Int32, end: Int32):
    """Sums dK over query tiles ``begin .. end - 1`` of every head of the group, and stores it."""
    side = Side(
        consumer=1,
        keys=ctx.value,
        keys_barrier=ctx.value_barrier,
        queries=ctx.d_output,
        pipeline=ctx.d_output_pipeline,
        statistics=ctx.delta_shared,
        other_queries=ctx.query,
        other_pipeline=ctx.query_pipeline,
        mma=ctx.mma_d_key,
    )
    state = ctx.weights_reader_state()
    d_key = accumulate(ctx, side, to_d_scores, state, thread, begin, end)
    d_key.store(d_key.load() * ctx.scale)
    store_gradient(ctx, side, d_key, ctx.d_key, thread)


@cute.jit
def accumulate(
    ctx: cutlass.Constexpr,
    side: cutlass.Constexpr,
    finish: cutlass.Constexpr,
    weights_state: cutlass.Constexpr,
    thread: Int32,
    begin: Int32,
    end: Int32,
):
    """Returns the gradient of the block's keys, 64 rows of float32, before any scale.

    ``finish(ctx, product, statistics, place, segments, weights_state, thread)`` turns the first
    matmul's result into the operand of the second, in place.
    """
    mma_scores = ctx.mma_scores
    keys = mma_scores.make_fragment_A(mma_scores.get_slice(thread).partition_A(side.keys.shared))
    keys = keys[None, None, None, 0]
    queries = mma_scores.make_fragment_B(
        mma_scores.get_slice(thread).partition_B(side.queries.shared)
    )
    other_queries = side.mma.make_fragment_B(
        side.mma.get_slice(thread).partition_B(wgmma.transposed(side.other_queries.shared))
    )
    gradient = wgmma.accumulator(side.mma, side.other_queries.columns)
    gradient.fill(0.0)
    pipeline, other_pipeline = side.pipeline, side.other_pipeline
    state, previous = ctx.consumer_state(), ctx.consumer_state()
    cute.arch.mbarrier_wait(side.keys_barrier, 0)
    if cutlass.const_expr(ctx.view.band.ragged):
        clear_key_padding(ctx, side, thread)

    if begin < end:
        head, tile = first_visit(ctx)
        product = wgmma.accumulator(mma_scores, ctx.tile.tile_q)
        pipeline.consumer_wait(state)
        segments = ready_queries(ctx, side, state, tile, thread)
        warpgroup.fence()
        wgmma.issue(mma_scores, product, keys, queries[None, None, None, state.index], True)
        warpgroup.commit_group()
        statistics = statistics_of_thread(side, state, thread)
        warpgroup.wait_group(0)
        pipelines.release(pipeline, state.index)
        finish(ctx, product, statistics, (head, tile), segments, weights_state, thread)
        operand = wgmma.converted(product, ctx.dtype)
        state.advance()
        weights_state.advance()

        for _visit in cutlass.range(number_of_visits(ctx) - 1, unroll=1):
            head, tile = next_visit(ctx, head, tile)
            other_pipeline.consumer_wait(previous)
            warpgroup.fence()
            wgmma.issue(
                side.mma,
                gradient,
                wgmma.as_operand_a(operand),
                other_queries[None, None, None, previous.index],
                False,
            )
            warpgroup.commit_group()
            pipeline.consumer_wait(state)
            segments = ready_queries(ctx, side, state, tile, thread)
            wgmma.issue(mma_scores, product, keys, queries[None, None, None, state.index], True)
            warpgroup.commit_group()
            statistics = statistics_of_thread(side, state, thread)
            warpgroup.wait_group(1)
            pipelines.release(other_pipeline, previous.index)
            previous.advance()
            warpgroup.wait_group(0)
            pipelines.release(pipeline, state.index)
            finish(ctx, product, statistics, (head, tile), segments, weights_state, thread)
            wgmma.convert(product, operand)
            state.advance()
            weights_state.advance()

        other_pipeline.consumer_wait(previous)
        warpgroup.fence()
        wgmma.issue(
            side.mma,
            gradient,
            wgmma.as_operand_a(operand),
            other_queries[None, None, None, previous.index],
            False,
        )
        warpgroup.commit_group()
        warpgroup.wait_group(0)
    return gradient


@cute.jit
def ready_queries(
    ctx: cutlass.Constexpr,
    side: cutlass.Constexpr,
    state: cutlass.Constexpr,
    tile: Int32,
    thread: Int32,
):
    """Clears a query tile's padding, in kernels that support any; returns what its segments say.

    The tile is at the same place of both pipelines, and both warpgroups come here for it.
    """
    segments = segments_of_queries(ctx, tile)
    query_pipeline = ctx.query_pipeline
    if cutlass.const_expr(ctx.view.band.ragged):
        query_pipeline.consumer_wait(state)
        clear_query_padding(ctx, segments, state, tile, side.consumer, thread)
    return segments


@cute.jit
def clear_key_padding(ctx: cutlass.Constexpr, side: cutlass.Constexpr, thread: Int32):
    """Zeroes the keys past the key length, or with a negative id, once: padding may hold NaN.

    K's need not be, as their scores are replaced. V's are: their dP is only multiplied, with 0.
    """
    if cutlass.const_expr(side.consumer == 1):
        visibility = ctx.visibility
        ids = None
        if cutlass.const_expr(visibility.segments is not None):
            ids = visibility.key_ids(ctx.batch)
        rows = TileRows(
            first=ctx.key_tile * ctx.tile.tile_kv,
            number=ctx.tile.tile_kv,
            length=ctx.view.band.key_length,
            operand_length=visibility.defaults.key_length,
            segments=ctx.view.segments,
            ids=ids,
        )
        if holds_padding(rows):
            clear_padding(side.keys.shared[None, None, 0], rows, thread, WARPGROUP_THREADS)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(
                barrier_id=NamedBarrier.CONSUMER_0 + side.consumer,
                number_of_threads=WARPGROUP_THREADS,
            )


@cute.jit
def statistics_of_thread(side: cutlass.Constexpr, state: cutlass.Constexpr, thread: Int32):
    """Returns the row statistics of the queries in this thread's columns of a product.

    They are read while the matmul runs.
    """
    _row, first_column = wgmma.first_row_and_column(thread)
    source = side.statistics[None, state.index]
    columns = cute.size(source) // 4
    statistics = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
    for column in cutlass.range_constexpr(columns):
        statistics[column] = source[first_column + wgmma.column_offset(column)]
    return statistics


@cute.jit
def to_weights(
    ctx: cutlass.Constexpr,
    product: cute.Tensor,
    lse_log2: cute.Tensor,
    place: cutlass.Constexpr,
    segments: cutlass.Constexpr,
    weights_state: cutlass.Constexpr,
    thread: Int32,
):
    """Replaces transposed scores by P and passes it to the other warpgroup.

    ``P = 2^(scores * scale_log2 - lse_log2)``. A row that saw no key, and a row past the last
    query, has ``lse_log2 = +inf``: P is 0. What is passed includes the slope of the soft cap, which
    follows from the scores.
    """
    scores, soft_cap = wgmma.rows_and_columns(product), ctx.soft_cap
    head, tile = place
    row, column = wgmma.first_row_and_column(thread)
    first_key, first_query = ctx.key_tile * ctx.tile.tile_kv, tile * ctx.tile.tile_q
    passed = product
    if cutlass.const_expr(soft_cap is not None):
        cap_scores(soft_cap, scores)
        passed = cute.make_rmem_tensor(product.layout, Float32)
        slopes_of(soft_cap, scores, wgmma.rows_and_columns(passed))
    # In two halves: loading the bias of all columns at once takes more registers than are left.
    groups = cute.size(product) // 8
    for first_group in (0, groups):
        half = wgmma.rows_and_columns_from(product, first_group, groups)
        add_dense(ctx, head, half, first_key + row, first_query + column + 8 * first_group)
    if hides_part_of(ctx.view.band, first_query, ctx.tile.tile_q, first_key, ctx.tile.tile_kv):
        mask_tile(ctx, scores, first_key + row, first_query + column)
    mask_segments(ctx, segments, scores, first_key + row, first_query + column)
    limit = None
    if cutlass.const_expr(ctx.dense is not None):
        limit = exponent_limit(ctx.dense)
    for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            exponent = scores[i, j] * ctx.scale_log2 - lse_log2[j]
            if cutlass.const_expr(limit is not None):
                exponent = cute.arch.fmin(exponent, limit, nan=True)
            scores[i, j] = cute.math.exp2(exponent, fastmath=True)
    if cutlass.const_expr(soft_cap is not None):
        passed.store(passed.load() * product.load())
    pass_weights(ctx, passed, weights_state, thread)


@cute.jit
def slopes_of(soft_cap: cutlass.Constexpr, scores: cute.Tensor, slopes: cute.Tensor):
    """Writes the slope of the soft cap at each capped score; 1 without a cap."""
    slopes.fill(1.0)
    if soft_cap.bound > 0.0:
        inverse_bound = cute.arch.rcp_approx(soft_cap.bound)
        for i in cutlass.range_constexpr(cute.size(scores)):
            slopes[i] = slope_at(soft_cap, scores[i], inverse_bound)


@cute.jit
def pass_weights(
    ctx: cutlass.Constexpr,
    weights: cute.Tensor,
    weights_state: cutlass.Constexpr,
    thread: Int32,
):
    """Stores a fragment for the other warpgroup."""
    # It must have read the part before; at first, this returns at once.
    cute.arch.mbarrier_wait(ctx.weights_empty + weights_state.index, weights_state.phase)
    fragments.store(weights_of_thread(ctx, weights_state.index, thread), weights)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.weights_full + weights_state.index)


@cute.jit
def to_d_scores(
    ctx: cutlass.Constexpr,
    product: cute.Tensor,
    delta: cute.Tensor,
    place: cutlass.Constexpr,
    segments: cutlass.Constexpr,
    weights_state: cutlass.Constexpr,
    thread: Int32,
):
    """Replaces transposed dP by ``dS = P * (dP - delta)``, with P from the other warpgroup."""
    d_weights = wgmma.rows_and_columns(product)
    for column in cutlass.range_constexpr(cute.size(d_weights, mode=[1])):
        for row in cutlass.range_constexpr(cute.size(d_weights, mode=[0])):
            d_weights[row, column] = d_weights[row, column] - delta[column]
    cute.arch.mbarrier_wait(ctx.weights_full + weights_state.index, weights_state.phase)
    source = weights_of_thread(ctx, weights_state.index, thread)
    registers = cute.make_tensor(product.iterator, cute.make_layout(source.shape))
    weights = cute.make_rmem_tensor(cute.make_layout(fragments.VECTOR), Float32)
    for group in cutlass.range_constexpr(cute.size(source, mode=[1])):
        cute.autovec_copy(fragments.vector(source, group), weights)
        for i in cutlass.range_constexpr(fragments.VECTOR):
            registers[i, group] = registers[i, group] * weights[i]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.weights_empty + weights_state.index)


def weights_of_thread(ctx, stage: Int32, thread: Int32) -> cute.Tensor:
    """Returns where one thread's fragment ``(4, groups)`` of P lies."""
    floats = ctx.tile.tile_q * ctx.tile.tile_kv
    groups = floats // WARPGROUP_THREADS // fragments.VECTOR
    return fragments.of_thread(ctx.weights_shared + stage * floats, groups, thread)


@cute.jit
def store_gradient(
    ctx: cutlass.Constexpr,
    side: cutlass.Constexpr,
    gradient: cute.Tensor,
    target: cutlass.Constexpr,
    thread: Int32,
):
    """Stores 64 rows of dK or dV where K or V was in shared memory; TMA clips at S."""
    # The other warpgroup has read K or V for its matmuls.
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMERS,
        number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
    )
    wgmma.store_rows(
        side.mma, wgmma.converted(gradient, ctx.dtype), target.shared[None, None, 0], thread
    )
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMER_0 + side.consumer, number_of_threads=WARPGROUP_THREADS
    )
    store = target.store
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        store(0, ctx.key_tile, ctx.key_head, ctx.batch)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
