"""What one attention call means: the record that every pure-JAX implementation takes.

For query head n, query t and key s, with positions counted from 0 inside each sequence:

    logits = scale * (q_t . k_s)
    logits = soft_cap * tanh(logits / soft_cap)          if soft_cap is given
    logits = logits + bias                               if bias is given
    logits = -inf                                        where the pair may not attend
    P      = softmax over s, with exp(sink_n) added to the denominator if sinks are given

A pair may attend when all of these hold:

    key position <= query position + query_offset                              (is_causal)
    -left <= key position - (query position + query_offset) <= right           (window)
    query position < query length and key position < key length                (lengths)
    query segment id == key segment id, and both are >= 0                      (segment ids)
    mask is True                                                               (mask)

The soft cap comes before the bias, as in Gemma 2 and FlashAttention's ALiBi, so that a bias of
-inf or of a large negative number still masks a pair. (tokamax, the other JAX library that has
both, caps the sum of logits and bias, and there such a bias becomes a finite -soft_cap.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

_INT32_MAX = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_offset",
        "query_lengths",
        "key_lengths",
        "query_segment_ids",
        "key_segment_ids",
        "bias",
        "mask",
        "sinks",
    ],
    meta_fields=["scale", "is_causal", "window", "soft_cap"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The meaning of one attention call; a pytree whose leaves are the array fields.

    The static fields are part of every jit key. "..." stands for the leading dimensions of query,
    key and value; arrays may have 1 there, or lack them, where they do not vary.

    Attributes:
        scale: factor on q . k, usually D ** -0.5.
        is_causal: whether a query sees only keys up to its own position (plus query_offset).
        window: (left, right): how many keys before and after its own position (plus query_offset)
            a query may see, not counting the key at that position. None is unbounded.
        soft_cap: bound of the logits before the bias, > 0, or None.
        query_offset: int32 [...]: position of query 0 on the key axis. None is 0.
        query_lengths: int32 [...]: number of valid queries; the rest is padding.
        key_lengths: int32 [...]: number of valid keys; the rest is padding.
        query_segment_ids: int32 [..., T]; negative is padding. Given with key_segment_ids.
        key_segment_ids: int32 [..., S]; negative is padding. Given with query_segment_ids.
        bias: float, broadcastable to [..., N, T, S].
        mask: bool, broadcastable to [..., N, T, S]; True may attend.
        sinks: float [N] or [..., N]: one more logit of each query head, in the denominator only.

    Raises:
        ValueError: if scale is not finite, a window side is negative, or soft_cap is not > 0.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    query_offset: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_segment_ids: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    sinks: jax.Array | None = None

    def __post_init__(self) -> None:
        # Only static fields: JAX rebuilds the record with placeholders in place of its arrays.
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; it must be finite. Pass D ** -0.5.")
        if len(self.window) != 2 or any(side is not None and side < 0 for side in self.window):
            raise ValueError(
                f"window is {self.window}; it must be (left, right) with each side >= 0 or None. "
                "Use None for an unbounded side."
            )
        if self.soft_cap is not None and not (self.soft_cap > 0 and math.isfinite(self.soft_cap)):
            raise ValueError(
                f"soft_cap is {self.soft_cap}; it must be > 0 and finite. Use None for no cap."
            )

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Bounds of key position - (query position + query_offset): the window, made causal."""
        left, right = (None if side is None else min(side, _INT32_MAX) for side in self.window)
        if self.is_causal:
            right = 0  # No right side of a window, being >= 0, is tighter.
        return left, right


def align_leading_dimensions(semantics: Semantics, leading: int) -> Semantics:
    """Prepends dimensions of size 1 until every array field has its full rank.

    Args:
        semantics: the record, as its user gave it.
        leading: how many leading dimensions query has (the "..." of the field shapes).

    Returns:
        The record with query_offset and lengths of rank `leading`, segment ids of rank
        `leading + 1`, bias and mask of rank `leading + 3`. Integers are int32, sizes unchanged.
    """

    def align(array, trailing: int):
        if array is None:
            return None
        array = jnp.asarray(array)
        missing = leading + trailing - array.ndim
        return array.reshape((1,) * missing + array.shape)

    def align_integers(array, trailing: int):
        array = align(array, trailing)
        return None if array is None else array.astype(jnp.int32)

    return replace(
        semantics,
        query_offset=align_integers(semantics.query_offset, 0),
        query_lengths=align_integers(semantics.query_lengths, 0),
        key_lengths=align_integers(semantics.key_lengths, 0),
        query_segment_ids=align_integers(semantics.query_segment_ids, 1),
        key_segment_ids=align_integers(semantics.key_segment_ids, 1),
        bias=align(semantics.bias, 3),
        mask=align(semantics.mask, 3),
        sinks=None if semantics.sinks is None else jnp.asarray(semantics.sinks),
    )


def _conjunction(conditions: list[jax.Array]) -> jax.Array | None:
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def valid_positions(
    positions: jax.Array, lengths: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """Which queries, or which keys, are not padding.

    Args:
        positions: int32 [p].
        lengths: aligned query or key lengths, int32 [...], or None.
        segment_ids: aligned segment ids at these positions, int32 [..., p], or None.

    Returns:
        bool, broadcastable to [..., p], or None if all are valid.
    """
    conditions = []
    if lengths is not None:
        conditions.append(positions < lengths[..., None])
    if segment_ids is not None:
        conditions.append(segment_ids >= 0)
    return _conjunction(conditions)


def may_attend(
    semantics: Semantics, query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array | None:
    """Which pairs may attend: bool, broadcastable to [..., N, t, s], or None for all of them.

    Args:
        semantics: aligned; its segment ids and mask are those of these queries and keys.
        query_positions: int32 [t].
        key_positions: int32 [s].
    """
    conditions = []
    left, right = semantics.band
    if left is not None or right is not None:
        on_key_axis = query_positions
        if semantics.query_offset is not None:
            on_key_axis = on_key_axis + semantics.query_offset[..., None]
        distance = (key_positions - on_key_axis[..., None])[..., None, :, :]
        if left is not None:
            conditions.append(distance >= -left)
        if right is not None:
            conditions.append(distance <= right)
    query_ids, key_ids = semantics.query_segment_ids, semantics.key_segment_ids
    queries = valid_positions(query_positions, semantics.query_lengths, query_ids)
    if queries is not None:
        conditions.append(queries[..., None, :, None])
    keys = valid_positions(key_positions, semantics.key_lengths, key_ids)
    if keys is not None:
        conditions.append(keys[..., None, None, :])
    if query_ids is not None and key_ids is not None:
        conditions.append((query_ids[..., :, None] == key_ids[..., None, :])[..., None, :, :])
    if semantics.mask is not None:
        conditions.append(semantics.mask)
    return _conjunction(conditions)


def check_operands(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> None:
    """Checks that shapes and dtypes fit together.

    Args:
        query: [..., T, N, D].
        key: [..., S, K, D], N a multiple of K.
        value: [..., S, K, Dv].
        semantics: the record as its user gave it, not aligned.

    Raises:
        TypeError: if query, key and value are not of one floating dtype, bias or sinks are not
            floating, or mask is not bool.
        ValueError: if a shape does not fit.
    """
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) != 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(
            f"dtypes are query {query.dtype}, key {key.dtype}, value {value.dtype}; they must be "
            "one floating dtype. Convert them first."
        )
    if min(query.ndim, key.ndim, value.ndim) < 3 or not (
        query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-3:-1] == value.shape[-3:-1]
    ):
        raise ValueError(
            f"shapes are {shapes}; they must be [..., T, N, D], [..., S, K, D] and [..., S, K, Dv] "
            "with the same leading dimensions. Transpose or broadcast them first."
        )
    leading, (queries, heads), (keys, key_heads) = (
        query.shape[:-3],
        query.shape[-3:-1],
        key.shape[-3:-1],
    )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"shapes are {shapes}: {heads} query heads and {key_heads} key heads; the first must "
            "be a multiple of the second. Repeat the key heads until they divide the query heads."
        )
    if (semantics.query_segment_ids is None) != (semantics.key_segment_ids is None):
        raise ValueError("only one of query and key segment ids is given; pass both or neither.")
    if semantics.mask is not None and semantics.mask.dtype != jnp.bool_:
        raise TypeError(f"mask is {semantics.mask.dtype}; it must be bool. Pass mask != 0.")
    for name in ("bias", "sinks"):
        array = getattr(semantics, name)
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} is {array.dtype}; it must be floating. Convert it first.")
    for name, target in {
        "query_offset": leading,
        "query_lengths": leading,
        "key_lengths": leading,
        "query_segment_ids": (*leading, queries),
        "key_segment_ids": (*leading, keys),
        "bias": (*leading, heads, queries, keys),
        "mask": (*leading, heads, queries, keys),
        "sinks": (*leading, heads),
    }.items():
        array = getattr(semantics, name)
        if array is not None:
            _check_shape(name, jnp.shape(array), target)


def _check_shape(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    # Segment ids and sinks must have their last axis in full: a 1 there is more likely a mistake.
    exact = {"query_segment_ids": 1, "key_segment_ids": 1, "sinks": 1}.get(name, 0)
    aligned = (1,) * (len(target) - len(shape)) + tuple(shape)
    fits = len(aligned) == len(target) and all(
        size == full or (size == 1 and axis < len(target) - exact)
        for axis, (size, full) in enumerate(zip(aligned, target, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be broadcastable to {target}. "
            "Reshape it, with 1 where it does not vary."
        )
