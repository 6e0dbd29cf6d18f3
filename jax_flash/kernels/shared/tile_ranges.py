"""Which tiles a block visits, on the device: the same arithmetic as ``spec.band_mask``.

Every role of a kernel (loader, matmul, softmax) calls these, so that a tile that cannot matter is
never loaded and no two roles can disagree on the number of tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.spec.band_mask import BandMask


class BandValues:
    """Run-time values of a band: ``q + lower <= k <= q + upper``, and the key length.

    A plain holder: which bounds exist is compile-time (``mask``), the values are registers.
    """

    def __init__(self, mask: BandMask, lower: Int32, upper: Int32, key_length: Int32) -> None:
        """Binds values to the bounds that ``mask`` says are present."""
        self.mask = mask
        self.lower = lower
        self.upper = upper
        self.key_length = key_length


@cute.jit
def key_tile_range(
    band: cutlass.Constexpr, first_query: Int32, rows: cutlass.Constexpr, tile_kv: cutlass.Constexpr
):
    """Returns ``(begin, full_end, end)`` key tiles of the queries ``[first_query, +rows)``.

    Tiles of ``[begin, end)`` are visited; those from ``full_end`` on need masking at their upper
    side (the diagonal or the key length). Empty when ``begin >= end``.
    """
    begin = Int32(0)
    end_key = band.key_length
    full_end_key = band.key_length
    if cutlass.const_expr(band.mask.upper):
        end_key = cutlass.max(cutlass.min(end_key, first_query + rows + band.upper), 0)
        full_end_key = cutlass.max(cutlass.min(full_end_key, first_query + band.upper + 1), 0)
    if cutlass.const_expr(band.mask.lower):
        begin = cutlass.max(first_query + band.lower, 0) // tile_kv
    end = (end_key + tile_kv - 1) // tile_kv
    return begin, full_end_key // tile_kv, end


@cute.jit
def query_tile_range(
    band: cutlass.Constexpr,
    first_key: Int32,
    rows: cutlass.Constexpr,
    query_length: Int32,
    tile_q: cutlass.Constexpr,
):
    """Returns ``(begin, end)`` query tiles that may see a key of ``[first_key, +rows)``.

    The exact transpose of :func:`key_tile_range`: a query tile is in this range if and only if the
    key tile is in that one's. Deterministic backward counts on it; so neither may look at whether
    the last rows of its own tile exist.
    """
    begin = Int32(0)
    end_query = query_length
    if cutlass.const_expr(band.mask.upper):
        begin = cutlass.max(first_key - band.upper, 0) // tile_q
    if cutlass.const_expr(band.mask.lower):
        end_query = cutlass.max(cutlass.min(query_length, first_key + rows - band.lower), 0)
    end = (end_query + tile_q - 1) // tile_q
    return begin, end
