"""Last step of backward on Hopper: dQ from its float32 accumulator.

Reads the accumulator in fragment order (see ``dq_accumulator``), multiplies with the scale, rounds
and writes rows of the ``(B, T, N, D)`` output. One block owns one query tile of one head; its
threads stand in for the consumer threads of the main kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_flash.kernels.shared.division import divide
from jax_flash.kernels.sm90 import dq_accumulator, fragments, wgmma
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
        head_dim: Int32,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        self.kernel(accumulator, d_query, scale, query_length, query_heads, head_dim).launch(
            grid=[query_heads, 1, 1], block=[self.plan.threads, 1, 1]
        )

    @cute.kernel
    def kernel(
        self,
        accumulator: cute.Pointer,
        d_query: cute.Pointer,
        scale: Float32,
        query_length: Int32,
        query_heads: Int32,
        head_dim: Int32,
    ):
        """Converts one query tile of one head."""
        block, _, _ = cute.arch.block_idx()
        index, _, _ = cute.arch.thread_idx()
        consumer = index // WARPGROUP_THREADS
        thread = index % WARPGROUP_THREADS
        query_tiles = (query_length + self.tile.tile_q - 1) // self.tile.tile_q
        head_and_batch = divide(block, query_tiles)
        tile = block - head_and_batch * query_tiles
        batch = divide(head_and_batch, query_heads)
        head = head_and_batch - batch * query_heads

        row, column = wgmma.first_row_and_column(thread)
        if cutlass.const_expr(dq_accumulator.splits_rows(self.tile)):
            row += consumer * wgmma.ROWS
        else:
            column += consumer * dq_accumulator.columns(self.tile)
        query = tile * self.tile.tile_q + row
        floats = dq_accumulator.tile_start(accumulator, self.tile, block)
        fragment = dq_accumulator.fragment_of(floats, self.tile, consumer, thread)
        # A group of four registers is two rows of two neighbouring columns.
        values = cute.make_rmem_tensor(cute.make_layout(fragments.VECTOR), Float32)
        for group in cutlass.range_constexpr(cute.size(fragment, mode=[1])):
            cute.autovec_copy(fragments.vector(fragment, group), values)
            for i in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
                for j in cutlass.range_constexpr(2):
                    pair[j] = (values[2 * i + j] * scale).to(self.dtype)
                target_query = query + wgmma.row_offset(i)
                # Groups are 8 columns apart, and so are the ends of rows.
                if target_query < query_length and column + 8 * group < head_dim:
                    target_row = (Int64(batch) * query_length + target_query) * query_heads + head
                    start = target_row * head_dim + column + 8 * group
                    target = (d_query + start).align(4)
                    cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
