"""Query tiles as the blocks that own keys visit them: their masks, and what padding they hold.

Scores are transposed there: rows are keys, columns are queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.dense import apply_dense
from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_rows
from jax_flash.kernels.shared.padding import clear_padded_rows, clear_rows
from jax_flash.kernels.shared.segments import differ, hide_other_segments
from jax_flash.kernels.shared.visibility import query_tile_segments
from jax_flash.kernels.sm90 import wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def mask_tile(ctx: cutlass.Constexpr, scores: cute.Tensor, first_row: Int32, first_column: Int32):
    """Hides what the band and the key length hide from a tile of transposed scores."""
    position = FragmentPosition(first_row, first_column, wgmma.row_offset, wgmma.column_offset)
    mask_keys_in_rows(scores, position, ctx.view.band)


@cute.jit
def add_dense(
    ctx: cutlass.Constexpr, head: Int32, scores: cute.Tensor, first_row: Int32, first_column: Int32
):
    """Adds the bias to transposed scores and applies the dense mask, in kernels that have them."""
    if cutlass.const_expr(ctx.dense is not None):
        position = FragmentPosition(first_row, first_column, wgmma.row_offset, wgmma.column_offset)
        apply_dense(ctx.dense, ctx.batch, head, scores, position, True)


@cute.jit
def segments_of_queries(ctx: cutlass.Constexpr, tile: Int32):
    """Returns the segments of a query tile, None in kernels that do not support any."""
    segments = None
    if cutlass.const_expr(ctx.visibility.segments is not None):
        segments = query_tile_segments(ctx.visibility, ctx.batch, tile)
    return segments


@cute.jit
def mask_segments(
    ctx: cutlass.Constexpr,
    queries: cutlass.Constexpr,
    scores: cute.Tensor,
    first_row: Int32,
    first_column: Int32,
):
    """Hides keys from queries of other segments, in kernels that support segments."""
    if cutlass.const_expr(queries is not None):
        position = FragmentPosition(first_row, first_column, wgmma.row_offset, wgmma.column_offset)
        query_ids = ctx.visibility.query_ids(ctx.batch)
        key_ids = ctx.visibility.key_ids(ctx.batch)
        if differ(queries, ctx.view.segments):
            hide_other_segments(scores, position, key_ids, query_ids)


@cute.jit
def clear_query_padding(
    ctx: cutlass.Constexpr,
    segments: cutlass.Constexpr,
    state: cutlass.Constexpr,
    tile: Int32,
    consumer: Int32,
    thread: Int32,
):
    """Zeroes padded queries and their dO: they may hold NaN.

    Of the padding past the query length one tile has a part; by segment id any tile may.
    """
    band, d_output_pipeline = ctx.view.band, ctx.d_output_pipeline
    query_length = ctx.visibility.defaults.query_length
    first_query = tile * ctx.query.rows
    threads = ctx.num_consumers * WARPGROUP_THREADS
    if cutlass.const_expr(segments is not None):
        ids = ctx.visibility.query_ids(ctx.batch)
        if segments.smallest < 0:
            d_output_pipeline.consumer_wait(state)
            queries = ctx.query.shared[None, None, state.index]
            d_outputs = ctx.d_output.shared[None, None, state.index]
            for rows in (queries, d_outputs):
                clear_padded_rows(
                    rows, ids, first_query, consumer * WARPGROUP_THREADS + thread, threads
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=threads)
    if band.query_length < cutlass.min(first_query + ctx.query.rows, query_length):
        d_output_pipeline.consumer_wait(state)
        for operand, stage in (
            (ctx.query, state.index),
            (ctx.d_output, state.index),
        ):
            clear_rows(
                operand.shared[None, None, stage],
                band.query_length - first_query,
                consumer * WARPGROUP_THREADS + thread,
                threads,
            )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=threads)
