"""Applies a band mask and the key length to the scores that one thread holds.

The scores are ``(rows, columns)`` of a tile whose rows are queries (forward) or keys (backward,
which computes transposed scores). For each row the visible columns are one interval; its ends are
made relative to the thread's first column, so that an element costs one comparison of a register
with a constant for each bound.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.online_softmax import NEGATIVE_INFINITY
from jax_flash.kernels.shared.tile_ranges import query_of_row


class FragmentPosition:
    """Where a thread's scores lie: absolute positions of its first row and first column.

    ``row_offset(i)`` and ``column_offset(j)`` are the compile-time distances of row ``i`` and
    column ``j`` from them; the architecture's matmul instruction decides them.
    """

    def __init__(self, first_row: Int32, first_column: Int32, row_offset, column_offset) -> None:
        """Binds the run-time origin to the compile-time offsets."""
        self.first_row = first_row
        self.first_column = first_column
        self.row_offset = row_offset
        self.column_offset = column_offset


@cute.jit
def hide_columns(
    scores: cute.Tensor,
    row: cutlass.Constexpr,
    column_offset: cutlass.Constexpr,
    begin: Int32 | None,
    end: Int32 | None,
):
    """Sets the scores of a row outside ``[begin, end)``, relative to its first column, to -inf."""
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        offset = column_offset(column)
        score = scores[row, column]
        if cutlass.const_expr(begin is not None):
            score = NEGATIVE_INFINITY if offset < begin else score
        if cutlass.const_expr(end is not None):
            score = NEGATIVE_INFINITY if offset >= end else score
        scores[row, column] = score


@cute.jit
def mask_keys_in_columns(scores: cute.Tensor, position: cutlass.Constexpr, band: cutlass.Constexpr):
    """Hides keys from queries; rows are queries, columns are keys."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        query_row = position.first_row + position.row_offset(row)
        begin = None
        end = band.key_length
        if cutlass.const_expr(band.ragged):  # a query past the end sees no key
            end = end if query_row < band.query_length else Int32(0)
        query = query_of_row(band, query_row)
        if cutlass.const_expr(band.mask.upper):
            end = cutlass.min(end, query + band.upper + 1)
        if cutlass.const_expr(band.mask.lower):
            begin = query + band.lower - position.first_column
        hide_columns(scores, row, position.column_offset, begin, end - position.first_column)


@cute.jit
def mask_keys_in_rows(scores: cute.Tensor, position: cutlass.Constexpr, band: cutlass.Constexpr):
    """Hides keys from queries; rows are keys, columns are queries."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        key = position.first_row + position.row_offset(row)
        columns = cute.size(scores, mode=[1])
        begin = Int32(0)
        end = None
        if cutlass.const_expr(band.ragged):
            end = band.query_length - position.first_column
        if cutlass.const_expr(band.mask.upper):
            begin = key - band.upper - position.first_column
        if cutlass.const_expr(band.mask.lower):
            past = key - band.lower + 1 - position.first_column
            end = past if cutlass.const_expr(end is None) else cutlass.min(end, past)
        # A key past the end is seen by no query.
        past_last_column = Int32(position.column_offset(columns - 1) + 1)
        begin = past_last_column if key >= band.key_length else begin
        hide_columns(scores, row, position.column_offset, begin, end)
