"""Order of work: which query tile, head and batch element a block of the forward kernel owns.

Blocks start in the order of their index. The order changes speed alone: no block's result
depends on another's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

HEADS_IN_SECTION = 8
"""Heads whose keys and values are worked on at a time, so that they stay in the L2 cache."""


@cute.jit
def work_of_block(
    block: Int32, query_tiles: Int32, query_heads: Int32, longest_first: cutlass.Constexpr
):
    """Returns ``(query_tile, head, batch)`` of a block.

    With ``longest_first`` (causal: the last queries see the most keys) the longest tiles of a
    section of heads start first, so that the short ones fill the last wave. Otherwise all tiles
    of a head follow each other, to read its keys and values from the L2 cache.
    """
    if cutlass.const_expr(not longest_first):
        head_and_batch = block // query_tiles
        tile = block - head_and_batch * query_tiles
        batch = head_and_batch // query_heads
        return tile, head_and_batch - batch * query_heads, batch
    tiles_of_batch = query_tiles * query_heads
    batch = block // tiles_of_batch
    in_batch = block - batch * tiles_of_batch
    section = in_batch // (query_tiles * HEADS_IN_SECTION)
    first_head = section * HEADS_IN_SECTION
    heads = cutlass.min(query_heads - first_head, HEADS_IN_SECTION)
    in_section = in_batch - first_head * query_tiles
    rank = in_section // heads
    return query_tiles - 1 - rank, first_head + in_section - rank * heads, batch
