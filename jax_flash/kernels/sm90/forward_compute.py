"""Consumer warpgroup of the forward kernel: scores, softmax, weighted values, output."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_flash.kernels.shared.masking import FragmentPosition, mask_keys_in_columns
from jax_flash.kernels.shared.online_softmax import finish_rows, start_rows, weigh
from jax_flash.kernels.sm90 import wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS, NamedBarrier


@cute.jit
def compute(
    ctx: cutlass.Constexpr,
    consumer: Int32,
    thread: Int32,
    begin: Int32,
    full_end: Int32,
    end: Int32,
):
    """Runs one warpgroup's 64 queries over key tiles ``end - 1`` down to ``begin``.

    Software pipeline (FlashAttention 3, section 3.2): while the tensor cores multiply one tile's
    weights with its values, the scores of the next tile are already in flight, and its softmax
    runs under the second matmul.
    """
    mma_scores, mma_values = ctx.mma_scores, ctx.mma_values
    queries = mma_scores.make_fragment_A(mma_scores.get_slice(thread).partition_A(ctx.query.shared))
    queries = queries[None, None, None, consumer]
    keys = mma_scores.make_fragment_B(mma_scores.get_slice(thread).partition_B(ctx.key.shared))
    values = mma_values.make_fragment_B(
        mma_values.get_slice(thread).partition_B(wgmma.transposed(ctx.value.shared))
    )
    output = wgmma.accumulator(mma_values, ctx.value.columns)
    output.fill(0.0)
    output_rows = wgmma.rows_and_columns(output)
    softmax = start_rows(2, ctx.scale_log2, wgmma.reduce_quad)
    rescale = cute.make_rmem_tensor(cute.make_layout(2), Float32)

    row, column = wgmma.first_row_and_column(thread)
    row += (ctx.query_tile * ctx.num_consumers + consumer) * wgmma.ROWS
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state = ctx.consumer_state()
    value_state = ctx.consumer_state()
    cute.arch.mbarrier_wait(ctx.query_barriers + consumer, 0)

    start_turns(ctx, consumer)

    if begin < end:
        scores = wgmma.accumulator(mma_scores, ctx.key.rows)
        key_pipeline.consumer_wait(key_state)
        wait_turn(ctx, consumer)
        warpgroup.fence()
        wgmma.issue(mma_scores, scores, queries, keys[None, None, None, key_state.index], True)
        warpgroup.commit_group()
        pass_turn(ctx, consumer)
        warpgroup.wait_group(0)
        key_pipeline.consumer_release(key_state)
        key_state.advance()
        score_rows = wgmma.rows_and_columns(scores)
        mask_tile(ctx, score_rows, row, (end - 1) * ctx.key.rows + column)
        weigh(softmax, score_rows, rescale)
        weights = wgmma.converted(scores, ctx.dtype)

        for step in cutlass.range(end - 1 - begin, unroll=1):
            tile = end - 2 - step
            next_scores = wgmma.accumulator(mma_scores, ctx.key.rows)
            key_pipeline.consumer_wait(key_state)
            wait_turn(ctx, consumer)
            warpgroup.fence()
            wgmma.issue(
                mma_scores, next_scores, queries, keys[None, None, None, key_state.index], True
            )
            warpgroup.commit_group()
            rescale_rows(output_rows, rescale)
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
            pass_turn(ctx, consumer)
            warpgroup.wait_group(1)
            key_pipeline.consumer_release(key_state)
            key_state.advance()
            next_rows = wgmma.rows_and_columns(next_scores)
            if tile >= full_end:
                mask_tile(ctx, next_rows, row, tile * ctx.key.rows + column)
            weigh(softmax, next_rows, rescale)
            warpgroup.wait_group(0)
            value_pipeline.consumer_release(value_state)
            value_state.advance()
            weights.store(next_scores.load().to(ctx.dtype))

        rescale_rows(output_rows, rescale)
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

    lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    finish_rows(softmax, rescale, lse)
    multiply_rows(output_rows, rescale)
    store_lse(ctx, lse, row, column)
    store_output(ctx, output, consumer, thread)


@cute.jit
def mask_tile(ctx: cutlass.Constexpr, scores: cute.Tensor, first_row: Int32, first_column: Int32):
    """Hides what the band and the key length hide from a tile of scores."""
    position = FragmentPosition(first_row, first_column, wgmma.row_offset, wgmma.column_offset)
    mask_keys_in_columns(scores, position, ctx.band)


@cute.jit
def start_turns(ctx: cutlass.Constexpr, consumer: Int32):
    """Gives the first turn to the first consumer."""
    if consumer == ctx.num_consumers - 1:
        pass_turn(ctx, consumer)


@cute.jit
def wait_turn(ctx: cutlass.Constexpr, consumer: Int32):
    """Waits until the consumer before this one has issued its matmuls.

    Consumers take turns ("ping-pong", FlashAttention 3, section 3.1): one's softmax runs while
    the tensor cores work for another.
    """
    cute.arch.barrier(
        barrier_id=NamedBarrier.TURN_0 + consumer, number_of_threads=2 * WARPGROUP_THREADS
    )


@cute.jit
def pass_turn(ctx: cutlass.Constexpr, consumer: Int32):
    """Lets the next consumer issue its matmuls."""
    following = 0 if consumer == ctx.num_consumers - 1 else consumer + 1
    cute.arch.barrier_arrive(
        barrier_id=NamedBarrier.TURN_0 + following, number_of_threads=2 * WARPGROUP_THREADS
    )


@cute.jit
def rescale_rows(rows: cute.Tensor, factors: cute.Tensor):
    """Multiplies each row by its factor; nothing to do when all rows of the warp keep theirs."""
    if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
        multiply_rows(rows, factors)


@cute.jit
def multiply_rows(rows: cute.Tensor, factors: cute.Tensor):
    """Multiplies each row of an accumulator view by its factor, in place."""
    for row in cutlass.range_constexpr(cute.size(rows, mode=[0])):
        rows[row, None].store(rows[row, None].load() * factors[row])


@cute.jit
def store_lse(ctx: cutlass.Constexpr, lse: cute.Tensor, row: Int32, column: Int32):
    """Writes the natural log-sum-exp of this thread's rows; one thread of each quad writes."""
    destination, head, batch = ctx.lse, ctx.head, ctx.batch
    if column == 0:
        for i in cutlass.range_constexpr(2):
            query = row + wgmma.row_offset(i)
            if query < ctx.query_length:
                destination[query, head, batch] = lse[i]


@cute.jit
def store_output(ctx: cutlass.Constexpr, output: cute.Tensor, consumer: Int32, thread: Int32):
    """Stores 64 output rows through shared memory with TMA, which clips at the last query.

    The staging buffer is the warpgroup's own queries: its matmuls have read them for the last
    time, and no other warpgroup does.
    """
    staging = ctx.output.shared[None, None, consumer]
    wgmma.store_rows(ctx.mma_values, wgmma.converted(output, ctx.dtype), staging, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(
        barrier_id=NamedBarrier.CONSUMER_0 + consumer, number_of_threads=WARPGROUP_THREADS
    )
    store, head, batch = ctx.output.store, ctx.head, ctx.batch
    tile = ctx.query_tile * ctx.num_consumers + consumer
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        store(consumer, tile, head, batch)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
