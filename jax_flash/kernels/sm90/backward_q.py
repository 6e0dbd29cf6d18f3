"""dQ for Hopper, for wide heads: wiring of the kernel.

Formulas as in ``backward``; ``backward_kv`` computes the other two gradients. Like the forward
kernel: one block owns 128 queries of one head and visits the key tiles that they see, so that dQ is
summed in registers, in the order of the keys::

    warpgroup 0   producer   one warp issues TMA:  Q, dO (once), then K and V tiles
    warpgroup 1   consumer   queries  0..63    S = Q K^T   dP = dO V^T   dS = P * (dP - delta)
    warpgroup 2   consumer   queries 64..127   dQ += dS K

    K pipeline: num_key_stages tiles;  V pipeline: num_value_stages tiles.
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
    view_of_query_tiles,
)
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.backward_q_compute import compute
from jax_flash.kernels.sm90.query_rows import QueryRows, make_query_rows
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import REGISTERS, WARPGROUP_THREADS
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.tile import SplitBackwardTile
from jax_flash.spec.variant import KernelVariant, split_backward_tile_of


class BackwardQContext(NamedTuple):
    """What both roles of a block share: operands in shared memory, pipelines, and its work."""

    tile: SplitBackwardTile
    dtype: type
    query: TmaOperand
    d_output: TmaOperand
    key: TmaOperand
    value: TmaOperand
    d_query: TmaOperand
    rows: QueryRows
    query_barriers: cute.Pointer
    """One for each consumer warpgroup's Q and dO."""
    key_pipeline: PipelineTmaAsync
    value_pipeline: PipelineTmaAsync
    mma_scores: cute.TiledMma
    mma_d_query: cute.TiledMma
    scale_log2: Float32
    scale: Float32
    visibility: Visibility
    view: TileView
    """Of the block's queries."""
    soft_cap: SoftCap | None
    """None in kernels that do not support one."""
    dense: Dense | None
    """Likewise."""
    owned_tile: Int32
    """Index of the block's queries, in units of ``tile.owned_queries``."""
    head: Int32
    key_head: Int32
    batch: Int32

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile.num_consumer_warpgroups

    def key_state(self, user: PipelineUserType):
        """Returns a position at the start of the pipeline of K."""
        return make_pipeline_state(user, self.tile.num_key_stages)

    def value_state(self, user: PipelineUserType):
        """Returns a position at the start of the pipeline of V."""
        return make_pipeline_state(user, self.tile.num_value_stages)


class BackwardQKernel:
    """Builds the kernel of dQ of one variant."""

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
        d_query: cute.Pointer,
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
            tma_atom(query, load_op, wgmma.ROWS, tile.head_dim, query_rows),
            tma_atom(key, load_op, tile.tile_kv, tile.head_dim, key_rows),
            tma_atom(value, load_op, tile.tile_kv, tile.value_head_dim, key_rows),
            tma_atom(d_output, load_op, wgmma.ROWS, tile.value_head_dim, query_rows),
            tma_atom(d_query, store_op, wgmma.ROWS, tile.head_dim, query_rows),
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
        tma_d_query: cute.CopyAtom,
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
            for atom in (tma_query, tma_key, tma_value, tma_d_output, tma_d_query):
                cpasync.prefetch_descriptor(atom)

        memory = cutlass.memory.SmemAllocator()
        query_shared = wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.head_dim, consumers)
        d_output_shared = wgmma.allocate(
            memory, self.dtype, wgmma.ROWS, tile.value_head_dim, consumers
        )
        key_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_kv, tile.head_dim, tile.num_key_stages
        )
        value_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_kv, tile.value_head_dim, tile.num_value_stages
        )
        query_barriers = memory.allocate_array(cutlass.Int64, consumers)
        key_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_key_stages)
        value_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_value_stages)
        if warp == 0:
            pipelines.init_barriers(query_barriers, consumers, 1)

        owned_tiles = (sizes.query_length + tile.owned_queries - 1) // tile.owned_queries
        block, _, _ = cute.arch.block_idx()
        head_and_batch = divide(block, owned_tiles)
        batch = divide(head_and_batch, sizes.query_heads)
        head = head_and_batch - batch * sizes.query_heads
        owned_tile = block - head_and_batch * owned_tiles
        if cutlass.const_expr(self.variant.band.upper):
            # Causal: the last queries see the most keys, and the longest start first.
            owned_tile = owned_tiles - 1 - owned_tile
        cap, dense = changes_of_scores(self.variant, features, sizes, scale_log2)
        visibility = make_visibility(self.variant, tile, features, sizes, bounds)
        tiles_of_block = tile.owned_queries // tile.tile_q
        view = view_of_query_tiles(visibility, batch, owned_tile * tiles_of_block, tiles_of_block)
        key_operand = TmaOperand(tma_key, key_shared)
        value_operand = TmaOperand(tma_value, value_shared)
        ctx = BackwardQContext(
            tile=tile,
            dtype=self.dtype,
            query=TmaOperand(tma_query, query_shared),
            d_output=TmaOperand(tma_d_output, d_output_shared),
            key=key_operand,
            value=value_operand,
            d_query=TmaOperand(tma_d_query, query_shared),
            rows=make_query_rows(tile, sizes, lse_log2, delta),
            query_barriers=query_barriers,
            key_pipeline=pipelines.tma_pipeline(
                key_barriers, tile.num_key_stages, key_operand.tile_bytes, consumers
            ),
            value_pipeline=pipelines.tma_pipeline(
                value_barriers, tile.num_value_stages, value_operand.tile_bytes, consumers
            ),
            mma_scores=wgmma.make_mma(self.dtype, tile.tile_kv, wgmma.K_MAJOR, wgmma.K_MAJOR),
            mma_d_query=wgmma.make_mma(
                self.dtype, tile.head_dim, wgmma.K_MAJOR, wgmma.MN_MAJOR, a_in_registers=True
            ),
            scale_log2=scale_log2,
            scale=scale,
            visibility=visibility,
            view=view,
            soft_cap=cap,
            dense=dense,
            owned_tile=owned_tile,
            head=head,
            key_head=divide(head, divide(sizes.query_heads, sizes.key_heads)),
            batch=batch,
        )
        pipelines.publish_barriers()

        warpgroup_index = warp // 4
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                load(ctx, view.begin, view.end)
        else:
            cute.arch.setmaxregister_increase(self.registers.consumer)
            thread, _, _ = cute.arch.thread_idx()
            compute(ctx, warpgroup_index - 1, thread % WARPGROUP_THREADS, view.begin, view.end)


@cute.jit
def load(ctx: cutlass.Constexpr, begin: Int32, end: Int32):
    """Loads this block's queries and dO, then key and value tiles ``begin .. end - 1``."""
    for consumer in cutlass.range_constexpr(ctx.num_consumers):
        barrier = ctx.query_barriers + consumer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                barrier, ctx.query.tile_bytes + ctx.d_output.tile_bytes
            )
        tile = ctx.owned_tile * ctx.num_consumers + consumer
        ctx.query.load(consumer, tile, ctx.head, ctx.batch, barrier)
        ctx.d_output.load(consumer, tile, ctx.head, ctx.batch, barrier)
    # Bound methods are read once: the DSL would carry `ctx` through the loop as if they changed it.
    load_key, load_value = ctx.key.load, ctx.value.load
    key_pipeline, value_pipeline = ctx.key_pipeline, ctx.value_pipeline
    key_state = ctx.key_state(PipelineUserType.Producer)
    value_state = ctx.value_state(PipelineUserType.Producer)
    for tile in cutlass.range(begin, end, unroll=1):
        key_pipeline.producer_acquire(key_state)
        barrier = key_pipeline.producer_get_barrier(key_state)
        load_key(key_state.index, tile, ctx.key_head, ctx.batch, barrier)
        key_state.advance()
        value_pipeline.producer_acquire(value_state)
        barrier = value_pipeline.producer_get_barrier(value_state)
        load_value(value_state.index, tile, ctx.key_head, ctx.batch, barrier)
        value_state.advance()
