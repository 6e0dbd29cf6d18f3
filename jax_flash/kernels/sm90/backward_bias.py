"""Gradient of a dense bias for Hopper: wiring of the kernel.

The bias is added to the logits, so its gradient is that of the logits, summed over whatever shares
an element of the bias: with P and delta as in ``backward``, ``dBias = sum P * (dP - delta)``. One
block owns a tile of dBias and visits all that shares it, so the sums stay in registers, in an order
that the shapes fix: batch elements outermost, then heads, query tiles and key tiles. A bias
``[B, N, T, S]`` has nothing to sum; of a bias ``[N, 1, S]`` a block sums over batch elements and
query tiles, and over the queries of a tile at the end::

    warpgroup 0   producer   one warp issues TMA: Q and K tiles, dO and V tiles
    warpgroup 1   consumer   queries  0..63    S = Q K^T   dP = dO V^T   dBias += P * (dP - delta)
    warpgroup 2   consumer   queries 64..127   the same, on its own rows

    Q and K pipeline, dO and V pipeline: num_stages pairs of tiles each.

Q and dO of a tile that is visited for one key tile alone are loaded for it alone: the bias is what
differs between keys, so there is nothing to keep them for.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineTmaAsync, PipelineUserType, make_pipeline_state

from jax_flash.kernels.shared.dense import Dense, has_axis
from jax_flash.kernels.shared.division import divide
from jax_flash.kernels.shared.parameters import Bounds, Features, Sizes, dense_of
from jax_flash.kernels.shared.soft_cap import SoftCap, make_soft_cap
from jax_flash.kernels.shared.visibility import Visibility, make_visibility, view_of_query_tile
from jax_flash.kernels.sm90 import pipelines, wgmma
from jax_flash.kernels.sm90.backward_bias_compute import compute
from jax_flash.kernels.sm90.backward_bias_load import load
from jax_flash.kernels.sm90.tma import TmaOperand, tma_atom
from jax_flash.kernels.sm90.warp_schedule import REGISTERS_WITH_NESTED_LOOPS, WARPGROUP_THREADS
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.tile import BackwardBiasTile
from jax_flash.spec.variant import KernelVariant, backward_bias_tile_of


class Range(NamedTuple):
    """Indices ``begin .. end - 1``."""

    begin: Int32
    end: Int32


class Share(NamedTuple):
    """What a block's tile of the gradient is summed over."""

    batches: Range
    heads: Range
    query_tiles: Range
    key_tiles: Range


class BackwardBiasContext(NamedTuple):
    """What both roles of a block share: operands in shared memory, pipelines, and its work."""

    tile: BackwardBiasTile
    query: TmaOperand
    key: TmaOperand
    value: TmaOperand
    d_output: TmaOperand
    sums: cute.Tensor
    """The gradient's tile ``(tile_q, tile_kv)`` in shared memory, where rows or columns meet."""
    lse_log2: cute.Pointer
    delta: cute.Pointer
    padded_query_length: Int32
    d_bias: cute.Pointer
    scores_pipeline: PipelineTmaAsync
    """Of Q and K."""
    weights_pipeline: PipelineTmaAsync
    """Of dO and V."""
    mma: cute.TiledMma
    scale_log2: Float32
    visibility: Visibility
    soft_cap: SoftCap
    dense: Dense
    share: Share
    query_heads: Int32
    heads_per_group: Int32

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile.num_consumer_warpgroups

    def keys_of(self, batch: Int32, query_tile: Int32):
        """Returns the view of a query tile, and which of the block's key tiles are in it."""
        view = view_of_query_tile(self.visibility, batch, query_tile)
        begin = cutlass.max(view.begin, self.share.key_tiles.begin)
        end = cutlass.min(view.end, self.share.key_tiles.end)
        return view, begin, end

    def producer_state(self):
        """Returns the producer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Producer, self.tile.num_stages)

    def consumer_state(self):
        """Returns a consumer's position at the start of a pipeline."""
        return make_pipeline_state(PipelineUserType.Consumer, self.tile.num_stages)


@cute.jit
def _share_of(has: cutlass.Boolean, index: Int32, count: Int32):
    """Returns the block's index alone, or all ``count`` where the bias has one for all."""
    return Range(index if has else Int32(0), index + 1 if has else count)


@cute.jit
def _next_factor(rest: Int32, has: cutlass.Boolean, count: Int32):
    """Returns a block's index along an axis of the grid, and what remains for the others."""
    size = count if has else Int32(1)
    quotient = divide(rest, size)
    return rest - quotient * size, quotient


@cute.jit
def share_of_block(axes: Int32, batch: Int32, heads: Int32, tiles: tuple[Int32, Int32]):
    """Returns what the calling block sums over; ``tiles`` are the query and the key tiles."""
    query_tiles, key_tiles = tiles
    rest, _, _ = cute.arch.block_idx()
    key_tile, rest = _next_factor(rest, has_axis(axes, 3), key_tiles)
    query_tile, rest = _next_factor(rest, has_axis(axes, 2), query_tiles)
    head, batch_index = _next_factor(rest, has_axis(axes, 1), heads)
    return Share(
        _share_of(has_axis(axes, 0), batch_index, batch),
        _share_of(has_axis(axes, 1), head, heads),
        _share_of(has_axis(axes, 2), query_tile, query_tiles),
        _share_of(has_axis(axes, 3), key_tile, key_tiles),
    )


class BackwardBiasKernel:
    """Builds the kernel of a bias's gradient of one variant."""

    def __init__(self, variant: KernelVariant, dtype: type) -> None:
        """Takes the variant and the DSL's type for its dtype."""
        self.variant = variant
        self.tile = backward_bias_tile_of(variant)
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        d_output: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        d_bias: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
        padded_query_length: Int32,
    ):
        """Declares the kernel's parameters in the order of ``spec.kernel_args``."""
        tile, plan = self.tile, launch_plan(self.variant)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        query_rows, key_rows = sizes.query_rows, sizes.key_rows
        self.kernel(
            tma_atom(query, load_op, wgmma.ROWS, tile.head_dim, query_rows),
            tma_atom(key, load_op, tile.tile_kv, tile.head_dim, key_rows),
            tma_atom(value, load_op, tile.tile_kv, tile.value_head_dim, key_rows),
            tma_atom(d_output, load_op, wgmma.ROWS, tile.value_head_dim, query_rows),
            lse_log2,
            delta,
            d_bias,
            features,
            scale_log2,
            sizes,
            bounds,
            batch,
            padded_query_length,
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
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        d_bias: cute.Pointer,
        features: Features,
        scale_log2: Float32,
        sizes: Sizes,
        bounds: Bounds,
        batch: Int32,
        padded_query_length: Int32,
    ):
        """Sets up shared memory and barriers, then splits into roles."""
        tile, consumers = self.tile, self.tile.num_consumer_warpgroups
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_query, tma_key, tma_value, tma_d_output):
                cpasync.prefetch_descriptor(atom)

        memory = cutlass.memory.SmemAllocator()
        stages = tile.num_stages
        query_shared = wgmma.allocate(
            memory, self.dtype, wgmma.ROWS, tile.head_dim, stages * consumers
        )
        key_shared = wgmma.allocate(memory, self.dtype, tile.tile_kv, tile.head_dim, stages)
        d_output_shared = wgmma.allocate(
            memory, self.dtype, wgmma.ROWS, tile.value_head_dim, stages * consumers
        )
        value_shared = wgmma.allocate(memory, self.dtype, tile.tile_kv, tile.value_head_dim, stages)
        sums = memory.allocate_tensor(
            Float32,
            cute.make_layout((tile.tile_q, tile.tile_kv), stride=(tile.sum_columns, 1)),
            byte_alignment=128,
        )
        scores_barriers = memory.allocate_array(cutlass.Int64, 2 * stages)
        weights_barriers = memory.allocate_array(cutlass.Int64, 2 * stages)
        query, key = TmaOperand(tma_query, query_shared), TmaOperand(tma_key, key_shared)
        d_output = TmaOperand(tma_d_output, d_output_shared)
        value = TmaOperand(tma_value, value_shared)
        visibility = make_visibility(self.variant, tile, features, sizes, bounds)
        ctx = BackwardBiasContext(
            tile=tile,
            query=query,
            key=key,
            value=value,
            d_output=d_output,
            sums=sums,
            lse_log2=lse_log2,
            delta=delta,
            padded_query_length=padded_query_length,
            d_bias=d_bias,
            scores_pipeline=pipelines.tma_pipeline(
                scores_barriers, stages, consumers * query.tile_bytes + key.tile_bytes, consumers
            ),
            weights_pipeline=pipelines.tma_pipeline(
                weights_barriers,
                stages,
                consumers * d_output.tile_bytes + value.tile_bytes,
                consumers,
            ),
            mma=wgmma.make_mma(self.dtype, tile.tile_kv, wgmma.K_MAJOR, wgmma.K_MAJOR),
            scale_log2=scale_log2,
            visibility=visibility,
            soft_cap=make_soft_cap(features.soft_cap, scale_log2),
            dense=dense_of(features, sizes),
            share=share_of_block(
                features.bias_axes,
                batch,
                sizes.query_heads,
                (visibility.query_tiles, visibility.key_tiles),
            ),
            query_heads=sizes.query_heads,
            heads_per_group=divide(sizes.query_heads, sizes.key_heads),
        )
        pipelines.publish_barriers()

        warpgroup_index = warp // 4
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(REGISTERS_WITH_NESTED_LOOPS.producer)
            if warp == 0:
                load(ctx)
        else:
            cute.arch.setmaxregister_increase(REGISTERS_WITH_NESTED_LOOPS.consumer)
            thread, _, _ = cute.arch.thread_idx()
            compute(ctx, warpgroup_index - 1, thread % WARPGROUP_THREADS)
