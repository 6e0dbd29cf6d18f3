"""FlashAttention forward for Hopper: wiring of one kernel.

For each query row, ``O = softmax(scale * Q K^T + mask) V`` and ``lse = log sum exp``, computed in
one pass over key tiles with an online softmax (FlashAttention 2 and 3).

Shapes: Q ``(B, T, N, D)``, K and V ``(B, S, K, D)``, O ``(B, T, N, D)``, lse ``(B, T, N)``. One
block owns ``tile_q`` queries of one head::

    warpgroup 0   producer   one warp issues TMA:  Q (once), then K, V tiles, last tile first
    warpgroup 1   consumer   queries  0..63    S = Q K^T -> softmax -> O += P V
    warpgroup 2   consumer   queries 64..127   the same, on its own rows

    K pipeline, V pipeline: num_stages tiles each; a full barrier counts the bytes of TMA, an
    empty barrier one arrival of each consumer warp.
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
from jax_flash.kernels.shared.tile_scheduler import Schedule, make_schedule
from jax_flash.kernels.shared.visibility import (
    Visibility,
    make_visibility,
    view_of_query_tile,
)
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.forward_compute import compute
from jax_flash.kernels.sm90.forward_load import load
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import REGISTERS, WARPGROUP_THREADS, WARPGROUP_WARPS
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.problem import Support
from jax_flash.spec.variant import KernelVariant, forward_tile_of

HEADS_IN_SECTION = 8
"""Heads whose keys and values stay in the L2 cache while all query tiles are worked on."""


class ForwardContext(NamedTuple):
    """What both roles of a block share: operands in shared memory, pipelines, and its work."""

    query: TmaOperand
    key: TmaOperand
    value: TmaOperand
    output: TmaOperand
    lse: cute.Tensor
    query_full: cute.Pointer
    query_empty: cute.Pointer
    key_pipeline: PipelineTmaAsync
    value_pipeline: PipelineTmaAsync
    mma_scores: cute.TiledMma
    mma_values: cute.TiledMma
    dtype: type
    num_consumers: int
    num_stages: int
    query_stages: int
    weight_buffers: int
    output_in_query: bool
    tile_q: int
    tile_kv: int
    scale_log2: Float32
    sinks: cute.Pointer
    visibility: Visibility
    soft_cap: SoftCap | None
    """None in kernels that do not support one."""
    dense: Dense | None
    """Likewise."""
    schedule: Schedule
    heads_per_group: Int32

    def view_of(self, work):
        """Returns what a query tile may see."""
        return view_of_query_tile(self.visibility, work.batch, work.tile)

    def query_buffer(self, consumer, round_):
        """Returns where the queries of a consumer are in a round, and their barriers' phase."""
        stage, phase = round_ % self.query_stages, round_ // self.query_stages % 2
        return consumer + stage * self.num_consumers, phase

    def producer_state(self):
        """Returns the producer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Producer, self.num_stages)

    def consumer_state(self):
        """Returns a consumer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Consumer, self.num_stages)


class ForwardKernel:
    """Builds the forward kernel of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.variant = variant
        self.tile = forward_tile_of(variant)
        self.dtype = dtype
        self.registers = REGISTERS[self.tile.num_consumer_warpgroups]

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        output: cute.Pointer,
        lse: cute.Pointer,
        sinks: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
        rows_per_query: Int32,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        tile, plan = self.tile, launch_plan(self.variant)
        load_op, store_op = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query_rows, key_rows = sizes.query_rows, sizes.key_rows
        self.kernel(
            tma_atom(query, load_op, wgmma.ROWS, tile.head_dim, query_rows),
            tma_atom(key, load_op, tile.tile_kv, tile.head_dim, key_rows),
            tma_atom(value, load_op, tile.tile_kv, tile.value_head_dim, key_rows),
            tma_atom(output, store_op, wgmma.ROWS, tile.value_head_dim, query_rows),
            lse,
            sinks,
            features,
            scale_log2,
            sizes,
            bounds,
            batch,
            rows_per_query,
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
        tma_output: cute.CopyAtom,
        lse: cute.Pointer,
        sinks: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
        rows_per_query: Int32,
    ):
        """Sets up shared memory and barriers, then splits into roles."""
        tile, consumers = self.tile, self.tile.num_consumer_warpgroups
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_query, tma_key, tma_value, tma_output):
                cpasync.prefetch_descriptor(atom)

        memory = cutlass.memory.SmemAllocator()
        query_buffers = consumers * tile.query_stages
        query_shared = wgmma.allocate(memory, self.dtype, wgmma.ROWS, tile.head_dim, query_buffers)
        key_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_kv, tile.head_dim, tile.num_stages
        )
        value_shared = wgmma.allocate(
            memory, self.dtype, tile.tile_kv, tile.value_head_dim, tile.num_stages
        )
        if cutlass.const_expr(tile.output_in_query):
            output_shared = wgmma.first_columns(query_shared, tile.value_head_dim)
        else:
            output_shared = wgmma.allocate(
                memory, self.dtype, wgmma.ROWS, tile.value_head_dim, consumers
            )
        query_full = memory.allocate_array(cutlass.Int64, query_buffers)
        query_empty = memory.allocate_array(cutlass.Int64, query_buffers)
        key_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        value_barriers = memory.allocate_array(cutlass.Int64, 2 * tile.num_stages)
        if warp == 0:
            pipelines.init_barriers(query_full, query_buffers, 1)
            pipelines.init_barriers(query_empty, query_buffers, WARPGROUP_WARPS)

        packs_heads = self.variant.support is Support.RAGGED
        cap, dense = changes_of_scores(self.variant, features, sizes, scale_log2)
        key_operand = TmaOperand(tma_key, key_shared)
        value_operand = TmaOperand(tma_value, value_shared)
        ctx = ForwardContext(
            query=TmaOperand(tma_query, query_shared),
            key=key_operand,
            value=value_operand,
            output=TmaOperand(tma_output, output_shared),
            lse=cute.make_tensor(
                lse,
                cute.make_layout(
                    (sizes.query_length, sizes.query_heads, 1),
                    stride=(
                        sizes.query_heads,
                        1,
                        cutlass.Int64(sizes.query_length) * sizes.query_heads,
                    ),
                ),
            ),
            query_full=query_full,
            query_empty=query_empty,
            key_pipeline=pipelines.tma_pipeline(
                key_barriers, tile.num_stages, key_operand.tile_bytes, consumers
            ),
            value_pipeline=pipelines.tma_pipeline(
                value_barriers, tile.num_stages, value_operand.tile_bytes, consumers
            ),
            mma_scores=wgmma.make_mma(self.dtype, tile.tile_kv, wgmma.K_MAJOR, wgmma.K_MAJOR),
            mma_values=wgmma.make_mma(
                self.dtype, tile.value_head_dim, wgmma.K_MAJOR, wgmma.MN_MAJOR, a_in_registers=True
            ),
            dtype=self.dtype,
            num_consumers=consumers,
            num_stages=tile.num_stages,
            query_stages=tile.query_stages,
            weight_buffers=tile.weight_buffers,
            output_in_query=tile.output_in_query,
            tile_q=tile.tile_q,
            tile_kv=tile.tile_kv,
            scale_log2=scale_log2,
            sinks=sinks,
            visibility=make_visibility(
                self.variant,
                tile,
                features,
                sizes,
                bounds,
                rows_per_query if packs_heads else None,
            ),
            soft_cap=cap,
            dense=dense,
            schedule=make_schedule(
                (sizes.query_length + tile.tile_q - 1) // tile.tile_q,
                sizes.query_heads,
                batch,
                differ_in_length=self.variant.band.upper,
                heads_in_section=Int32(HEADS_IN_SECTION),
                dealing=launch_plan(self.variant).dealing,
            ),
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
            compute(ctx, warpgroup_index - 1, thread % WARPGROUP_THREADS)
