"""Query tiles as the blocks that own keys visit them: order, masks, and what padding they hold.

The last tile comes first: blocks of a key head that start together then go through the queries side
by side, also under a causal mask, and share what they read in the L2 cache. Deterministic blocks
follow the one whose turn is before their own, so they visit a tile for all heads of the group in a
row: a block with fewer tiles would otherwise wait at each head. Scores are transposed: rows are
keys, columns are queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.dense import apply_dense
from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_rows
from jax_flash.kernels.shared.padding import clear_padded_rows, clear_rows
from jax_flash.kernels.shared.segments import hide_other_segments, visited_tile
from jax_flash.kernels.sm90 import wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def number_of_visits(ctx: cutlass.Constexpr):
    """Returns how many times a block visits a tile of queries of a head."""
    return (ctx.view.end - ctx.view.begin) * ctx.heads_per_group


@cute.jit
def first_visit(ctx: cutlass.Constexpr):
    """Returns head and query tile of a block's first visit."""
    return ctx.key_head * ctx.heads_per_group, ctx.view.end - 1


@cute.jit
def next_visit(ctx: cutlass.Constexpr, head: Int32, tile: Int32):
    """Returns head and query tile of the visit that follows."""
    if cutlass.const_expr(ctx.heads_innermost):
        first_head = ctx.key_head * ctx.heads_per_group
        wraps = head + 1 == first_head + ctx.heads_per_group
        return first_head if wraps else head + 1, tile - 1 if wraps else tile
    tile = tile - 1
    wraps = tile < ctx.view.begin
    return head + 1 if wraps else head, ctx.view.end - 1 if wraps else tile


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
    """Returns what segments say of a query tile, None in kernels that do not support any."""
    return visited_tile(ctx.view.segments, ctx.visibility.query_records(ctx.batch), tile)


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
        if queries.differs:
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
        if segments.padded:
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
