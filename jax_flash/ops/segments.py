"""Segment ids as the kernels take them: padding made unequal, and a record of every tile.

A record (``kernels.shared.segments``) tells a kernel which tiles of the other side its own tile may
see, so that tiles of other segments are never loaded, and with which of them no ids need be
compared. It costs one comparison for each pair of tiles, never one for each pair of positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash.reference.semantics import valid_positions
from jax_flash.spec.launch_plan import Operation

_PADDED_QUERY, _PADDED_KEY = -1, -2
_NO_ID = jnp.iinfo(jnp.int32).max


def segment_operands(operation: Operation, named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands of a call with segments.

    Args:
      operation: its tiles decide the records.
      named: query_segment_ids [..., T], key_segment_ids [..., S], and query_lengths [...] and
        key_lengths [...] where the call has them.

    Returns:
      Ids, query_tile_ids [..., T tiles, tile] and key_tile_ids [..., S tiles, tile], and records,
      query_tile_segments [..., T tiles, 5] and key_tile_segments [..., S tiles, 5].
    """
    query_ids = _with_padding(named["query_segment_ids"], named.get("query_lengths"), _PADDED_QUERY)
    key_ids = _with_padding(named["key_segment_ids"], named.get("key_lengths"), _PADDED_KEY)
    queries = _by_tile(query_ids, operation.tile_q)
    keys = _by_tile(key_ids, operation.tile_kv)
    same = _of_one_segment(queries, keys)
    begin, end = _visible_key_tiles(queries, keys)
    # Both bounds grow with the query tile, so these counts are the transposed ranges.
    key_tile = jnp.arange(keys.shape[-2], dtype=jnp.int32)
    query_begin = jnp.sum(end[..., None, :] <= key_tile[:, None], axis=-1, dtype=jnp.int32)
    query_end = jnp.sum(begin[..., None, :] <= key_tile[:, None], axis=-1, dtype=jnp.int32)
    return {
        "query_tile_ids": queries,
        "key_tile_ids": keys,
        "query_tile_segments": _records(queries, begin, end, same),
        "key_tile_segments": _records(keys, query_begin, query_end, jnp.swapaxes(same, -1, -2)),
    }


def _with_padding(ids: jax.Array, lengths: jax.Array | None, padding: int) -> jax.Array:
    """Returns the ids with every padded position, by id or by length, made `padding`."""
    positions = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    is_valid = valid_positions(positions, lengths, ids)
    assert is_valid is not None
    return jnp.where(is_valid, ids, padding)


def _by_tile(ids: jax.Array, tile: int) -> jax.Array:
    """Returns ids [..., tiles, tile]; the last one fills what the last tile lacks."""
    length = ids.shape[-1]
    # Not by padding and a reshape, whose sizes jax.export does not relate if they are symbolic.
    tiles = jnp.arange((length + tile - 1) // tile, dtype=jnp.int32)
    positions = tile * tiles[:, None] + jnp.arange(tile, dtype=jnp.int32)
    return jnp.take(ids, jnp.minimum(positions, length - 1), axis=-1, mode="clip")


def _visible_key_tiles(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``begin`` and ``end`` [..., query tiles] of the key tiles that each may see.

    The ranges are widened until neither bound falls from one query tile to the next. Documents in
    order have such ranges; for others this keeps the query tiles that see a key tile contiguous.
    """

    def valid_range(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        smallest = jnp.min(jnp.where(ids < 0, _NO_ID, ids), axis=-1)
        return smallest, jnp.max(ids, axis=-1)

    (first_query, last_query), (first_key, last_key) = valid_range(queries), valid_range(keys)
    may_meet = (first_query[..., :, None] <= last_key[..., None, :]) & (
        first_key[..., None, :] <= last_query[..., :, None]
    )
    tiles = keys.shape[-2]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    begin = jnp.min(jnp.where(may_meet, tile, tiles), axis=-1)
    end = jnp.max(jnp.where(may_meet, tile + 1, 0), axis=-1)
    axis = begin.ndim - 1
    return jax.lax.cummin(begin, axis=axis, reverse=True), jax.lax.cummax(end, axis=axis)


def _of_one_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns bool [..., query tiles, key tiles]: whether all ids of both tiles are equal.

    Never for padding, whose ids differ.
    """
    (first_query, last_query), (first_key, last_key) = (
        (jnp.min(ids, axis=-1), jnp.max(ids, axis=-1)) for ids in (queries, keys)
    )
    return (
        (first_query == last_query)[..., :, None]
        & (first_key == last_key)[..., None, :]
        & (first_query[..., :, None] == first_key[..., None, :])
    )


def _records(ids: jax.Array, begin: jax.Array, end: jax.Array, same: jax.Array) -> jax.Array:
    """Returns the records [..., tiles, 5] of tiles.

    Args:
      ids: of the tiles, [..., tiles, tile].
      begin: the first tile of the other side that each may see, [..., tiles].
      end: past the last of them.
      same: which tiles of the other side are of a tile's own segment, [..., tiles, others]. The
        record has the first run of them.
    """
    others = same.shape[-1]
    other = jnp.arange(others, dtype=jnp.int32)
    same_begin = jnp.min(jnp.where(same, other, others), axis=-1)
    is_past = ~same & (other >= same_begin[..., None])
    same_end = jnp.min(jnp.where(is_past, other, others), axis=-1)
    padded = jnp.any(ids < 0, axis=-1)
    return jnp.stack((begin, end, same_begin, same_end, padded), axis=-1).astype(jnp.int32)
