"""The float32 accumulator of dQ: its layout, shared by the kernels that zero, add to and read it.

Blocks of different key tiles add to the same query tile, so partial sums meet in global memory.
The accumulator of one query tile is stored in the order of the matmul fragments, not row-major:
consumer warpgroup, group of four registers, thread, register. Each thread then adds four
consecutive floats with one vector reduction and a warp covers 512 consecutive bytes, with no
detour through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_flash.kernels.sm90 import wgmma
from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS
from jax_flash.spec.tile import BackwardTile

VECTOR = 4
"""Floats of one vector reduction."""


def splits_rows(tile: BackwardTile) -> bool:
    """Whether the warpgroups share dQ of a tile by rows; otherwise by columns."""
    return tile.tile_q == wgmma.ROWS * tile.num_consumer_warpgroups


def columns(tile: BackwardTile) -> int:
    """Columns of dQ that one warpgroup computes (64 rows of them)."""
    return tile.head_dim if splits_rows(tile) else tile.head_dim // tile.num_consumer_warpgroups


def fragment_of(
    pointer: cute.Pointer,
    tile: BackwardTile,
    head_tile: Int32,
    consumer: Int32,
    thread: Int32,
) -> cute.Tensor:
    """Returns one thread's fragment ``(4, groups)`` of the accumulator of a query tile.

    Args:
      pointer: the accumulator, one ``tile_q * D`` block for each (batch, head, query tile).
      tile: tile of the backward kernel.
      head_tile: index of that block.
      consumer: warpgroup that owns the fragment.
      thread: thread within the warpgroup.
    """
    groups = columns(tile) * wgmma.ROWS // WARPGROUP_THREADS // VECTOR
    group_stride = WARPGROUP_THREADS * VECTOR
    offset = consumer * (groups * group_stride) + thread * VECTOR
    start = pointer + Int64(head_tile) * (tile.tile_q * tile.head_dim) + offset
    return cute.make_tensor(start, cute.make_layout((VECTOR, groups), stride=(1, group_stride)))


@cute.jit
def add(destination: cute.Tensor, fragment: cute.Tensor):
    """Adds an accumulator fragment to its place with 16-byte reductions (relaxed, device scope)."""
    values = cute.make_tensor(fragment.iterator, cute.make_layout(destination.shape))
    for group in cutlass.range_constexpr(cute.size(destination, mode=[1])):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[
                destination[None, group].iterator,
                *(Float32(values[i, group]) for i in range(VECTOR)),
            ],
        )
