"""What a tile of queries, or of keys, may see: the one source that every role of a kernel asks."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_flash.kernels.shared.parameters import Bounds, Features, Sizes
from jax_flash.kernels.shared.segments import (
    SegmentArrays,
    SegmentIds,
    TileRecords,
    TileSegments,
    id_at,
    joined,
    tile_segments,
)
from jax_flash.kernels.shared.sequence import SequenceArrays, SequenceDefaults, band_of_batch
from jax_flash.kernels.shared.tile_ranges import BandValues, key_tile_range, query_tile_range
from jax_flash.spec.problem import Support
from jax_flash.spec.tile import AnyBackwardTile, BackwardBiasTile, ForwardTile
from jax_flash.spec.variant import KernelVariant


class Visibility(NamedTuple):
    """Where the facts come from."""

    sequences: SequenceArrays
    defaults: SequenceDefaults
    segments: SegmentArrays | None
    """None in kernels that do not support segments."""
    tile_q: int
    tile_kv: int

    @property
    def query_tiles(self) -> Int32:
        """Query tiles of a head."""
        return (self.defaults.query_length + self.tile_q - 1) // self.tile_q

    @property
    def key_tiles(self) -> Int32:
        """Key tiles of a head."""
        return (self.defaults.key_length + self.tile_kv - 1) // self.tile_kv

    def query_ids(self, batch: Int32) -> SegmentIds:
        """Segment ids of the queries."""
        assert self.segments is not None
        return SegmentIds(self.segments.query_ids, batch, self.query_tiles * self.tile_q)

    def key_ids(self, batch: Int32) -> SegmentIds:
        """Segment ids of the keys."""
        assert self.segments is not None
        return SegmentIds(self.segments.key_ids, batch, self.key_tiles * self.tile_kv)

    def query_records(self, batch: Int32) -> TileRecords | None:
        """Segments of the query tiles, None in kernels that do not support any."""
        if self.segments is None:
            return None
        return TileRecords(self.segments.query_tiles, self.query_tiles, batch)

    def key_records(self, batch: Int32) -> TileRecords | None:
        """Likewise of the key tiles."""
        if self.segments is None:
            return None
        return TileRecords(self.segments.key_tiles, self.key_tiles, batch)


def make_visibility(
    variant: KernelVariant,
    tile: ForwardTile | AnyBackwardTile | BackwardBiasTile,
    features: Features,
    sizes: Sizes,
    bounds: Bounds,
    rows_per_query: Int32 | None = None,
) -> Visibility:
    """Gathers the facts of one kernel.

    Args:
      variant: decides which of the others have a meaning.
      tile: of the kernel.
      features: offsets; and lengths and segments, in ragged and general kernels alone.
      sizes: of the operands.
      bounds: of the band.
      rows_per_query: as in ``BandValues``.
    """
    is_ragged = variant.support is not Support.BAND
    defaults = SequenceDefaults(
        variant.band, *bounds, sizes.query_length, sizes.key_length, is_ragged, rows_per_query
    )
    segments = features.segments if is_ragged else None
    return Visibility(features.sequences, defaults, segments, tile.tile_q, tile.tile_kv)


class TileView(NamedTuple):
    """What one tile may see: tiles ``begin .. end - 1`` of the other side, masked by the rest."""

    band: BandValues
    segments: TileSegments | None
    """Of the tile itself."""
    begin: Int32
    end: Int32


@cute.jit
def is_padding(visibility: cutlass.Constexpr, batch: Int32, query: Int32):
    """Whether the segment id of a query says that it is padding."""
    ids = visibility.query_ids(batch)
    padding = cutlass.Boolean(False)
    if ids.pointer.toint() != Int64(0):
        padding = id_at(ids, query) < 0
    return padding


@cute.jit
def view_of_query_tile(visibility: cutlass.Constexpr, batch: Int32, tile: Int32):
    """Returns which key tiles a query tile may see; none when ``begin >= end``."""
    return view_of_query_tiles(visibility, batch, tile, 1)


@cute.jit
def view_of_query_tiles(
    visibility: cutlass.Constexpr, batch: Int32, tile: Int32, count: cutlass.Constexpr
):
    """Returns which key tiles any of ``count`` query tiles may see, the first one being ``tile``.

    Those past the operand's last tile see nothing that the others do not.
    """
    band = band_of_batch(visibility.sequences, visibility.defaults, batch)
    first_query = tile * visibility.tile_q
    rows = count * visibility.tile_q
    begin, end = key_tile_range(band, first_query, rows, visibility.tile_kv)
    segments = None
    if cutlass.const_expr(visibility.segments is not None):
        records = visibility.query_records(batch)
        segments = tile_segments(records, tile)
        last_tile = visibility.query_tiles - 1
        for other in cutlass.range_constexpr(1, count):
            of_other = cutlass.min(tile + other, last_tile)
            segments = joined(segments, tile_segments(records, of_other))
        begin = cutlass.max(begin, segments.begin)
        end = cutlass.min(end, segments.end)
    return TileView(band, segments, begin, end)


@cute.jit
def view_of_key_tile(visibility: cutlass.Constexpr, batch: Int32, tile: Int32):
    """Returns which query tiles may see a key tile: the transpose of ``view_of_query_tile``."""
    band = band_of_batch(visibility.sequences, visibility.defaults, batch)
    first_key = tile * visibility.tile_kv
    begin, end = query_tile_range(band, first_key, visibility.tile_kv, visibility.tile_q)
    segments = None
    if cutlass.const_expr(visibility.segments is not None):
        segments = tile_segments(visibility.key_records(batch), tile)
        begin = cutlass.max(begin, segments.begin)
        end = cutlass.min(end, segments.end)
    return TileView(band, segments, begin, end)
