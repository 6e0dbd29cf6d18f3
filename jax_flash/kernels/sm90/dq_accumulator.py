"""The float32 accumulator of dQ: its layout, shared by the kernels that zero, add to and read it.

Blocks of different key tiles add to the same query tile, so partial sums meet in global memory.
The accumulator of one query tile is stored in the order of the matmul fragments, not row-major:
consumer warpgroup, group of four registers, thread, register. So threads store their registers to
shared memory without bank conflicts, and one bulk reduction adds the whole tile.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_flash.kernels.sm90 import fragments, wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS
from jax_flash.spec.tile import BackwardTile


def splits_rows(tile: BackwardTile) -> bool:
    """Whether the warpgroups share dQ of a tile by rows; otherwise by columns."""
    return tile.tile_q == wgmma.ROWS * tile.num_consumer_warpgroups


def columns(tile: BackwardTile) -> int:
    """Columns of dQ that one warpgroup computes (64 rows of them)."""
    return tile.head_dim if splits_rows(tile) else tile.head_dim // tile.num_consumer_warpgroups


def make_mma(dtype: type, tile: BackwardTile) -> cute.TiledMma:
    """Returns the matmul whose accumulator is one warpgroup's share."""
    return wgmma.make_mma(dtype, columns(tile), wgmma.MN_MAJOR, wgmma.MN_MAJOR)


def tile_start(pointer: cute.Pointer, tile: BackwardTile, head_tile: Int32) -> cute.Pointer:
    """Returns where the ``tile_q * D`` floats of a query tile start.

    Args:
      pointer: the accumulator.
      tile: tile of the backward kernel.
      head_tile: index of the query tile among those of all batch elements and heads.
    """
    return pointer + Int64(head_tile) * (tile.tile_q * tile.head_dim)


def fragment_of(
    start: cute.Pointer, tile: BackwardTile, consumer: Int32, thread: Int32
) -> cute.Tensor:
    """Returns one thread's fragment ``(4, groups)`` of a query tile's floats.

    Args:
      start: of these floats, in global or shared memory.
      tile: tile of the backward kernel.
      consumer: warpgroup that owns the fragment.
      thread: thread within the warpgroup.
    """
    groups = columns(tile) * wgmma.ROWS // WARPGROUP_THREADS // fragments.VECTOR
    share = groups * WARPGROUP_THREADS * fragments.VECTOR
    return fragments.of_thread(start + consumer * share, groups, thread)


def share_of(rows: cute.Tensor, tile: BackwardTile, consumer: Int32) -> cute.Tensor:
    """Returns one warpgroup's 64 rows of a query tile ``(64, D, tile_q / 64)``."""
    coordinates = (0, 0, consumer) if splits_rows(tile) else (0, consumer, 0)
    return cute.local_tile(rows, (wgmma.ROWS, columns(tile)), coordinates)


def reduce_tile(destination: cute.Pointer, source: cute.Pointer, tile: BackwardTile) -> None:
    """Issues the bulk reduction of a query tile's floats from shared to global memory."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[
            destination.toint(),
            source.toint(),
            Int32(tile.tile_q * tile.head_dim * Float32.width // 8),
        ],
    )
