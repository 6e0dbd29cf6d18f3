"""Consumer warpgroup of the kernel of dQ: the gradient of its 64 queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType

from jax_flash.kernels.shared.dense import apply_dense, exponent_limit
from jax_flash.kernels.shared.hoisting import here
from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_columns
from jax_flash.kernels.shared.padding import TileRows, clear_padding, holds_padding
from jax_flash.kernels.shared.segments import hide_other_segments, visited_tile
from jax_flash.kernels.shared.soft_cap import cap_scores, slope_at
from jax_flash.kernels.shared.tile_ranges import hides_part_of
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def compute(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32, begin: Int32, end: Int32):
    """Sums dQ over key tiles ``begin .. end - 1``, and stores it.

    dQ's matmul of one tile and the scores of the next are issued together. Its keys are free again
    while the arithmetic on these scores runs, so that two stages of K are enough.
    """
    mma_scores, mma_d_query = ctx.mma_scores, ctx.mma_d_query
    scores_slice, d_query_slice = mma_scores.get_slice(thread), mma_d_query.get_slice(thread)
    queries = mma_scores.make_fragment_A(scores_slice.partition_A(ctx.query.shared))
    queries = queries[None, None, None, consumer]
    d_outputs = mma_scores.make_fragment_A(scores_slice.partition_A(ctx.d_output.shared))
    d_outputs = d_outputs[None, None, None, consumer]
    keys = mma_scores.make_fragment_B(scores_slice.partition_B(ctx.key.shared))
    values = mma_scores.make_fragment_B(scores_slice.partition_B(ctx.value.shared))
    keys_transposed = mma_d_query.make_fragment_B(
        d_query_slice.partition_B(wgmma.transposed(ctx.key.shared))
    )
    d_query = wgmma.accumulator(mma_d_query, ctx.query.columns)
    d_query.fill(0.0)
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state = ctx.key_state(PipelineUserType.Consumer)
    previous = ctx.key_state(PipelineUserType.Consumer)
    value_state = ctx.value_state(PipelineUserType.Consumer)
    first_query = (ctx.owned_tile * ctx.num_consumers + consumer) * wgmma.ROWS
    # General kernels load them for each tile, for lack of registers.
    statistics = None
    if cutlass.const_expr(not ctx.view.band.ragged):
        statistics = (
            lse_log2_of_rows(ctx, first_query, thread),
            delta_of_rows(ctx, first_query, thread),
        )
    cute.arch.mbarrier_wait(ctx.query_barriers + consumer, 0)
    if cutlass.const_expr(ctx.view.band.ragged):
        clear_d_output_padding(ctx, first_query, consumer, thread)

    if begin < end:
        scores = wgmma.accumulator(mma_scores, ctx.tile.tile_kv)
        d_weights = wgmma.accumulator(mma_scores, ctx.tile.tile_kv)
        key_pipeline.consumer_wait(key_state)
        segments = ready_keys(ctx, key_state, value_state, begin, consumer, thread)
        warpgroup.fence()
        wgmma.issue(mma_scores, scores, queries, keys[None, None, None, key_state.index], True)
        warpgroup.commit_group()
        value_pipeline.consumer_wait(value_state)
        wgmma.issue(
            mma_scores, d_weights, d_outputs, values[None, None, None, value_state.index], True
        )
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        to_d_scores(ctx, scores, d_weights, statistics, (first_query, begin), segments, thread)
        pipelines.release(value_pipeline, value_state.index)
        d_scores = wgmma.converted(d_weights, ctx.dtype)
        key_state.advance()
        value_state.advance()

        for tile in cutlass.range(begin + 1, end, unroll=1):
            warpgroup.fence()
            wgmma.issue(
                mma_d_query,
                d_query,
                wgmma.as_operand_a(d_scores),
                keys_transposed[None, None, None, previous.index],
                False,
            )
            warpgroup.commit_group()
            key_pipeline.consumer_wait(key_state)
            segments = ready_keys(ctx, key_state, value_state, tile, consumer, thread)
            wgmma.issue(mma_scores, scores, queries, keys[None, None, None, key_state.index], True)
            warpgroup.commit_group()
            value_pipeline.consumer_wait(value_state)
            wgmma.issue(
                mma_scores, d_weights, d_outputs, values[None, None, None, value_state.index], True
            )
            warpgroup.commit_group()
            warpgroup.wait_group(2)
            pipelines.release(key_pipeline, previous.index)
            previous.advance()
            warpgroup.wait_group(1)
            to_d_scores(ctx, scores, d_weights, statistics, (first_query, tile), segments, thread)
            pipelines.release(value_pipeline, value_state.index)
            wgmma.convert(d_weights, d_scores)
            key_state.advance()
            value_state.advance()

        warpgroup.fence()
        wgmma.issue(
            mma_d_query,
            d_query,
            wgmma.as_operand_a(d_scores),
            keys_transposed[None, None, None, previous.index],
            False,
        )
        warpgroup.commit_group()
        warpgroup.wait_group(0)
    d_query.store(d_query.load() * ctx.scale)
    store_d_query(ctx, d_query, consumer, thread)


@cute.jit
def row_statistics(
    ctx: cutlass.Constexpr,
    source: cute.Pointer,
    of_no_keys: cutlass.Constexpr,
    first_query: Int32,
    thread: Int32,
):
    """Returns lse_log2 or delta of this thread's two rows.

    Past the last query it is ``of_no_keys``, as for a query that sees no key.
    """
    statistics = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    statistics.fill(of_no_keys)
    row, _column = wgmma.first_row_and_column(thread)
    of_head = ctx.rows.of_head(source, ctx.batch, ctx.head)
    for i in cutlass.range_constexpr(2):
        query = first_query + row + wgmma.row_offset(i)
        if query < ctx.visibility.defaults.query_length:
            tile = query // ctx.tile.tile_q
            statistics[i] = of_head[query - tile * ctx.tile.tile_q, tile]
    return statistics


@cute.jit
def lse_log2_of_rows(ctx: cutlass.Constexpr, first_query: Int32, thread: Int32):
    """Returns lse_log2 of this thread's two rows."""
    return row_statistics(ctx, ctx.rows.lse_log2, float("inf"), first_query, thread)


@cute.jit
def delta_of_rows(ctx: cutlass.Constexpr, first_query: Int32, thread: Int32):
    """Returns delta of this thread's two rows."""
    return row_statistics(ctx, ctx.rows.delta, 0.0, first_query, thread)


@cute.jit
def clear_d_output_padding(
    ctx: cutlass.Constexpr, first_query: Int32, consumer: Int32, thread: Int32
):
    """Zeroes dO of this warpgroup's padded queries, which may hold NaN.

    Q's need not be, as their scores are replaced; dP is only multiplied, with 0.
    """
    visibility = ctx.visibility
    ids = None
    if cutlass.const_expr(visibility.segments is not None):
        ids = visibility.query_ids(ctx.batch)
    rows = TileRows(
        first=first_query,
        number=wgmma.ROWS,
        length=ctx.view.band.query_length,
        operand_length=visibility.defaults.query_length,
        segments=ctx.view.segments,
        ids=ids,
    )
    if holds_padding(rows):
        clear_padding(ctx.d_output.shared[None, None, consumer], rows, thread, WARPGROUP_THREADS)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(
            barrier_id=NamedBarrier.CONSUMER_0 + consumer, number_of_threads=WARPGROUP_THREADS
        )


@cute.jit
def ready_keys(
    ctx: cutlass.Constexpr,
    key_state: cutlass.Constexpr,
    value_state: cutlass.Constexpr,
    tile: Int32,
    consumer: Int32,
    thread: Int32,
):
    """Clears a key tile's padding, in kernels that support any; returns what its segments say.

    Padding of K and of V may hold NaN, and dS and dP are only multiplied, with 0.
    """
    visibility, value_pipeline = ctx.visibility, ctx.value_pipeline
    threads = ctx.num_consumers * WARPGROUP_THREADS
    segments = visited_tile(ctx.view.segments, visibility.key_records(ctx.batch), tile)
    if cutlass.const_expr(segments is not None):
        rows = TileRows(
            first=tile * ctx.tile.tile_kv,
            number=ctx.tile.tile_kv,
            length=ctx.view.band.key_length,
            operand_length=visibility.defaults.key_length,
            segments=segments,
            ids=visibility.key_ids(ctx.batch),
        )
        if holds_padding(rows):
            value_pipeline.consumer_wait(value_state)
            for operand, state in ((ctx.key, key_state), (ctx.value, value_state)):
                clear_padding(
                    operand.shared[None, None, state.index],
                    rows,
                    consumer * WARPGROUP_THREADS + thread,
                    threads,
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=threads)
    return segments


@cute.jit
def to_d_scores(
    ctx: cutlass.Constexpr,
    scores_product: cute.Tensor,
    d_weights_product: cute.Tensor,
    statistics: cutlass.Constexpr,
    place: cutlass.Constexpr,
    segments: cutlass.Constexpr,
    thread: Int32,
):
    """Waits for dP and replaces it by ``dS = P * (dP - delta)``, with the soft cap's slope.

    ``P = 2^(scores * scale_log2 - lse_log2)`` is computed during the matmul, but for the slope,
    which needs the capped scores.
    """
    scores = wgmma.rows_and_columns(scores_product)
    d_weights = wgmma.rows_and_columns(d_weights_product)
    if cutlass.const_expr(ctx.soft_cap is not None):
        first_query, _tile = place
        cap_scores(ctx.soft_cap, scores)
        warpgroup.wait_group(0)
        # While the scores are those of the soft cap alone, which its slope is taken from.
        apply_slope(ctx, scores, d_weights, delta_of_rows(ctx, here(first_query), thread))
        mask_tile(ctx, scores_product, place, segments, thread)
        to_weights(ctx, scores, lse_log2_of_rows(ctx, here(first_query), thread))
        for row in cutlass.range_constexpr(2):
            d_weights[row, None].store(d_weights[row, None].load() * scores[row, None].load())
    else:
        lse_log2, delta = statistics
        mask_tile(ctx, scores_product, place, segments, thread)
        to_weights(ctx, scores, lse_log2)
        warpgroup.wait_group(0)
        for row in cutlass.range_constexpr(2):
            difference = d_weights[row, None].load() - delta[row]
            d_weights[row, None].store(scores[row, None].load() * difference)


@cute.jit
def mask_tile(
    ctx: cutlass.Constexpr,
    product: cute.Tensor,
    place: cutlass.Constexpr,
    segments: cutlass.Constexpr,
    thread: Int32,
):
    """Adds the bias and hides what the masks, the lengths and the segments hide.

    ``place`` is the first query of the warpgroup and the key tile.
    """
    first_query, tile = place
    band, visibility = ctx.view.band, ctx.visibility
    scores = wgmma.rows_and_columns(product)
    row, column = wgmma.first_row_and_column(thread)
    first_key = tile * ctx.tile.tile_kv
    position = FragmentPosition(
        first_query + row, first_key + column, wgmma.row_offset, wgmma.column_offset
    )
    if cutlass.const_expr(ctx.dense is not None):
        # In two halves: loading the bias of all columns at once takes more registers than are left.
        groups = cute.size(product) // 8
        for first_group in (0, groups):
            half = wgmma.rows_and_columns_from(product, first_group, groups)
            of_half = FragmentPosition(
                first_query + row,
                first_key + column + 8 * first_group,
                wgmma.row_offset,
                wgmma.column_offset,
            )
            apply_dense(ctx.dense, ctx.batch, ctx.head, half, of_half, False)
    if hides_part_of(band, first_query, wgmma.ROWS, first_key, ctx.tile.tile_kv):
        mask_keys_in_columns(scores, position, band)
    if cutlass.const_expr(segments is not None):
        query_ids, key_ids = visibility.query_ids(ctx.batch), visibility.key_ids(ctx.batch)
        if segments.differs:
            hide_other_segments(scores, position, query_ids, key_ids)


@cute.jit
def to_weights(ctx: cutlass.Constexpr, scores: cute.Tensor, lse_log2: cute.Tensor):
    """Replaces scores by weights; a row that saw no key has ``lse_log2 = +inf``: P is 0."""
    limit = None
    if cutlass.const_expr(ctx.dense is not None):
        limit = exponent_limit(ctx.dense)
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            exponent = scores[row, column] * ctx.scale_log2 - lse_log2[row]
            if cutlass.const_expr(limit is not None):
                exponent = cute.arch.fmin(exponent, limit, nan=True)
            scores[row, column] = cute.math.exp2(exponent, fastmath=True)


@cute.jit
def apply_slope(
    ctx: cutlass.Constexpr, scores: cute.Tensor, d_weights: cute.Tensor, delta: cute.Tensor
):
    """Replaces dP by ``(dP - delta) * slope``, the slope of the soft cap."""
    soft_cap = ctx.soft_cap
    for row in cutlass.range_constexpr(2):
        d_weights[row, None].store(d_weights[row, None].load() - delta[row])
    if soft_cap.bound > 0.0:
        inverse_bound = cute.arch.rcp_approx(soft_cap.bound)
        for row in cutlass.range_constexpr(2):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                slope = slope_at(soft_cap, scores[row, column], inverse_bound)
                d_weights[row, column] = d_weights[row, column] * slope


@cute.jit
def store_d_query(ctx: cutlass.Constexpr, d_query: cute.Tensor, consumer: Int32, thread: Int32):
    """Stores 64 rows of dQ where Q was in shared memory; TMA clips at the last query."""
    wgmma.store_rows(
        ctx.mma_d_query,
        wgmma.converted(d_query, ctx.dtype),
        ctx.d_query.shared[None, None, consumer],
        thread,
    )
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMER_0 + consumer, number_of_threads=WARPGROUP_THREADS
    )
    store = ctx.d_query.store
    tile = ctx.owned_tile * ctx.num_consumers + consumer
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        store(consumer, tile, ctx.head, ctx.batch)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
