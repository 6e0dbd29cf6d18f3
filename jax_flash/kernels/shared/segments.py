"""Packed sequences: a query sees the keys of its own segment alone.

Ids of padding are negative, and never equal for a query and a key. So that no tile is compared in
vain, each tile of queries and of keys comes with a record of integers (``ops.segments``)::

    first and past-the-last tile of the other side that it may see
    first and past-the-last of those that are of its own one segment, like itself: never compared
    whether any id is of padding

Calls without segments pass null pointers: every tile then is of one segment, as are all others.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from jax_flash.kernels.shared.hoisting import here
from jax_flash.kernels.shared.online_softmax import NEGATIVE_INFINITY
from jax_flash.spec.buffers import SEGMENT_RECORD

_ALL_TILES = 2**31 - 1
_PADDED = 4
"""Place of the last integer of a record."""


class SegmentArrays(NamedTuple):
    """Pointers to ids ``(B, tiles, tile)`` and to records ``(B, tiles, 5)``, or null.

    Past the last query or key, the ids of the last tile repeat the last one.
    """

    query_ids: cute.Pointer
    key_ids: cute.Pointer
    query_tiles: cute.Pointer
    key_tiles: cute.Pointer


class TileSegments(NamedTuple):
    """The record of a tile."""

    begin: Int32
    end: Int32
    same_begin: Int32
    same_end: Int32
    padded: Boolean


class VisitedTile(NamedTuple):
    """What the segments of a tile and of one that it visits say."""

    differs: Boolean
    """Whether some pair of a query and a key may be of different segments, or padding."""
    padded: Boolean
    """Whether any id of the visited tile is of padding."""


class SegmentIds(NamedTuple):
    """Ids ``(B, length)`` of queries or of keys, where ``length`` is that of whole tiles."""

    pointer: cute.Pointer
    batch: Int32
    length: Int32


class TileRecords(NamedTuple):
    """Records of ``tiles`` query tiles, or key tiles, of each batch element."""

    pointer: cute.Pointer
    tiles: Int32
    batch: Int32


def _record(records, tile: Int32) -> cute.Tensor:
    start = (Int64(records.batch) * records.tiles + here(tile)) * SEGMENT_RECORD
    return cute.make_tensor(records.pointer + start, cute.make_layout(SEGMENT_RECORD))


@cute.jit
def tile_segments(records: cutlass.Constexpr, tile: Int32):
    """Returns the record of ``tile``."""
    begin, end, same_begin, same_end = Int32(0), Int32(_ALL_TILES), Int32(0), Int32(_ALL_TILES)
    padded = Boolean(False)
    if records.pointer.toint() != Int64(0):
        record = _record(records, tile)
        begin, end, same_begin, same_end = record[0], record[1], record[2], record[3]
        padded = record[_PADDED] != 0
    return TileSegments(begin, end, same_begin, same_end, padded)


@cute.jit
def visited_tile(segments: cutlass.Constexpr, others: cutlass.Constexpr, tile: Int32):
    """Returns what is to know of ``tile``, a visited one of ``others``, for a tile's ``segments``.

    Its record is read only where the two differ: not for most tiles of long segments. None in
    kernels that do not support segments, whose ``segments`` are None.
    """
    visited = None
    if cutlass.const_expr(segments is not None):
        differs = tile < segments.same_begin or tile >= segments.same_end
        padded = Boolean(False)
        if differs:
            padded = _record(others, tile)[_PADDED] != 0
        visited = VisitedTile(differs, padded)
    return visited


@cute.jit
def joined(first: cutlass.Constexpr, second: cutlass.Constexpr):
    """Returns the record of two tiles taken as one."""
    return TileSegments(
        cutlass.min(first.begin, second.begin),
        cutlass.max(first.end, second.end),
        cutlass.max(first.same_begin, second.same_begin),
        cutlass.min(first.same_end, second.same_end),
        first.padded or second.padded,
    )


@cute.jit
def id_at(ids: cutlass.Constexpr, position: Int32):
    """Returns the segment id of a position; past the last tile's end, that of its last."""
    index = Int64(ids.batch) * ids.length + cutlass.min(position, ids.length - 1)
    return cute.make_tensor(ids.pointer + index, cute.make_layout(1))[0]


@cute.jit
def hide_other_segments(
    scores: cute.Tensor,
    position: cutlass.Constexpr,
    of_rows: cutlass.Constexpr,
    of_columns: cutlass.Constexpr,
):
    """Sets to -inf the scores whose row and column are of different segments.

    A thread's columns come in pairs of neighbours, whose ids are read together.
    """
    ids = cute.make_rmem_tensor(cute.make_layout(cute.size(scores, mode=[0])), Int32)
    first_row, first_column = here(position.first_row), here(position.first_column)
    for row in cutlass.range_constexpr(cute.size(ids)):
        ids[row] = id_at(of_rows, first_row + position.row_offset(row))
    first = Int64(of_columns.batch) * of_columns.length + first_column
    for column in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
        offset = position.column_offset(column)
        pair = cute.make_tensor((of_columns.pointer + (first + offset)).align(8), 2).load()
        for row in cutlass.range_constexpr(cute.size(ids)):
            for i in cutlass.range_constexpr(2):
                score = scores[row, column + i]
                scores[row, column + i] = score if ids[row] == pair[i] else NEGATIVE_INFINITY
