"""dK and dV for Hopper, for wide heads: wiring of the kernel.

Formulas as in ``backward``. At D = 256 dK and dV of 128 keys would fill more registers than there
are, so a block owns 64 keys of one key head, and its two consumer warpgroups share the work by
gradient. It visits the query tiles of every query head of the group, so that both gradients are
summed in registers, in a fixed order::

    warpgroup 0   producer   one warp issues TMA:  K, V (once), then Q, lse and dO, delta tiles
    warpgroup 1   dV         S^T = K Q^T     P  ->  shared memory       dV += P^T dO
    warpgroup 2   dK         dP^T = V dO^T   dS = P * (dP - delta)      dK += dS^T Q

    Q pipeline, dO pipeline: num_stages tiles each, with their row statistics on the same barrier;
    a stage is free again when both warpgroups have read it.
    P: num_weight_stages buffers; thread t of one warpgroup writes what thread t of the other reads.

dQ is ``backward_q``'s. Nothing is added up in global memory: no accumulator, no atomics, and the
same bits on every run.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineTmaAsync, PipelineUserType, make_pipeline_state

from jax_flash.kernels.shared.dense import Dense
from jax_flash.kernels.shared.division import divide
from jax_flash.kernels.shared.parameters import Bounds, Features, Sizes, changes_of_scores
from jax_flash.kernels.shared.soft_cap import SoftCap
from jax_flash.kernels.shared.visibility import (
    TileView,
    Visibility,
    make_visibility,
    view_of_key_tile,
)
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.backward_kv_compute import compute_d_key, compute_d_value
from jax_flash.kernels.sm90.backward_load import load_queries
from jax_flash.kernels.sm90.query_rows import QueryRows, make_query_rows
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import REGISTERS, WARPGROUP_THREADS, WARPGROUP_WARPS
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.tile import SplitBackwardTile
from jax_flash.spec.variant import KernelVariant, split_backward_tile_of


class BackwardKvContext(NamedTuple):
    """What the roles of a block share: operands in shared memory, pipelines, and its work."""

    tile: SplitBackwardTile
    dtype: type
    query: TmaOperand
    d_output: TmaOperand
    key: TmaOperand
    value: TmaOperand
    d_key: TmaOperand
    d_value: TmaOperand
    lse_log2_shared: cute.Tensor
    delta_shared: cute.Tensor
    rows: QueryRows
    weights_shared: cute.Pointer
    weights_full: cute.Pointer
    weights_empty: cute.Pointer
    key_barrier: cute.Pointer
    value_barrier: cute.Pointer
    query_pipeline: PipelineTmaAsync
    d_output_pipeline: PipelineTmaAsync
    mma_scores: cute.TiledMma
    mma_d_key: cute.TiledMma
    mma_d_value: cute.TiledMma
    scale_log2: Float32
    scale: Float32
    visibility: Visibility
    view: TileView
    """Of the block's keys."""
    soft_cap: SoftCap | None
    """None in kernels that do not support one."""
    dense: Dense | None
    """Likewise."""
    key_tile: Int32
    key_head: Int32
    batch: Int32
    heads_per_group: Int32

    @property
    def heads_innermost(self) -> bool:
        """Whether a query tile is visited for all heads before the next one is."""
        return False

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile.num_consumer_warpgroups

    def producer_state(self):
        """Returns the producer's position at the start of the pipelines of Q and dO."""
        return make_pipeline_state(PipelineUserType.Producer, self.tile.num_stages)

    def consumer_state(self):
        """Returns a consumer's position at the start of the pipelines of Q and dO."""
        return make_pipeline_state(PipelineUserType.Consumer, self.tile.num_stages)

    def weights_writer_state(self):
        """Returns the position of the warpgroup that writes P."""
        return make_pipeline_state(PipelineUserType.Producer, self.tile.num_weight_stages)

    def weights_reader_state(self):
        """Returns the position of the warpgroup that reads P."""
        return make_pipeline_state(PipelineUserType.Consumer, self.tile.num_weight_stages)


class BackwardKvKernel:
    """Builds the kernel of dK and dV of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.variant = variant
        self.tile = split_backward_tile_of(variant)
        self.dtype = dtype
        self.registers = REGISTERS[self.tile.num_consumer_warpgroups]

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        d_output: cute.Pointer,
        d_key: cute.Pointer,
        d_value: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        scale: Float32,
        sizes: Sizes,
        bounds: Bounds,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        tile, plan = self.tile, launch_plan(self.variant)
        load_op, store_op = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query_rows, key_rows = sizes.query_rows, sizes.key_rows
        self.kernel(
            tma_atom(query, load_op, tile.tile_q, tile.head_dim, query_rows),
            tma_atom(key, load_op, tile.tile_kv, tile.head_dim, key_rows),
            tma_atom(value, load_op, tile.tile_kv, tile.value_head_dim, key_rows),
            tma_atom(d_output, load_op, tile.tile_q, tile.value_head_dim, query_rows),
            tma_atom(d_key, store_op, tile.tile_kv, tile.head_dim, key_rows),
            tma_atom(d_value, store_op, tile.tile_kv, tile.value_head_dim, key_rows),
            lse_log2,
            delta,
            features,
            scale_log2,
            scale,
            sizes,
            bounds,
        ).launch(
            grid=[sizes.query_heads, 1, 1],
            block=[plan.threads, 1, 1],
            smem=plan.shared_memory_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma_query: cute.CopyAtom,
        tma_key: cute.CopyAtom,
        tma_value: cute.CopyAtom,
        tma_d_output: cute.CopyAtom,
        tma_d_key: cute.CopyAtom,
        tma_d_value: cute.CopyAtom,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        scale: Float32,
        sizes: Sizes,
        bounds: Bounds,
    ):
        """Sets up shared memory and barriers, then splits into roles."""
        tile, consumers = self.tile, self.tile.num_consumer_warpgroups
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_query, tma_key, tma_value, tma_d_output, tma_d_key, tma_d_value):
                cpasync.prefetch_descriptor(atom)

        memory = cutlass.memory.SmemAllocator()
        key_shared = wgmma.allocate(memory, self.dtype, tile.tile_kv, tile.head_dim, 1)
        value_shared = wgmma.allocate(memory, self.dtype, tile.tile_kv, tile.value_head_dim, 1)
        query_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_q, tile.head_dim, tile.num_stages
        )
        d_output_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_q, tile.value_head_dim, tile.num_stages
        )
        weights_shared = memory.allocate_tensor(
            Float32,
            cute.make_layout(tile.tile_q * tile.tile_kv * tile.num_weight_stages),
            byte_alignment=128,
        )
        row_layout = cute.make_layout((tile.tile_q, tile.num_stages))
        lse_log2_shared = memory.allocate_tensor(Float32, row_layout, byte_alignment=128)
        delta_shared = memory.allocate_tensor(Float32, row_layout, byte_alignment=128)
        query_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        d_output_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        key_barrier = memory.allocate_array(cutlass.Int64, 1)
        value_barrier = memory.allocate_array(cutlass.Int64, 1)
        weights_full = memory.allocate_array(cutlass.Int64, tile.num_weight_stages)
        weights_empty = memory.allocate_array(cutlass.Int64, tile.num_weight_stages)
        if warp == 0:
            pipelines.init_barriers(key_barrier, 1, 1)
            pipelines.init_barriers(value_barrier, 1, 1)
            pipelines.init_barriers(weights_full, tile.num_weight_stages, WARPGROUP_WARPS)
            pipelines.init_barriers(weights_empty, tile.num_weight_stages, WARPGROUP_WARPS)

        query_operand = TmaOperand(tma_query, query_shared)
        d_output_operand = TmaOperand(tma_d_output, d_output_shared)
        row_bytes = tile.tile_q * Float32.width // 8
        # Under a causal mask the first key tile sees the most queries: the longest start first.
        key_tiles = (sizes.key_length + tile.tile_kv - 1) // tile.tile_kv
        block, _, _ = cute.arch.block_idx()
        head_and_batch = divide(block, key_tiles)
        batch = divide(head_and_batch, sizes.key_heads)
        key_tile = block - head_and_batch * key_tiles
        cap, dense = changes_of_scores(self.variant, features, sizes, scale_log2)
        visibility = make_visibility(self.variant, tile, features, sizes, bounds)
        view = view_of_key_tile(visibility, batch, key_tile)
        ctx = BackwardKvContext(
            tile=tile,
            dtype=self.dtype,
            query=query_operand,
            d_output=d_output_operand,
            key=TmaOperand(tma_key, key_shared),
            value=TmaOperand(tma_value, value_shared),
            d_key=TmaOperand(tma_d_key, key_shared),
            d_value=TmaOperand(tma_d_value, value_shared),
            lse_log2_shared=lse_log2_shared,
            delta_shared=delta_shared,
            rows=make_query_rows(tile, sizes, lse_log2, delta),
            weights_shared=weights_shared.iterator,
            weights_full=weights_full,
            weights_empty=weights_empty,
            key_barrier=key_barrier,
            value_barrier=value_barrier,
            query_pipeline=pipelines.tma_pipeline(
                query_barriers, tile.num_stages, query_operand.tile_bytes + row_bytes, consumers
            ),
            d_output_pipeline=pipelines.tma_pipeline(
                d_output_barriers,
                tile.num_stages,
                d_output_operand.tile_bytes + row_bytes,
                consumers,
            ),
            mma_scores=wgmma.make_mma(self.dtype, tile.tile_q, wgmma.K_MAJOR, wgmma.K_MAJOR),
            mma_d_key=wgmma.make_mma(
                self.dtype, tile.head_dim, wgmma.K_MAJOR, wgmma.MN_MAJOR, a_in_registers=True
            ),
            mma_d_value=wgmma.make_mma(
                self.dtype, tile.value_head_dim, wgmma.K_MAJOR, wgmma.MN_MAJOR, a_in_registers=True
            ),
            scale_log2=scale_log2,
            scale=scale,
            visibility=visibility,
            view=view,
            soft_cap=cap,
            dense=dense,
            key_tile=key_tile,
            key_head=head_and_batch - batch * sizes.key_heads,
            batch=batch,
            heads_per_group=divide(sizes.query_heads, sizes.key_heads),
        )
        pipelines.publish_barriers()

        warpgroup_index = warp // 4
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                load(ctx)
        else:
            cute.arch.setmaxregister_increase(self.registers.consumer)
            thread, _, _ = cute.arch.thread_idx()
            if warpgroup_index == 1:
                compute_d_value(ctx, thread % WARPGROUP_THREADS, view.begin, view.end)
            else:
                compute_d_key(ctx, thread % WARPGROUP_THREADS, view.begin, view.end)


@cute.jit
def load(ctx: cutlass.Constexpr):
    """Loads this block's keys and values, then the query tiles that see them."""
    for operand, barrier in ((ctx.key, ctx.key_barrier), (ctx.value, ctx.value_barrier)):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, operand.tile_bytes)
        operand.load(0, ctx.key_tile, ctx.key_head, ctx.batch, barrier)
    load_queries(ctx, ctx.producer_state(), ctx.producer_state())
