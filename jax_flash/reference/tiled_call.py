"""One attention call cut into tiles: what the chunked forward and backward passes share."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash.reference.semantics import (
    Semantics,
    align_leading_dimensions,
    may_attend,
    valid_positions,
)
from jax_flash.reference.tiling import Index, Tiling, key_tiles_in_reach, tile_semantics

# Tiles of both axes are as wide as leaves one head's float32 logits in a core's cache.
TILE_QUERIES = 256
TILE_KEYS = 256


def sum_dtype(array: jax.Array) -> jnp.dtype:
    """The dtype of softmax and sums for operands like `array`: float32, or float64."""
    return jnp.promote_types(array.dtype, jnp.float32)


def dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """An einsum of two operands of one dtype, summed and returned in `sum_dtype`."""
    # On accelerators the default for float32 is a product of fewer bits than float32 has.
    in_full = jnp.finfo(left.dtype).bits >= 32
    return jnp.einsum(
        subscripts,
        left,
        right,
        precision=lax.Precision.HIGHEST if in_full else None,
        preferred_element_type=sum_dtype(left),
    )


def finite_shift(maximum: jax.Array) -> jax.Array:
    """0 where `maximum` is -inf, so that exp(x - shift) of a row without logits is 0, not NaN."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def repeat_last(array: jax.Array, size: int) -> jax.Array:
    """Adds a last axis of `size` equal entries."""
    return jnp.broadcast_to(array[..., None], (*array.shape, size))


def split_heads(array: jax.Array, axis: int, key_heads: int) -> jax.Array:
    """Splits the query heads on `axis` < 0 into [K, G]; 1 head, for all, becomes [1, 1]."""
    heads = array.shape[axis]
    split = (1, 1) if heads == 1 else (key_heads, heads // key_heads)
    axis %= array.ndim
    return array.reshape(*array.shape[:axis], *split, *array.shape[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledCall:
    """The operands of a call with heads grouped, its semantics aligned, and its tiles.

    Attributes:
        query: [..., T, K, G, D], G = N // K.
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        semantics: aligned to the leading dimensions.
        queries: tiles of T.
        keys: tiles of S.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    semantics: Semantics
    queries: Tiling
    keys: Tiling

    @classmethod
    def of(
        cls, query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> TiledCall:
        """Prepares operands as `chunked_attention` takes them, with T and S at least 1."""
        return cls(
            query=split_heads(query, -2, key.shape[-2]),
            key=key,
            value=value,
            semantics=align_leading_dimensions(semantics, query.ndim - 3),
            queries=Tiling.of(query.shape[-3], TILE_QUERIES),
            keys=Tiling.of(key.shape[-3], TILE_KEYS),
        )

    @property
    def sinks(self) -> jax.Array | None:
        """The sinks as [..., K, G, 1] in `sum_dtype`, or None."""
        sinks = self.semantics.sinks
        if sinks is None:
            return None
        sinks = sinks.astype(sum_dtype(self.query))
        return sinks.reshape(*sinks.shape[:-1], *self.query.shape[-3:-1], 1)

    def key_tiles(self, i: Index) -> tuple[Index, Index]:
        """The range of key tiles that query tile i has to visit."""
        return key_tiles_in_reach(self.semantics, self.queries, i, self.keys)

    def read_query(self, i: Index) -> jax.Array:
        """Query tile i [..., t, K, G, D], with zeros in place of padding."""
        tile = self.queries.read(self.query, i, -4)
        is_valid = self.valid_queries(i)
        return tile if is_valid is None else jnp.where(is_valid[..., None, None, None], tile, 0)

    def read_key_value(self, j: Index) -> tuple[jax.Array, jax.Array]:
        """Key tile j [..., s, K, D] and value tile j, with zeros in place of padding."""
        tiles = self.keys.read(self.key, j, -3), self.keys.read(self.value, j, -3)
        ids = self.semantics.key_segment_ids
        is_valid = valid_positions(
            self.keys.positions(j),
            self.semantics.key_lengths,
            None if ids is None else self.keys.read(ids, j, -1),
        )
        if is_valid is None:
            return tiles
        # A masked pair has weight 0, but 0 * NaN is NaN.
        k, v = (jnp.where(is_valid[..., None, None], tile, 0) for tile in tiles)
        return k, v

    def valid_queries(self, i: Index) -> jax.Array | None:
        """Which queries of tile i are not padding: bool [..., t], or None for all."""
        ids = self.semantics.query_segment_ids
        return valid_positions(
            self.queries.positions(i),
            self.semantics.query_lengths,
            None if ids is None else self.queries.read(ids, i, -1),
        )

    def logits(
        self, q: jax.Array, k: jax.Array, i: Index, j: Index
    ) -> tuple[jax.Array, jax.Array | None]:
        """The logits of query tile i and key tile j, and what the soft cap does to a gradient.

        Keys that an earlier tile has are masked; queries that an earlier tile has are not.

        Args:
            q: what read_query(i) returned.
            k: the key part of what read_key_value(j) returned.
            i: query tile.
            j: key tile.

        Returns:
            logits [..., K, G, t, s] in `sum_dtype`, -inf where a pair may not attend, and
            d logits / d (scale q . k) of the same shape, None for 1.
        """
        semantics = tile_semantics(self.semantics, self.queries, i, self.keys, j)
        key_heads = self.key.shape[-2]
        logits = semantics.scale * dot("...tkgd,...skd->...kgts", q, k)
        slope = None
        if semantics.soft_cap is not None:
            bounded = jnp.tanh(logits / semantics.soft_cap)
            logits, slope = semantics.soft_cap * bounded, 1 - bounded * bounded
        if semantics.bias is not None:
            logits = logits + split_heads(semantics.bias, -3, key_heads).astype(logits.dtype)
        allowed = may_attend(semantics, self.queries.positions(i), self.keys.positions(j))
        if allowed is not None:
            logits = jnp.where(split_heads(allowed, -3, key_heads), logits, -jnp.inf)
        owned = self.keys.owned(j)
        if owned is not None:
            logits = jnp.where(owned, logits, -jnp.inf)
        return logits, slope
