"""Consumer warpgroup of the forward kernel: scores, softmax, weighted values, output."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from jax_flash.kernels.shared.dense import apply_dense
from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_columns
from jax_flash.kernels.shared.online_softmax import (
    NEGATIVE_INFINITY,
    NO_SINK,
    finish_rows,
    start_rows,
    weigh,
)
from jax_flash.kernels.shared.padding import clear_padded_rows, clear_rows
from jax_flash.kernels.shared.segments import hide_other_segments, visited_tile
from jax_flash.kernels.shared.sequence import SequenceDefaults, value_or
from jax_flash.kernels.shared.soft_cap import cap_scores
from jax_flash.kernels.shared.tile_ranges import BandValues, hides_part_of, key_tile_range
from jax_flash.kernels.shared.tile_scheduler import work_at
from jax_flash.kernels.shared.visibility import is_padding
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def compute(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32):
    """Runs one warpgroup's share, 64 queries, of every tile of work.

    Software pipeline (FlashAttention 3, section 3.2): while the tensor cores multiply one tile's
    weights with its values, the scores of the next tile are already in flight, and its softmax
    runs under the second matmul.
    """
    mma_scores, mma_values = ctx.mma_scores, ctx.mma_values
    queries = mma_scores.make_fragment_A(mma_scores.get_slice(thread).partition_A(ctx.query.shared))
    keys = mma_scores.make_fragment_B(mma_scores.get_slice(thread).partition_B(ctx.key.shared))
    values = mma_values.make_fragment_B(
        mma_values.get_slice(thread).partition_B(wgmma.transposed(ctx.value.shared))
    )
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state, value_state = ctx.consumer_state(), ctx.consumer_state()
    view_of, query_buffer = ctx.view_of, ctx.query_buffer
    consumer_thread = consumer * WARPGROUP_THREADS + thread
    for round_ in cutlass.range(ctx.schedule.places, unroll=1):
        work = work_at(ctx.schedule, round_)
        view = view_of(work)
        band = view.band
        row, column = wgmma.first_row_and_column(thread)
        first_row = (work.tile * ctx.num_consumers + consumer) * wgmma.ROWS
        row += first_row
        begin, end = own_key_tiles(ctx, view, first_row)
        output = wgmma.accumulator(mma_values, ctx.value.columns)
        output.fill(0.0)
        output_rows = wgmma.rows_and_columns(output)
        softmax = start_rows(2, ctx.scale_log2, wgmma.reduce_quad)
        rescale = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        buffer, phase = query_buffer(consumer, round_)
        cute.arch.mbarrier_wait(ctx.query_full + buffer, phase)
        own_queries = queries[None, None, None, buffer]
        key_state, value_state = skip_tiles(ctx, view.end - end, key_state, value_state)

        if begin < end:
            scores = wgmma.accumulator(mma_scores, ctx.key.rows)
            key_pipeline.consumer_wait(key_state)
            warpgroup.fence()
            wgmma.issue(
                mma_scores, scores, own_queries, keys[None, None, None, key_state.index], True
            )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            pipelines.release(key_pipeline, key_state.index)
            key_state.advance()
            score_rows = wgmma.rows_and_columns(scores)
            cap_tile(ctx, score_rows)
            add_dense(ctx, work, end - 1, score_rows, row, column)
            mask_tile(band, score_rows, row, (end - 1) * ctx.key.rows + column)
            keys_of_tile = mask_segments(ctx, view, work, end - 1, score_rows, row, column)
            weigh(softmax, score_rows, rescale)
            weights = wgmma.converted(scores, ctx.dtype)
            if cutlass.const_expr(band.ragged):
                clear_padding(ctx, band, value_state, (end - 1) * ctx.tile_kv, consumer, thread)
            clear_padded_values(ctx, keys_of_tile, work, value_state, end - 1, consumer_thread)

            # Unrolled, each copy of the body has weights of its own, and none are moved.
            for step in cutlass.range(end - 1 - begin, unroll=ctx.weight_buffers):
                tile = end - 2 - step
                next_scores = wgmma.accumulator(mma_scores, ctx.key.rows)
                key_pipeline.consumer_wait(key_state)
                warpgroup.fence()
                wgmma.issue(
                    mma_scores,
                    next_scores,
                    own_queries,
                    keys[None, None, None, key_state.index],
                    True,
                )
                warpgroup.commit_group()
                value_pipeline.consumer_wait(value_state)
                warpgroup.fence()
                wgmma.issue(
                    mma_values,
                    output,
                    wgmma.as_operand_a(weights),
                    values[None, None, None, value_state.index],
                    False,
                )
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                pipelines.release(key_pipeline, key_state.index)
                key_state.advance()
                next_rows = wgmma.rows_and_columns(next_scores)
                first_key = tile * ctx.tile_kv
                cap_tile(ctx, next_rows)
                add_dense(ctx, work, tile, next_rows, row, column)
                if hides_part_of(band, first_row, wgmma.ROWS, first_key, ctx.tile_kv):
                    mask_tile(band, next_rows, row, first_key + column)
                keys_of_tile = mask_segments(ctx, view, work, tile, next_rows, row, column)
                weigh(softmax, next_rows, rescale)
                if cutlass.const_expr(ctx.weight_buffers == 2):
                    next_weights = wgmma.converted(next_scores, ctx.dtype)
                    finish_matmul_and_rescale(output_rows, rescale)
                    weights.store(next_weights.load())
                else:
                    finish_matmul_and_rescale(output_rows, rescale)
                    wgmma.convert(next_scores, weights)
                pipelines.release(value_pipeline, value_state.index)
                value_state.advance()
                clear_padded_values(
                    ctx,
                    keys_of_tile,
                    work,
                    value_state,
                    tile,
                    consumer * WARPGROUP_THREADS + thread,
                )

            if cutlass.const_expr(not ctx.output_in_query):
                release_queries(ctx, buffer)
            value_pipeline.consumer_wait(value_state)
            warpgroup.fence()
            wgmma.issue(
                mma_values,
                output,
                wgmma.as_operand_a(weights),
                values[None, None, None, value_state.index],
                False,
            )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            pipelines.release(value_pipeline, value_state.index)
            value_state.advance()
        elif cutlass.const_expr(not ctx.output_in_query):
            release_queries(ctx, buffer)
        key_state, value_state = skip_tiles(ctx, begin - view.begin, key_state, value_state)

        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        finish_rows(softmax, sink_of(ctx, work), rescale, lse)
        multiply_rows(output_rows, rescale)
        store_lse(ctx, work, band, lse, row, column)
        store_output(ctx, work, output, consumer, thread)
        if cutlass.const_expr(ctx.output_in_query):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            release_queries(ctx, buffer)
    # Shared memory must outlive the last store's reads of it.
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def may_see_less(band: BandValues | SequenceDefaults) -> bool:
    """Whether a warpgroup visits fewer key tiles than its block, of those that its band hides.

    Not in ragged and general kernels: there all warpgroups clear padding together.
    """
    return (band.mask.lower or band.mask.upper) and not band.ragged


@cute.jit
def own_key_tiles(ctx: cutlass.Constexpr, view: cutlass.Constexpr, first_row: Int32):
    """Returns ``(begin, end)`` key tiles, of the block's, that this warpgroup visits."""
    begin, end = view.begin, view.end
    if cutlass.const_expr(may_see_less(view.band)):
        own_begin, own_end = key_tile_range(view.band, first_row, wgmma.ROWS, ctx.tile_kv)
        begin = cutlass.min(cutlass.max(begin, own_begin), end)
        end = cutlass.max(cutlass.min(end, own_end), begin)
    return begin, end


@cute.jit
def skip_tiles(
    ctx: cutlass.Constexpr, tiles: Int32, key_state: PipelineState, value_state: PipelineState
):
    """Takes key and value tiles from the pipelines unread; returns the pipelines' positions."""
    if cutlass.const_expr(may_see_less(ctx.visibility.defaults)):
        key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
        for _tile in cutlass.range(tiles, unroll=1):
            key_pipeline.consumer_wait(key_state)
            pipelines.release(key_pipeline, key_state.index)
            key_state.advance()
            value_pipeline.consumer_wait(value_state)
            pipelines.release(value_pipeline, value_state.index)
            value_state.advance()
    return key_state, value_state


@cute.jit
def mask_tile(band: cutlass.Constexpr, scores: cute.Tensor, first_row: Int32, first_column: Int32):
    """Hides what the band and the lengths hide from a tile of scores."""
    position = FragmentPosition(first_row, first_column, wgmma.row_offset, wgmma.column_offset)
    mask_keys_in_columns(scores, position, band)


@cute.jit
def cap_tile(ctx: cutlass.Constexpr, scores: cute.Tensor):
    """Applies the soft cap, in kernels that have one."""
    if cutlass.const_expr(ctx.soft_cap is not None):
        cap_scores(ctx.soft_cap, scores)


@cute.jit
def add_dense(
    ctx: cutlass.Constexpr,
    work: cutlass.Constexpr,
    tile: Int32,
    scores: cute.Tensor,
    first_row: Int32,
    column: Int32,
):
    """Adds the bias to a tile of scores and applies the dense mask, in kernels that have them."""
    if cutlass.const_expr(ctx.dense is not None):
        position = FragmentPosition(
            first_row, tile * ctx.tile_kv + column, wgmma.row_offset, wgmma.column_offset
        )
        apply_dense(ctx.dense, work.batch, work.head, scores, position, False)


@cute.jit
def mask_segments(
    ctx: cutlass.Constexpr,
    view: cutlass.Constexpr,
    work: cutlass.Constexpr,
    tile: Int32,
    scores: cute.Tensor,
    first_row: Int32,
    column: Int32,
):
    """Hides other segments' keys from a tile of scores; returns what segments say of the tile."""
    keys = visited_tile(view.segments, ctx.visibility.key_records(work.batch), tile)
    if cutlass.const_expr(keys is not None):
        position = FragmentPosition(
            first_row, tile * ctx.tile_kv + column, wgmma.row_offset, wgmma.column_offset
        )
        query_ids = ctx.visibility.query_ids(work.batch)
        key_ids = ctx.visibility.key_ids(work.batch)
        if keys.differs:
            hide_other_segments(scores, position, query_ids, key_ids)
    return keys


@cute.jit
def clear_padded_values(
    ctx: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    work: cutlass.Constexpr,
    value_state: cutlass.Constexpr,
    tile: Int32,
    thread: Int32,
):
    """Zeroes the values of keys that are padding by their segment id: they may hold NaN."""
    if cutlass.const_expr(keys is not None):
        value_pipeline, ids = ctx.value_pipeline, ctx.visibility.key_ids(work.batch)
        threads = ctx.num_consumers * WARPGROUP_THREADS
        if keys.padded:
            value_pipeline.consumer_wait(value_state)
            stage = ctx.value.shared[None, None, value_state.index]
            clear_padded_rows(stage, ids, tile * ctx.tile_kv, thread, threads)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=threads)


@cute.jit
def clear_padding(
    ctx: cutlass.Constexpr,
    band: cutlass.Constexpr,
    value_state: cutlass.Constexpr,
    first_key: Int32,
    consumer: Int32,
    thread: Int32,
):
    """Zeroes the values past the key length in the first tile visited, the only one with any.

    Their weights are 0, but padding may hold NaN. Past the operand's own end TMA wrote zeros.
    """
    value_pipeline = ctx.value_pipeline
    if band.key_length < cutlass.min(first_key + ctx.tile_kv, ctx.visibility.defaults.key_length):
        value_pipeline.consumer_wait(value_state)
        stage = ctx.value.shared[None, None, value_state.index]
        clear_rows(
            stage,
            band.key_length - first_key,
            consumer * WARPGROUP_THREADS + thread,
            ctx.num_consumers * WARPGROUP_THREADS,
        )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(
            barrier_id=NamedBarrier.CONSUMERS,
            number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
        )


@cute.jit
def sink_of(ctx: cutlass.Constexpr, work: cutlass.Constexpr):
    """Returns the sink of a head, or -inf where there are none."""
    return value_or(ctx.sinks, work.batch * ctx.schedule.heads_of_batch + work.head, NO_SINK)


@cute.jit
def finish_matmul_and_rescale(rows: cute.Tensor, factors: cute.Tensor):
    """Waits for the matmul that adds to the output, then multiplies each row by its factor.

    Nothing is multiplied when all rows of the warp keep theirs. Both branches wait: a wait before
    them would be moved up by ptxas, over the whole softmax that is to run during the matmul.
    """
    if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
        warpgroup.wait_group(0)
        multiply_rows(rows, factors)
    else:
        warpgroup.wait_group(0)


@cute.jit
def multiply_rows(rows: cute.Tensor, factors: cute.Tensor):
    """Multiplies each row of an accumulator view by its factor, in place."""
    for row in cutlass.range_constexpr(cute.size(rows, mode=[0])):
        rows[row, None].store(rows[row, None].load() * factors[row])


@cute.jit
def store_lse(
    ctx: cutlass.Constexpr,
    work: cutlass.Constexpr,
    band: cutlass.Constexpr,
    lse: cute.Tensor,
    row: Int32,
    column: Int32,
):
    """Writes the natural log-sum-exp of this thread's rows; one thread of each quad writes.

    A query past its sequence's end has -inf, also with a sink.
    """
    destination, head, batch, visibility = ctx.lse, work.head, work.batch, ctx.visibility
    if column == 0:
        for i in cutlass.range_constexpr(2):
            query = row + wgmma.row_offset(i)
            if query < ctx.visibility.defaults.query_length:
                is_valid = query < band.query_length
                if cutlass.const_expr(visibility.segments is not None):
                    is_valid = is_valid and not is_padding(visibility, batch, query)
                destination[query, head, batch] = lse[i] if is_valid else NEGATIVE_INFINITY


@cute.jit
def release_queries(ctx: cutlass.Constexpr, buffer: Int32):
    """Lets the producer overwrite this warpgroup's queries; their last matmul has finished."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.query_empty + buffer)


@cute.jit
def store_output(
    ctx: cutlass.Constexpr,
    work: cutlass.Constexpr,
    output: cute.Tensor,
    consumer: Int32,
    thread: Int32,
):
    """Stores 64 output rows through shared memory with TMA, which clips at the last query."""
    barrier = NamedBarrier.CONSUMER_0 + consumer
    # The store of the last tile of work must have read the staging buffer.
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
    staging = ctx.output.shared[None, None, consumer]
    wgmma.store_rows(ctx.mma_values, wgmma.converted(output, ctx.dtype), staging, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
    store, head, batch = ctx.output.store, work.head, work.batch
    tile = work.tile * ctx.num_consumers + consumer
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        store(consumer, tile, head, batch)
