"""How the chunked implementation cuts an axis, and a call's semantics, into tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash.reference.semantics import Semantics

Index = int | jax.Array
State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """An axis of `length` positions cut into `count` tiles of `width` positions, from position 0.

    Every tile has the full width: where `length` is not a multiple of it, the last one starts
    early and overlaps its neighbour. `owned` tells which positions are a tile's own.

    Attributes:
        length: positions on the axis, >= 1.
        width: positions of a tile, at most `length`.
    """

    length: int
    width: int

    @classmethod
    def of(cls, length: int, widest: int) -> Tiling:
        """Cuts `length` positions into tiles of `widest`, or into one tile if they fit in one."""
        if isinstance(length, int):
            return cls(length=length, width=min(length, widest))
        return cls(length=length, width=jax.core.min_dim(length, widest))

    @property
    def count(self) -> int:
        return -(-self.length // self.width)

    def start(self, index: Index) -> Index:
        """The first position of tile `index`."""
        return 0 if self.count == 1 else jnp.minimum(index * self.width, self.length - self.width)

    def positions(self, index: Index) -> jax.Array:
        """The positions of tile `index`: int32 [width]."""
        return self.start(index) + jnp.arange(self.width, dtype=jnp.int32)

    def owned(self, index: Index) -> jax.Array | None:
        """Which positions of tile `index` no earlier tile has: bool [width], or None for all."""
        if self.length % self.width == 0:
            return None
        return self.positions(index) >= index * self.width

    def read(self, array: jax.Array, index: Index, axis: int) -> jax.Array:
        """Tile `index` of `array` along `axis`, which may have size 1 where nothing varies."""
        if array.shape[axis] == 1 or self.count == 1:
            return array
        return lax.dynamic_slice_in_dim(array, self.start(index), self.width, axis)

    def write(self, array: jax.Array, tile: jax.Array, index: Index, axis: int) -> jax.Array:
        """Replaces tile `index` of `array` along `axis`."""
        if array.shape[axis] == 1 or self.count == 1:
            return tile
        return lax.dynamic_update_slice_in_dim(array, tile, self.start(index), axis)

    def loop(
        self,
        body: Callable[[Index, State], State],
        init: State,
        bounds: tuple[Index, Index] | None = None,
    ) -> State:
        """Runs body(index, state) over the tiles from bounds[0] up to bounds[1], or over all."""
        if self.count == 1:
            return body(0, init)  # The masks hide what the bounds would have skipped.
        lower, upper = (0, self.count) if bounds is None else bounds
        return lax.fori_loop(lower, upper, body, init)


def tile_semantics(
    semantics: Semantics, queries: Tiling, i: Index, keys: Tiling, j: Index
) -> Semantics:
    """The part of an aligned record that concerns query tile i and key tile j."""

    def both(array: jax.Array | None) -> jax.Array | None:
        if array is None:
            return None
        return keys.read(queries.read(array, i, -2), j, -1)

    query_ids, key_ids = semantics.query_segment_ids, semantics.key_segment_ids
    return replace(
        semantics,
        query_segment_ids=None if query_ids is None else queries.read(query_ids, i, -1),
        key_segment_ids=None if key_ids is None else keys.read(key_ids, j, -1),
        bias=both(semantics.bias),
        mask=both(semantics.mask),
    )


def key_tiles_in_reach(
    semantics: Semantics, queries: Tiling, i: Index, keys: Tiling
) -> tuple[Index, Index]:
    """The range of key tiles that some query of tile i may attend to, in some batch element.

    It follows from the band and the lengths alone; what else is masked inside the range is left
    to `may_attend`. The range may be empty (lower >= upper).
    """
    lower, upper = jnp.int32(0), jnp.int32(keys.count)
    lowest = jnp.asarray(queries.start(i), jnp.int32)
    highest = lowest + (queries.width - 1)
    if semantics.query_offset is not None and semantics.query_offset.size:
        lowest = lowest + jnp.min(semantics.query_offset)
        highest = highest + jnp.max(semantics.query_offset)
    left, right = semantics.band
    # Sides may be as large as int32 goes, so each is compared before it is added or subtracted.
    if left is not None:
        first = jnp.where(lowest <= left, 0, lowest - left)
        lower = first // keys.width
    if right is not None:
        reaches_end = highest >= keys.length - 1 - right
        end = jnp.where(reaches_end, keys.length, highest + right + 1)
        upper = jnp.minimum(upper, (end + keys.width - 1) // keys.width)
    if semantics.key_lengths is not None:
        longest = jnp.max(semantics.key_lengths, initial=0)
        upper = jnp.minimum(upper, (longest + keys.width - 1) // keys.width)
    if semantics.query_lengths is not None:
        some_valid = queries.start(i) < jnp.max(semantics.query_lengths, initial=0)
        upper = jnp.where(some_valid, upper, 0)
    return lower, upper
