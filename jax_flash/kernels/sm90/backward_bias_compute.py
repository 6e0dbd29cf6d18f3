"""Consumer warpgroup of the kernel of a bias's gradient: its 64 rows of the tile, and sums."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from jax_flash.kernels.shared.dense import apply_dense, exponent_limit, has_axis
from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_columns
from jax_flash.kernels.shared.online_softmax import NEGATIVE_INFINITY
from jax_flash.kernels.shared.segments import hide_other_segments, visited_tile
from jax_flash.kernels.shared.soft_cap import cap_scores
from jax_flash.kernels.shared.tile_ranges import hides_part_of
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def compute(ctx: cutlass.Constexpr, consumer: Int32, thread: Int32):
    """Sums one warpgroup's rows over all that shares them, then writes the block's tile."""
    mma = ctx.mma
    slice_ = mma.get_slice(thread)
    queries = mma.make_fragment_A(slice_.partition_A(ctx.query.shared))
    keys = mma.make_fragment_B(slice_.partition_B(ctx.key.shared))
    d_outputs = mma.make_fragment_A(slice_.partition_A(ctx.d_output.shared))
    values = mma.make_fragment_B(slice_.partition_B(ctx.value.shared))
    scores_pipeline, weights_pipeline = ctx.scores_pipeline, ctx.weights_pipeline
    scores_state, weights_state = ctx.consumer_state(), ctx.consumer_state()
    total = wgmma.accumulator(mma, ctx.tile.tile_kv)
    total.fill(0.0)
    total_rows = wgmma.rows_and_columns(total)
    row, column = wgmma.first_row_and_column(thread)
    row += consumer * wgmma.ROWS
    batches, heads, query_tiles, _ = ctx.share
    consumers, keys_of = ctx.num_consumers, ctx.keys_of
    for batch in cutlass.range(batches.begin, batches.end, unroll=1):
        for head in cutlass.range(heads.begin, heads.end, unroll=1):
            for query_tile in cutlass.range(query_tiles.begin, query_tiles.end, unroll=1):
                view, begin, end = keys_of(batch, query_tile)
                first_row = query_tile * ctx.tile.tile_q + row
                lse_log2 = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                delta = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                read_rows(ctx, batch, head, first_row, lse_log2, delta)
                for key_tile in cutlass.range(begin, end, unroll=1):
                    scores = wgmma.accumulator(mma, ctx.tile.tile_kv)
                    d_weights = wgmma.accumulator(mma, ctx.tile.tile_kv)
                    scores_pipeline.consumer_wait(scores_state)
                    warpgroup.fence()
                    wgmma.issue(
                        mma,
                        scores,
                        queries[None, None, None, scores_state.index * consumers + consumer],
                        keys[None, None, None, scores_state.index],
                        True,
                    )
                    warpgroup.commit_group()
                    weights_pipeline.consumer_wait(weights_state)
                    wgmma.issue(
                        mma,
                        d_weights,
                        d_outputs[None, None, None, weights_state.index * consumers + consumer],
                        values[None, None, None, weights_state.index],
                        True,
                    )
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    pipelines.release(scores_pipeline, scores_state.index)
                    scores_state.advance()
                    warpgroup.wait_group(0)
                    pipelines.release(weights_pipeline, weights_state.index)
                    weights_state.advance()
                    score_rows = wgmma.rows_and_columns(scores)
                    first_column = key_tile * ctx.tile.tile_kv + column
                    position = FragmentPosition(
                        first_row, first_column, wgmma.row_offset, wgmma.column_offset
                    )
                    cap_scores(ctx.soft_cap, score_rows)
                    apply_dense(ctx.dense, batch, head, score_rows, position, False)
                    hide_tile(ctx, view, batch, (query_tile, key_tile), score_rows, position)
                    add_gradient(
                        ctx,
                        score_rows,
                        wgmma.rows_and_columns(d_weights),
                        (lse_log2, delta),
                        total_rows,
                    )
    write_tile(ctx, total_rows, row, column, consumer * WARPGROUP_THREADS + thread)


@cute.jit
def read_rows(
    ctx: cutlass.Constexpr,
    batch: Int32,
    head: Int32,
    first_row: Int32,
    lse_log2: cute.Tensor,
    delta: cute.Tensor,
):
    """Reads the statistics of this thread's rows; those past the last query are never used."""
    start = (Int64(batch) * ctx.query_heads + head) * ctx.padded_query_length
    last = ctx.visibility.defaults.query_length - 1
    for i in cutlass.range_constexpr(2):
        index = start + cutlass.min(first_row + wgmma.row_offset(i), last)
        lse_log2[i] = cute.make_tensor(ctx.lse_log2 + index, cute.make_layout(1))[0]
        delta[i] = cute.make_tensor(ctx.delta + index, cute.make_layout(1))[0]


@cute.jit
def hide_tile(
    ctx: cutlass.Constexpr,
    view: cutlass.Constexpr,
    batch: Int32,
    tiles: cutlass.Constexpr,
    scores: cute.Tensor,
    position: cutlass.Constexpr,
):
    """Hides what band, lengths and segments hide from a tile of scores."""
    query_tile, key_tile = tiles
    tile_q, tile_kv = ctx.tile.tile_q, ctx.tile.tile_kv
    if hides_part_of(view.band, query_tile * tile_q, tile_q, key_tile * tile_kv, tile_kv):
        mask_keys_in_columns(scores, position, view.band)
    query_ids, key_ids = ctx.visibility.query_ids(batch), ctx.visibility.key_ids(batch)
    if visited_tile(view.segments, ctx.visibility.key_records(batch), key_tile).differs:
        hide_other_segments(scores, position, query_ids, key_ids)


@cute.jit
def add_gradient(
    ctx: cutlass.Constexpr,
    scores: cute.Tensor,
    d_weights: cute.Tensor,
    statistics: cutlass.Constexpr,
    total: cute.Tensor,
):
    """Adds ``P * (dP - delta)``; nothing where P is hidden, as padding may make dP a NaN."""
    lse_log2, delta = statistics
    limit = exponent_limit(ctx.dense)
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            exponent = scores[row, column] * ctx.scale_log2 - lse_log2[row]
            weight = cute.math.exp2(cute.arch.fmin(exponent, limit, nan=True), fastmath=True)
            gradient = weight * (d_weights[row, column] - delta[row])
            is_hidden = scores[row, column] == NEGATIVE_INFINITY
            total[row, column] = total[row, column] + (Float32(0.0) if is_hidden else gradient)


@cute.jit
def write_tile(
    ctx: cutlass.Constexpr, total: cute.Tensor, row: Int32, column: Int32, thread: Int32
):
    """Writes the block's tile, summed over its queries or keys where the bias has one for all.

    These sums are taken from shared memory, in the order of the rows, then of the columns.
    """
    sums, tile_q, tile_kv = ctx.sums, ctx.tile.tile_q, ctx.tile.tile_kv
    axes = ctx.dense.bias.axes
    for i in cutlass.range_constexpr(cute.size(total, mode=[0])):
        for j in cutlass.range_constexpr(cute.size(total, mode=[1])):
            sums[row + wgmma.row_offset(i), column + wgmma.column_offset(j)] = total[i, j]
    meet(ctx)
    rows, columns = Int32(tile_q), Int32(tile_kv)
    if not has_axis(axes, 2):
        rows = Int32(1)
        if thread < tile_kv:
            sum_of = Float32(0.0)
            for i in cutlass.range(tile_q, unroll=4):
                sum_of += sums[i, thread]
            sums[0, thread] = sum_of
        meet(ctx)
    if not has_axis(axes, 3):
        columns = Int32(1)
        if thread < rows:
            sum_of = Float32(0.0)
            for j in cutlass.range(tile_kv, unroll=4):
                sum_of += sums[thread, j]
            sums[thread, 0] = sum_of
        meet(ctx)
    store_tile(ctx, rows, columns, thread)


@cute.jit
def store_tile(ctx: cutlass.Constexpr, rows: Int32, columns: Int32, thread: Int32):
    """Stores ``(rows, columns)`` of the tile, neighbouring threads neighbouring columns."""
    axes, dense, share = ctx.dense.bias.axes, ctx.dense, ctx.share
    queries = dense.query_length if has_axis(axes, 2) else Int32(1)
    keys = dense.key_length if has_axis(axes, 3) else Int32(1)
    heads = dense.query_heads if has_axis(axes, 1) else Int32(1)
    first_query = share.query_tiles.begin * ctx.tile.tile_q
    first_key = share.key_tiles.begin * ctx.tile.tile_kv
    start = (Int64(share.batches.begin) * heads + share.heads.begin) * queries * keys
    column = thread % ctx.tile.tile_kv
    rows_at_once = ctx.num_consumers * WARPGROUP_THREADS // ctx.tile.tile_kv
    sums, d_bias = ctx.sums, ctx.d_bias
    key = first_key + column
    for step in cutlass.range(ctx.tile.tile_q // rows_at_once, unroll=1):
        row = step * rows_at_once + thread // ctx.tile.tile_kv
        query = first_query + row
        if row < rows and column < columns and query < queries and key < keys:
            target = d_bias + start + Int64(query) * keys + key
            cute.make_tensor(target, cute.make_layout(1))[0] = sums[row, column]


@cute.jit
def meet(ctx: cutlass.Constexpr):
    """Waits for all consumer warpgroups; their stores to shared memory are then visible."""
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMERS,
        number_of_threads=ctx.num_consumers * WARPGROUP_THREADS,
    )
