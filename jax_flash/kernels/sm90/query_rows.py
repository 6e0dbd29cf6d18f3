"""Row statistics of queries in global memory, as the kernels that compute gradients read them."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_flash.kernels.shared.parameters import Sizes
from jax_flash.spec.tile import BackwardTile, SplitBackwardTile


class QueryRows(NamedTuple):
    """What ``kernels.shared.row_statistics`` wrote: arrays ``(B, N, tiles * tile_q)``."""

    lse_log2: cute.Pointer
    delta: cute.Pointer
    tile_q: int
    tiles: Int32
    """Query tiles of a head."""
    heads: Int32

    def head_tile(self, batch: Int32, head: Int32, tile: Int32) -> Int32:
        """Returns the index of a query tile among those of all batch elements and heads."""
        return (batch * self.heads + head) * self.tiles + tile

    def of_head(self, pointer: cute.Pointer, batch: Int32, head: Int32) -> cute.Tensor:
        """Returns the statistics ``(tile_q, tiles)`` of one query head."""
        offset = Int64(self.head_tile(batch, head, 0)) * self.tile_q
        layout = cute.make_layout((self.tile_q, self.tiles))
        return cute.make_tensor((pointer + offset).align(16), layout)


def make_query_rows(
    tile: BackwardTile | SplitBackwardTile,
    sizes: Sizes,
    lse_log2: cute.Pointer,
    delta: cute.Pointer,
) -> QueryRows:
    """Returns the row statistics of a kernel's tile."""
    tiles = (sizes.query_length + tile.tile_q - 1) // tile.tile_q
    return QueryRows(lse_log2, delta, tile.tile_q, tiles, sizes.query_heads)
