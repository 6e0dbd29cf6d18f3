"""The band mask: which keys a query may attend to by position alone.

Causal masks, sliding windows and their combinations are one thing: query ``q`` attends to key
``k`` when ``q + offset - left <= k <= q + offset + right``, where an absent bound is unbounded.
Which bounds are present is a compile-time fact of a kernel (:class:`BandMask`); their values are
run-time arguments, so that one kernel serves every window size. Every loader, matmul and softmax
role takes its tiles from the two range functions below.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BandMask:
    """Which bounds a mask has."""

    lower: bool = False
    """Keys before ``query + offset - left`` are hidden (a sliding window)."""
    upper: bool = False
    """Keys after ``query + offset + right`` are hidden (causal, or a window's right side)."""

    @property
    def name(self) -> str:
        """Word used in kernel names: ``full``, ``causal``, ``lower`` or ``band``."""
        return {
            (False, False): "full",
            (False, True): "causal",
            (True, False): "lower",
            (True, True): "band",
        }[self.lower, self.upper]


FULL = BandMask()
"""No bound: every query sees every key."""

BOTH_BOUNDS = BandMask(lower=True, upper=True)
"""The mask that stands for all others, as a bound may hide nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A band with its values: offsets of the first and last visible key from the query position.

    ``lower=None`` or ``upper=None`` means unbounded on that side.
    """

    lower: int | None = None
    upper: int | None = None

    @property
    def mask(self) -> BandMask:
        """The compile-time part: which bounds are present."""
        return BandMask(lower=self.lower is not None, upper=self.upper is not None)

    def sees(self, query: int, key: int) -> bool:
        """Returns whether ``query`` may attend to ``key``; the definition of the mask."""
        above = self.lower is None or key >= query + self.lower
        below = self.upper is None or key <= query + self.upper
        return above and below


UNBOUNDED = 2**30
"""Distance that no key is from a query: a bound of this value hides nothing."""


def kernel_band(band: Band) -> Band:
    """Returns the band as kernels take it: one with a lower bound has an upper bound, too.

    A mask with a lower bound alone is rare; an upper bound that hides nothing serves it, and halves
    the number of windowed kernels.
    """
    if band.lower is None or band.upper is not None:
        return band
    return with_both_bounds(band)


def with_both_bounds(band: Band) -> Band:
    """Returns an equal band that has both bounds, as ragged and general kernels take it."""
    return Band(
        lower=-UNBOUNDED if band.lower is None else band.lower,
        upper=UNBOUNDED if band.upper is None else band.upper,
    )


def band_of(*, is_causal: bool, window: tuple[int | None, int | None], query_offset: int) -> Band:
    """Combines the public arguments into one band.

    Args:
      is_causal: key position <= query position + ``query_offset``.
      window: ``(left, right)`` distances, None = unbounded.
      query_offset: position of query 0 on the key axis.
    """
    left, right = window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return Band(
        lower=None if left is None else query_offset - left,
        upper=None if right is None else query_offset + right,
    )


def visible_key_tiles(
    band: Band,
    *,
    first_query: int,
    last_query: int,
    key_length: int,
    tile_kv: int,
    minimum: Callable[..., int] = min,
    maximum: Callable[..., int] = max,
) -> tuple[int, int]:
    """Returns ``[begin, end)`` of the key tiles that any query of the closed range may see.

    Tiles are ``tile_kv`` keys wide and anchored at key 0. An empty range has ``begin >= end``.
    Device code calls this with its own integers and its own ``minimum`` and ``maximum``.
    """
    begin_key, end_key = 0, key_length
    if band.lower is not None:
        begin_key = maximum(first_query + band.lower, 0)
    if band.upper is not None:
        end_key = maximum(minimum(key_length, last_query + band.upper + 1), 0)
    return begin_key // tile_kv, (end_key + tile_kv - 1) // tile_kv


def visible_query_tiles(
    band: Band,
    *,
    first_key: int,
    last_key: int,
    query_length: int,
    tile_q: int,
    minimum: Callable[..., int] = min,
    maximum: Callable[..., int] = max,
) -> tuple[int, int]:
    """Returns ``[begin, end)`` of the query tiles that may see any key of the closed range.

    For whole tiles, rows past the last query or key included, this is the exact transpose of
    :func:`visible_key_tiles`: a query tile is in a key tile's range if and only if the key tile is
    in its range. The deterministic backward kernel counts visitors and relies on it.
    """
    begin_query, end_query = 0, query_length
    if band.upper is not None:
        begin_query = maximum(first_key - band.upper, 0)
    if band.lower is not None:
        end_query = maximum(minimum(query_length, last_key - band.lower + 1), 0)
    return begin_query // tile_q, (end_query + tile_q - 1) // tile_q
