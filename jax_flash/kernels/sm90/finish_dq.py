"""Last step of backward on Hopper: dQ from its float32 accumulator.

Reads the accumulator in fragment order (see ``dq_accumulator``), multiplies with the scale, rounds,
and stores rows of the ``(B, T, N, D)`` output through shared memory with TMA, which clips at T and
at D. One block owns one query tile of one head; its threads stand in for the consumer threads of
the main kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from jax_flash.kernels.shared.division import divide
from jax_flash.kernels.sm90 import dq_accumulator, fragments, wgmma
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.variant import KernelVariant, fused_backward_tile_of


class FinishDqKernel:
    """Builds the finish-dQ kernel of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.dtype = dtype
        self.plan = launch_plan(variant)
        self.tile = fused_backward_tile_of(variant)
        if self.plan.threads != WARPGROUP_THREADS * self.tile.num_consumer_warpgroups:
            raise ValueError(
                f"finish_dq runs {self.plan.threads} threads, one for each of the "
                f"{self.tile.num_consumer_warpgroups} consumer warpgroups' threads is needed"
            )

    @cute.jit
    def __call__(
        self,
        accumulator: cute.Pointer,
        d_query: cute.Pointer,
        scale: Float32,
        query_length: Int32,
        query_heads: Int32,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        rows = (query_length, query_heads)
        self.kernel(
            accumulator,
            tma_atom(d_query, store_op, wgmma.ROWS, self.tile.head_dim, rows),
            scale,
            query_length,
            query_heads,
        ).launch(
            grid=[query_heads, 1, 1],
            block=[self.plan.threads, 1, 1],
            smem=self.plan.shared_memory_bytes,
        )

    @cute.kernel
    def kernel(
        self,
        accumulator: cute.Pointer,
        tma_d_query: cute.CopyAtom,
        scale: Float32,
        query_length: Int32,
        query_heads: Int32,
    ):
        """Converts one query tile of one head."""
        tile = self.tile
        block, _, _ = cute.arch.block_idx()
        index, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(index // WARPGROUP_THREADS)
        thread = index % WARPGROUP_THREADS
        query_tiles = (query_length + tile.tile_q - 1) // tile.tile_q
        head_and_batch = divide(block, query_tiles)
        batch = divide(head_and_batch, query_heads)

        floats = dq_accumulator.tile_start(accumulator, tile, block)
        fragment = dq_accumulator.fragment_of(floats, tile, consumer, thread)
        mma = dq_accumulator.make_mma(self.dtype, tile)
        d_query = wgmma.accumulator(mma, dq_accumulator.columns(tile))
        fragments.load(fragment, d_query)
        d_query.store(d_query.load() * scale)

        memory = cutlass.memory.SmemAllocator()
        row_blocks = tile.tile_q // wgmma.ROWS
        staged = TmaOperand(
            tma_d_query,
            wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.head_dim, row_blocks),
        )
        share = dq_accumulator.share_of(staged.shared, tile, consumer)
        wgmma.store_rows(mma, wgmma.converted(d_query, self.dtype), share, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        store, head = staged.store, head_and_batch - batch * query_heads
        first = (block - head_and_batch * query_tiles) * row_blocks
        if cute.arch.make_warp_uniform(index // 32) == 0:
            for row_block in cutlass.range_constexpr(row_blocks):
                store(row_block, first + row_block, head, batch)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
