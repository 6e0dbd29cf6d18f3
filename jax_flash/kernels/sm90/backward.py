"""FlashAttention backward for Hopper: wiring of the main kernel.

With ``P = exp(scale * Q K^T - lse)``, ``dP = dO V^T`` and ``delta = rowsum(dO * O) - dlse``::

    dV = P^T dO      dS = P * (dP - delta)      dK = scale * dS^T Q      dQ = scale * dS K

(FlashAttention 2, algorithm 2; the log-sum-exp's cotangent enters through delta.) Shapes as in
``forward``. One block owns ``tile_kv`` keys of one key head and visits the query tiles of every
query head of the group, so that dK and dV are summed in registers, in a fixed order, also for
grouped heads. Then it owns the next keys (``shared.tile_scheduler``), whose loads start before
these gradients are stored::

    warpgroup 0   producer   one warp issues TMA:  K, V, then Q, lse and dO, delta tiles
                  reduce     adds dQ parts to global memory; two warps, in turns, when deterministic
    warpgroup 1   consumer   keys  0..63    S^T = K Q^T   dP^T = V dO^T   dV += P^T dO
    warpgroup 2   consumer   keys 64..127   dK += dS^T Q  dS -> shared memory, then dQ part = dS K
                                            over all keys of the block -> shared memory

    Q pipeline, dO pipeline: num_stages tiles each, with their row statistics on the same barrier.
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
from jax_flash.kernels.shared.tile_scheduler import Schedule, make_schedule, work_at
from jax_flash.kernels.shared.visibility import (
    TileView,
    Visibility,
    make_visibility,
    view_of_key_tile,
)
from jax_flash.kernels.sm90 import dq_accumulator, pipelines, tile_counter, wgmma
from jax_flash.kernels.sm90.backward_compute import compute
from jax_flash.kernels.sm90.backward_load import load
from jax_flash.kernels.sm90.backward_reduce import reduce, reduce_warps
from jax_flash.kernels.sm90.query_rows import QueryRows, make_query_rows
from jax_flash.kernels.sm90.tile_counter import TileCounter
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import REGISTERS, WARPGROUP_THREADS, WARPGROUP_WARPS
from jax_flash.spec.launch_plan import Dealing, launch_plan
from jax_flash.spec.tile import BackwardTile
from jax_flash.spec.variant import KernelVariant, fused_backward_tile_of


def heads_in_section(variant: KernelVariant, tile: BackwardTile, key_tiles: Int32) -> Int32:
    """Returns of how many heads key tiles are worked on side by side, where they are not dealt out.

    Blocks that start together then have tiles of one length. Deterministic ones of one head would
    have to wait, as each can only follow the one before it, and the more the more their lengths
    differ. What is read and added to by all together must fit the L2 cache: Q, dO and the float32
    sums of dQ, if there are as many queries as keys.
    """
    megabytes = 32 if variant.deterministic and variant.band.upper else 16
    bytes_of_tile = tile.tile_kv * tile.head_dim * (2 + 2 + 4)
    return cutlass.max(divide(Int32(megabytes * 2**20 // bytes_of_tile), key_tiles), 1)


def staging_of(start: cute.Pointer, tile: BackwardTile, dtype: type) -> cute.Tensor:
    """Returns shared memory, from ``start``, for a gradient ``(64, D, consumers)`` to be stored."""
    layout = wgmma.shared_layout(dtype, wgmma.ROWS, tile.head_dim, tile.num_consumer_warpgroups)
    pointer = cute.recast_ptr(start, layout.inner, dtype)
    return cute.make_tensor(pointer, layout.outer)


class BackwardContext(NamedTuple):
    """What the roles of a block share: operands in shared memory, pipelines, and its work."""

    tile: BackwardTile
    dtype: type
    deterministic: bool
    query: TmaOperand
    d_output: TmaOperand
    key: TmaOperand
    value: TmaOperand
    d_key: TmaOperand
    d_value: TmaOperand
    d_scores_shared: cute.Tensor
    lse_log2_shared: cute.Tensor
    delta_shared: cute.Tensor
    rows: QueryRows
    dq_accumulator: cute.Pointer
    dq_semaphores: cute.Pointer
    dq_shared: cute.Pointer
    dq_full_barriers: cute.Pointer
    dq_empty_barrier: cute.Pointer
    key_full_barriers: cute.Pointer
    """One for each consumer's keys and values."""
    key_empty_barrier: cute.Pointer
    query_pipeline: PipelineTmaAsync
    d_output_pipeline: PipelineTmaAsync
    mma_scores: cute.TiledMma
    mma_gradients: cute.TiledMma
    mma_dq: cute.TiledMma
    scale_log2: Float32
    scale: Float32
    visibility: Visibility
    soft_cap: SoftCap | None
    """None in kernels that do not support one."""
    dense: Dense | None
    """Likewise."""
    schedule: Schedule
    counter: TileCounter | None
    """None where key tiles are not handed out."""
    heads_per_group: Int32
    view: TileView | None = None
    """Of the keys that the block owns now, as what follows; set by ``at``."""
    key_tile: Int32 | None = None
    key_head: Int32 | None = None
    batch: Int32 | None = None

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile.num_consumer_warpgroups

    @property
    def reduce_warps(self) -> int:
        """Warps that add parts of dQ in turns."""
        return reduce_warps(self.deterministic)

    @property
    def heads_innermost(self) -> bool:
        """Whether a query tile is visited for all heads before the next one is."""
        return self.deterministic

    @property
    def tile_kv(self) -> int:
        """Keys of a block."""
        return self.tile.tile_kv

    @property
    def dq_splits_rows(self) -> bool:
        """Whether the warpgroups share dQ by rows; otherwise by columns."""
        return dq_accumulator.splits_rows(self.tile)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warpgroup computes."""
        return dq_accumulator.columns(self.tile)

    def at(self, place: Int32) -> "BackwardContext":
        """Returns the context of the keys that the block owns at a place of its schedule."""
        work = work_at(self.schedule, place)
        # Under a causal mask the first keys are seen by the most queries.
        key_tile = self.schedule.tiles - 1 - work.tile
        view = view_of_key_tile(self.visibility, work.batch, key_tile)
        return self._replace(view=view, key_tile=key_tile, key_head=work.head, batch=work.batch)

    def producer_state(self):
        """Returns the producer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Producer, self.tile.num_stages)

    def consumer_state(self):
        """Returns a consumer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Consumer, self.tile.num_stages)


class BackwardKernel:
    """Builds the main backward kernel of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.variant = variant
        self.tile = fused_backward_tile_of(variant)
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
        dq_accumulator: cute.Pointer,
        dq_semaphores: cute.Pointer,
        tile_counter: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        scale: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        tile, plan = self.tile, launch_plan(self.variant)
        load_op, store_op = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query_rows, key_rows = sizes.query_rows, sizes.key_rows
        self.kernel(
            tma_atom(query, load_op, tile.tile_q, tile.head_dim, query_rows),
            tma_atom(key, load_op, wgmma.ROWS, tile.head_dim, key_rows),
            tma_atom(value, load_op, wgmma.ROWS, tile.head_dim, key_rows),
            tma_atom(d_output, load_op, tile.tile_q, tile.head_dim, query_rows),
            tma_atom(d_key, store_op, wgmma.ROWS, tile.head_dim, key_rows),
            tma_atom(d_value, store_op, wgmma.ROWS, tile.head_dim, key_rows),
            lse_log2,
            delta,
            dq_accumulator,
            dq_semaphores,
            tile_counter,
            features,
            scale_log2,
            scale,
            sizes,
            bounds,
            batch,
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
        dq_accumulator_pointer: cute.Pointer,
        dq_semaphores: cute.Pointer,
        tile_counter_pointer: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        scale: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
    ):
        """Sets up shared memory and barriers, then splits into roles."""
        tile, consumers = self.tile, self.tile.num_consumer_warpgroups
        warps_of_reduce = reduce_warps(self.variant.deterministic)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_query, tma_key, tma_value, tma_d_output, tma_d_key, tma_d_value):
                cpasync.prefetch_descriptor(atom)

        memory = cutlass.memory.SmemAllocator()
        key_shared = wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.head_dim, consumers)
        value_shared = wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.head_dim, consumers)
        query_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_q, tile.head_dim, tile.num_stages
        )
        d_output_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_q, tile.head_dim, tile.num_stages
        )
        d_scores_shared = wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.tile_q, 2 * consumers)
        dq_shared = memory.allocate_tensor(
            Float32, cute.make_layout(tile.tile_q * tile.head_dim), byte_alignment=1024
        )
        row_layout = cute.make_layout((tile.tile_q, tile.num_stages))
        lse_log2_shared = memory.allocate_tensor(Float32, row_layout, byte_alignment=128)
        delta_shared = memory.allocate_tensor(Float32, row_layout, byte_alignment=128)
        key_full_barriers = memory.allocate_array(cutlass.Int64, consumers)
        key_empty_barrier = memory.allocate_array(cutlass.Int64, 1)
        query_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        d_output_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        dq_full_barriers = memory.allocate_array(cutlass.Int64, warps_of_reduce)
        dq_empty_barrier = memory.allocate_array(cutlass.Int64, 1)
        if warp == 0:
            pipelines.init_barriers(key_full_barriers, consumers, 1)
            pipelines.init_barriers(key_empty_barrier, 1, consumers * WARPGROUP_WARPS)
            pipelines.init_barriers(dq_full_barriers, warps_of_reduce, consumers * WARPGROUP_WARPS)
            pipelines.init_barriers(dq_empty_barrier, 1, 1)
        dealing, counter = launch_plan(self.variant).dealing, None
        if cutlass.const_expr(dealing is Dealing.HANDED_OUT):
            counter = tile_counter.allocate(memory, tile_counter_pointer)
            if warp == 0:
                tile_counter.init_barriers(counter, consumers * WARPGROUP_WARPS + warps_of_reduce)

        query_operand = TmaOperand(tma_query, query_shared)
        row_bytes = tile.tile_q * Float32.width // 8
        cap, dense = changes_of_scores(self.variant, features, sizes, scale_log2)
        visibility = make_visibility(self.variant, tile, features, sizes, bounds)
        key_tiles = visibility.key_tiles
        ctx = BackwardContext(
            tile=tile,
            dtype=self.dtype,
            deterministic=self.variant.deterministic,
            query=query_operand,
            d_output=TmaOperand(tma_d_output, d_output_shared),
            key=TmaOperand(tma_key, key_shared),
            value=TmaOperand(tma_value, value_shared),
            # Not where K and V are: the next ones are loaded there while these are stored.
            d_key=TmaOperand(tma_d_key, staging_of(d_scores_shared.iterator, tile, self.dtype)),
            d_value=TmaOperand(tma_d_value, staging_of(dq_shared.iterator, tile, self.dtype)),
            d_scores_shared=d_scores_shared,
            lse_log2_shared=lse_log2_shared,
            delta_shared=delta_shared,
            rows=make_query_rows(tile, sizes, lse_log2, delta),
            dq_accumulator=dq_accumulator_pointer,
            dq_semaphores=dq_semaphores,
            dq_shared=dq_shared.iterator,
            dq_full_barriers=dq_full_barriers,
            dq_empty_barrier=dq_empty_barrier,
            key_full_barriers=key_full_barriers,
            key_empty_barrier=key_empty_barrier,
            query_pipeline=pipelines.tma_pipeline(
                query_barriers, tile.num_stages, query_operand.tile_bytes + row_bytes, consumers
            ),
            d_output_pipeline=pipelines.tma_pipeline(
                d_output_barriers, tile.num_stages, query_operand.tile_bytes + row_bytes, consumers
            ),
            mma_scores=wgmma.make_mma(self.dtype, tile.tile_q, wgmma.K_MAJOR, wgmma.K_MAJOR),
            mma_gradients=wgmma.make_mma(
                self.dtype, tile.head_dim, wgmma.K_MAJOR, wgmma.MN_MAJOR, a_in_registers=True
            ),
            mma_dq=dq_accumulator.make_mma(self.dtype, tile),
            scale_log2=scale_log2,
            scale=scale,
            visibility=visibility,
            soft_cap=cap,
            dense=dense,
            schedule=make_schedule(
                key_tiles,
                sizes.key_heads,
                batch,
                differ_in_length=self.variant.band.upper,
                heads_in_section=heads_in_section(self.variant, tile, key_tiles),
                dealing=dealing,
            ),
            counter=counter,
            heads_per_group=divide(sizes.query_heads, sizes.key_heads),
        )
        pipelines.publish_barriers()

        warpgroup_index = warp // 4
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                load(ctx)
            elif warp <= warps_of_reduce:
                reduce(ctx, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.registers.consumer)
            thread, _, _ = cute.arch.thread_idx()
            compute(ctx, warpgroup_index - 1, thread % WARPGROUP_THREADS)
