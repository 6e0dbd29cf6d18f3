"""Packed sequences: a query sees the keys of its own segment alone.

Ids of padding are negative, and never equal for a query and a key. So that no tile is compared in
vain, each tile of queries and of keys comes with a record of four integers (``ops.segments``)::

    smallest id, largest id, first and past-the-last tile of the other side that it may see

Calls without segments pass null pointers: every tile then is of segment 0 and sees all others.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from jax_flash.kernels.shared.online_softmax import NEGATIVE_INFINITY
from jax_flash.spec.buffers import SEGMENT_RECORD

_ALL_TILES = 2**31 - 1


class SegmentArrays(NamedTuple):
    """Pointers to ids ``(B, T)`` and ``(B, S)`` and to records ``(B, tiles, 4)``, or null."""

    query_ids: cute.Pointer
    key_ids: cute.Pointer
    query_tiles: cute.Pointer
    key_tiles: cute.Pointer


class TileSegments(NamedTuple):
    """The record of one tile."""

    smallest: Int32
    largest: Int32
    begin: Int32
    end: Int32


class SegmentIds(NamedTuple):
    """Ids ``(B, length)`` of queries or of keys."""

    pointer: cute.Pointer
    batch: Int32
    length: Int32


@cute.jit
def tile_segments(records: cute.Pointer, tiles: Int32, batch: Int32, tile: Int32):
    """Returns the record of ``tile``, of ``tiles`` in each batch element."""
    smallest, largest, begin, end = Int32(0), Int32(0), Int32(0), Int32(_ALL_TILES)
    if records.toint() != Int64(0):
        start = (Int64(batch) * tiles + tile) * SEGMENT_RECORD
        layout = cute.make_layout(SEGMENT_RECORD)
        record = cute.make_tensor((records + start).align(16), layout).load()
        smallest, largest, begin, end = record[0], record[1], record[2], record[3]
    return TileSegments(smallest, largest, begin, end)


@cute.jit
def joined(first: cutlass.Constexpr, second: cutlass.Constexpr):
    """Returns the record of two tiles taken as one."""
    return TileSegments(
        cutlass.min(first.smallest, second.smallest),
        cutlass.max(first.largest, second.largest),
        cutlass.min(first.begin, second.begin),
        cutlass.max(first.end, second.end),
    )


@cute.jit
def differ(queries: cutlass.Constexpr, keys: cutlass.Constexpr):
    """Whether some query and some key of two tiles are of different segments, or padding."""
    return (
        queries.smallest != queries.largest
        or keys.smallest != keys.largest
        or queries.smallest != keys.smallest
    )


@cute.jit
def id_at(ids: cutlass.Constexpr, position: Int32):
    """Returns the segment id of a position; past the operand's end, that of its last."""
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

    What may stay is first collected in one bit a column, in a loop: unrolled, the ids of a whole
    row would need registers of their own.
    """
    columns = cute.size(scores, mode=[1])
    assert columns <= Uint32.width, "a row's columns of one thread must fit a word"
    ids = cute.make_rmem_tensor(cute.make_layout(cute.size(scores, mode=[0])), Int32)
    stays = cute.make_rmem_tensor(ids.layout, Uint32)
    stays.fill(0)
    column_offset, first_column = position.column_offset, position.first_column
    for row in cutlass.range_constexpr(cute.size(ids)):
        ids[row] = id_at(of_rows, position.first_row + position.row_offset(row))
    for column in cutlass.range(columns, unroll=4):
        column_id = id_at(of_columns, first_column + column_offset(column))
        bit = Uint32(1) << Uint32(column)
        for row in cutlass.range_constexpr(cute.size(ids)):
            stays[row] = stays[row] | (bit if ids[row] == column_id else Uint32(0))
    for row in cutlass.range_constexpr(cute.size(ids)):
        for column in cutlass.range_constexpr(columns):
            score = scores[row, column]
            is_seen = (stays[row] & Uint32(1 << column)) != Uint32(0)
            scores[row, column] = score if is_seen else NEGATIVE_INFINITY
