"""Which tiles a block visits: ``spec.band_mask``, evaluated on the device.

Every role of a kernel (loader, matmul, softmax) calls these, so that a tile that cannot matter is
never loaded and no two roles can disagree on the number of tiles. Tiles are taken whole, with the
rows past the last query or key: only so are the two ranges each other's transpose.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

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

    @property
    def band(self) -> Band:
        """The bounds that exist."""
        return Band(
            lower=self.lower if self.mask.lower else None,
            upper=self.upper if self.mask.upper else None,
        )


@cute.jit
def key_tile_range(
    values: cutlass.Constexpr,
    first_query: Int32,
    rows: cutlass.Constexpr,
    tile_kv: cutlass.Constexpr,
):
    """Returns ``(begin, end)`` key tiles that the query tile ``[first_query, +rows)`` may see.

    Empty when ``begin >= end``.
    """
    begin, end = visible_key_tiles(
        values.band,
        first_query=first_query,
        last_query=first_query + rows - 1,
        key_length=values.key_length,
        tile_kv=tile_kv,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    begin, end = Int32(begin), Int32(end)
    if cutlass.const_expr(values.ragged):
        end = begin if first_query >= values.query_length else end
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
    first_query: Int32,
    rows: cutlass.Constexpr,
    first_key: Int32,
    keys: cutlass.Constexpr,
):
    """Whether a query of ``[first_query, +rows)`` may not see a key of ``[first_key, +keys)``.

    Where not, the tile of scores needs no masking.
    """
    last_key = first_key + keys - 1
    hidden = last_key >= values.key_length
    if cutlass.const_expr(values.ragged):
        hidden = hidden or first_query + rows > values.query_length
    if cutlass.const_expr(values.mask.upper):
        hidden = hidden or last_key > first_query + values.upper
    if cutlass.const_expr(values.mask.lower):
        hidden = hidden or first_key < first_query + rows - 1 + values.lower
    return hidden
