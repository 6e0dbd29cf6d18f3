"""Which tiles a block visits: ``spec.band_mask``, evaluated on the device.

Every role of a kernel (loader, matmul, softmax) calls these, so that a tile that cannot matter is
never loaded and no two roles can disagree on the number of tiles. Tiles are taken whole, with the
rows past the last query or key: only so are the two ranges each other's transpose.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.division import divide
from jax_flash.spec.band_mask import Band, BandMask, visible_key_tiles, visible_query_tiles


class BandValues(NamedTuple):
    """A band over one sequence: ``q + lower <= k <= q + upper``, ``q < query_length`` and
    ``k < key_length``."""

    mask: BandMask
    """Which bounds exist; the others have no meaning."""
    lower: Int32
    upper: Int32
    query_length: Int32
    key_length: Int32
    ragged: bool
    """Whether the lengths may differ from the operands'. Where not, what queries past the end see
    does not matter: they are not stored, and their gradients are zeros."""
    rows_per_query: Int32 | None = None
    """Rows of the query operand that belong to one query ``q``, one of each head of a group, where
    query heads are packed; lengths count rows. None in kernels that do not support that."""

    @property
    def band(self) -> Band:
        """The bounds that exist."""
        return Band(
            lower=self.lower if self.mask.lower else None,
            upper=self.upper if self.mask.upper else None,
        )


def query_of_row(values: BandValues, row: Int32) -> Int32:
    """Returns the query that a row of the query operand belongs to."""
    if values.rows_per_query is None:
        return row
    return divide(row, values.rows_per_query)


@cute.jit
def key_tile_range(
    values: cutlass.Constexpr,
    first_row: Int32,
    rows: cutlass.Constexpr,
    tile_kv: cutlass.Constexpr,
):
    """Returns ``(begin, end)`` key tiles that the query rows ``[first_row, +rows)`` may see.

    Empty when ``begin >= end``.
    """
    begin, end = visible_key_tiles(
        values.band,
        first_query=query_of_row(values, first_row),
        last_query=query_of_row(values, first_row + rows - 1),
        key_length=values.key_length,
        tile_kv=tile_kv,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    begin, end = Int32(begin), Int32(end)
    if cutlass.const_expr(values.ragged):
        end = begin if first_row >= values.query_length else end
    return begin, end


@cute.jit
def query_tile_range(
    values: cutlass.Constexpr,
    first_key: Int32,
    rows: cutlass.Constexpr,
    tile_q: cutlass.Constexpr,
):
    """Returns ``(begin, end)`` query tiles that may see the key tile ``[first_key, +rows)``."""
    begin, end = visible_query_tiles(
        values.band,
        first_key=first_key,
        last_key=first_key + rows - 1,
        query_length=values.query_length,
        tile_q=tile_q,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    begin, end = Int32(begin), Int32(end)
    if cutlass.const_expr(values.ragged):
        end = begin if first_key >= values.key_length else end
    return begin, end


@cute.jit
def hides_part_of(
    values: cutlass.Constexpr,
    first_row: Int32,
    rows: cutlass.Constexpr,
    first_key: Int32,
    keys: cutlass.Constexpr,
):
    """Whether a query row of ``[first_row, +rows)`` may not see a key of ``[first_key, +keys)``.

    Where not, the tile of scores needs no masking.
    """
    last_key = first_key + keys - 1
    hidden = last_key >= values.key_length
    if cutlass.const_expr(values.ragged):
        hidden = hidden or first_row + rows > values.query_length
    if cutlass.const_expr(values.mask.upper):
        hidden = hidden or last_key > query_of_row(values, first_row) + values.upper
    if cutlass.const_expr(values.mask.lower):
        hidden = hidden or first_key < query_of_row(values, first_row + rows - 1) + values.lower
    return hidden
