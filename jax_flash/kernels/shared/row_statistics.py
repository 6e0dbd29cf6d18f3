"""First step of backward: what the main kernel needs of each query row, and cleared workspaces.

For each row: ``delta = rowsum(dO * O) - dlse`` (FlashAttention 2, algorithm 2, line 4; the
log-sum-exp's cotangent enters here) and ``lse_log2 = lse * log2(e)``. Rows that saw no key, and
rows that pad the last tile, get ``lse_log2 = +inf`` and ``delta = 0``, so that the main kernel
computes zero weights for them. XLA's buffers hold anything: the float32 accumulator of dQ, the
semaphores that order its summation and the counter that key tiles are handed out from are zeroed
here, on the same stream, where the main kernel has them.

One block owns one query tile of one head; 16-byte loads, ``D / 8`` lanes a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_flash.kernels.shared.division import divide
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.variant import KernelVariant, backward_tile_of

LOG2_E = 1.4426950408889634
_VECTOR = 8  # two-byte elements of a 16-byte load
_FLOAT_VECTOR = 4  # floats of a 16-byte store


class RowStatisticsKernel:
    """Builds the row-statistics kernel of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.dtype = dtype
        self.plan = launch_plan(variant)
        self.tile_q = backward_tile_of(variant).tile_q
        self.padded_head_dim, padded_value_head_dim = variant.head_dims
        self.lanes = padded_value_head_dim // _VECTOR

    @cute.jit
    def __call__(
        self,
        output: cute.Pointer,
        d_output: cute.Pointer,
        lse: cute.Pointer,
        d_lse: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        query_length: Int32,
        query_heads: Int32,
        value_head_dim: Int32,
        dq_accumulator: cute.Pointer | None = None,
        dq_semaphores: cute.Pointer | None = None,
        tile_counter: cute.Pointer | None = None,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        self.kernel(
            output,
            d_output,
            lse,
            d_lse,
            lse_log2,
            delta,
            query_length,
            query_heads,
            value_head_dim,
            dq_accumulator,
            dq_semaphores,
            tile_counter,
        ).launch(grid=[query_heads, 1, 1], block=[self.plan.threads, 1, 1])

    @cute.kernel
    def kernel(
        self,
        output: cute.Pointer,
        d_output: cute.Pointer,
        lse: cute.Pointer,
        d_lse: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        query_length: Int32,
        query_heads: Int32,
        value_head_dim: Int32,
        dq_accumulator: cute.Pointer | None,
        dq_semaphores: cute.Pointer | None,
        tile_counter: cute.Pointer | None,
    ):
        """Handles one query tile of one head."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        query_tiles = (query_length + self.tile_q - 1) // self.tile_q
        head_and_batch = divide(block, query_tiles)
        tile = block - head_and_batch * query_tiles
        batch = divide(head_and_batch, query_heads)
        head = head_and_batch - batch * query_heads

        lane = thread % self.lanes
        rows_at_once = self.plan.threads // self.lanes
        for step in cutlass.range_constexpr(self.tile_q // rows_at_once):
            row = step * rows_at_once + thread // self.lanes
            query = tile * self.tile_q + row
            # Row of the (B, T, N) arrays; 64 bits: B * T * N * D passes 2^31.
            source = (Int64(batch) * query_length + query) * query_heads + head
            total = Float32(0.0)
            if query < query_length and lane * _VECTOR < value_head_dim:
                start = source * value_head_dim + lane * _VECTOR
                total = self.dot(output + start, d_output + start)
            for distance in (16, 8, 4, 2, 1):
                if cutlass.const_expr(distance < self.lanes):
                    total += cute.arch.shuffle_sync_bfly(total, offset=distance)
            if lane == 0:
                row_lse_log2, row_delta = Float32(float("inf")), Float32(0.0)
                if query < query_length:
                    row_lse = cute.make_tensor(lse + source, cute.make_layout(1))[0]
                    row_d_lse = cute.make_tensor(d_lse + source, cute.make_layout(1))[0]
                    if row_lse != -float("inf"):
                        row_lse_log2 = row_lse * LOG2_E
                        row_delta = total - row_d_lse
                target = Int64(block) * self.tile_q + row
                cute.make_tensor(lse_log2 + target, cute.make_layout(1))[0] = row_lse_log2
                cute.make_tensor(delta + target, cute.make_layout(1))[0] = row_delta

        if cutlass.const_expr(dq_accumulator is not None):
            self.zero_accumulator(dq_accumulator, block, thread)
            if thread == 0:
                cute.make_tensor(dq_semaphores + block, cute.make_layout(1))[0] = Int32(0)
                # One for each batch element, as buffers are; the first of them counts.
                if tile == 0 and head == 0:
                    cute.make_tensor(tile_counter + batch, cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def dot(self, output: cute.Pointer, d_output: cute.Pointer):
        """Returns one lane's part of ``dO . O`` of a row."""
        layout = cute.make_layout(_VECTOR)
        values = cute.make_tensor(output.align(16), layout).load().to(Float32)
        gradients = cute.make_tensor(d_output.align(16), layout).load().to(Float32)
        return (values * gradients).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def zero_accumulator(self, dq_accumulator: cute.Pointer, block: Int32, thread: Int32):
        """Zeroes the ``tile_q * D`` floats of this block's query tile."""
        zeros = cute.make_rmem_tensor(cute.make_layout(_FLOAT_VECTOR), Float32)
        zeros.fill(0.0)
        floats = self.tile_q * self.padded_head_dim
        stride = self.plan.threads * _FLOAT_VECTOR
        for step in cutlass.range_constexpr(floats // stride):
            start = Int64(block) * floats + step * stride + thread * _FLOAT_VECTOR
            target = (dq_accumulator + start).align(16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(_FLOAT_VECTOR)))
