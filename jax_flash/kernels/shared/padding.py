"""Clears rows of a tile in shared memory that are padding: by their position or by their id."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.segments import SegmentIds, TileSegments, VisitedTile, id_at

_VECTOR = 8  # two-byte elements of a 16-byte store


@cute.jit
def clear_rows(tile: cute.Tensor, first: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Zeroes rows ``first`` and on of ``(rows, columns)``; ``threads`` threads share the work.

    The caller must fence the async proxy and synchronise before a matmul reads the tile.
    """
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vectors_of_row = columns // _VECTOR
    first = cutlass.max(first, 0)
    vectors = cute.logical_divide(tile, (None, cute.make_layout(_VECTOR)))
    zeros = cute.make_rmem_tensor(cute.make_layout(_VECTOR), tile.element_type)
    zeros.fill(0.0)
    remaining = (rows - first) * vectors_of_row
    steps = (remaining - thread + threads - 1) // threads
    for step in cutlass.range(steps, unroll=1):
        index = step * threads + thread
        row = index // vectors_of_row
        target = vectors[first + row, (None, index - row * vectors_of_row)]
        cute.autovec_copy(zeros, target)


@cute.jit
def clear_padded_rows(
    tile: cute.Tensor,
    ids: cutlass.Constexpr,
    first: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Zeroes the rows whose segment id is negative; row 0 is at position ``first``.

    See ``clear_rows``.
    """
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vectors_of_row = columns // _VECTOR
    vectors = cute.logical_divide(tile, (None, cute.make_layout(_VECTOR)))
    zeros = cute.make_rmem_tensor(cute.make_layout(_VECTOR), tile.element_type)
    zeros.fill(0.0)
    steps = (rows * vectors_of_row - thread + threads - 1) // threads
    for step in cutlass.range(steps, unroll=1):
        index = step * threads + thread
        row = index // vectors_of_row
        if id_at(ids, first + row) < 0:
            target = vectors[row, (None, index - row * vectors_of_row)]
            cute.autovec_copy(zeros, target)


class TileRows(NamedTuple):
    """The rows of a tile, some of which may be padding."""

    first: Int32
    """Position of row 0."""
    number: int
    length: Int32
    """Of the sequence."""
    operand_length: Int32
    """Positions past it hold zeros already."""
    segments: TileSegments | VisitedTile | None
    """Of the tile; None in kernels that do not support segments."""
    ids: SegmentIds | None


@cute.jit
def holds_padding(rows: cutlass.Constexpr):
    """Whether any row is padding that may hold something else than zeros."""
    padded = rows.length < cutlass.min(rows.first + rows.number, rows.operand_length)
    if cutlass.const_expr(rows.segments is not None):
        padded = padded or rows.segments.padded
    return padded


@cute.jit
def clear_padding(
    tile: cute.Tensor, rows: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr
):
    """Zeroes the rows of ``(rows, columns)`` that are padding.

    Where a call has segments, the ids of positions past a length are negative, too. See
    ``clear_rows``.
    """
    if cutlass.const_expr(rows.segments is not None):
        if rows.segments.padded:
            clear_padded_rows(tile, rows.ids, rows.first, thread, threads)
        else:
            clear_rows(tile, rows.length - rows.first, thread, threads)
    else:
        clear_rows(tile, rows.length - rows.first, thread, threads)
