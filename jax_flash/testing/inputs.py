"""Values for a case: the same on every machine, for a seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.reference.semantics import Semantics
from jax_flash.testing.cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The operands of one call and the cotangents of its results.

    Attributes:
        query: [batch, T, N, D].
        key: [batch, S, K, D].
        value: [batch, S, K, Dv].
        semantics: what else the call asks for; scale is D ** -0.5.
        d_output: cotangent of the output, [batch, T, N, Dv], in the dtype of query.
        d_lse: cotangent of the log-sum-exp, float32 [batch, T, N].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    semantics: Semantics
    d_output: jax.Array
    d_lse: jax.Array


def make_inputs(case: Case, *, seed: int = 0, with_outliers: bool = False) -> Inputs:
    """Makes the inputs of a case.

    Args:
        case: what to make them for.
        seed: other seeds give other values.
        with_outliers: whether query, key, value and d_output are the mix by which FlashAttention-3
            (arXiv:2407.08608, section 4.3) judges accuracy: N(0, 1), and to one entry in a
            thousand N(0, 100) added (variance 100). Without, all are N(0, 1).

    Returns:
        The inputs, on the default device.
    """
    random = np.random.default_rng([seed, zlib.crc32(case.name.encode())])

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape)
        if with_outliers:
            outliers = 10 * random.standard_normal(shape)
            values = values + np.where(random.random(shape) < 0.001, outliers, 0)
        return jnp.asarray(values.astype(jnp.dtype(case.dtype)))

    rows = (case.batch, case.queries, case.heads)
    return Inputs(
        query=normal(*rows, case.head_dim),
        key=normal(case.batch, case.keys, case.key_heads, case.head_dim),
        value=normal(case.batch, case.keys, case.key_heads, case.value_dim),
        semantics=_make_semantics(case, random),
        d_output=normal(*rows, case.value_dim),
        d_lse=jnp.asarray(random.standard_normal(rows).astype(np.float32)),
    )


def _make_semantics(case: Case, random: np.random.Generator) -> Semantics:
    batch, queries, keys = case.batch, case.queries, case.keys
    given: dict[str, Any] = {}
    if "bias" in case.features:
        given["bias"] = random.standard_normal((case.heads, queries, keys)).astype(np.float32)
    if "mask" in case.features:
        given["mask"] = random.random((batch, 1, queries, keys)) < 0.7
    if "query_offset" in case.features:
        # Around the offset that aligns the last query with the last key, on both sides of it.
        given["query_offset"] = keys - queries + random.integers(-4, 5, batch)
    if "query_lengths" in case.features:
        given["query_lengths"] = _lengths(random, batch, queries)
    if "key_lengths" in case.features:
        given["key_lengths"] = _lengths(random, batch, keys)
    if "segment_ids" in case.features:
        given["query_segment_ids"] = _segment_ids(random, batch, queries)
        given["key_segment_ids"] = _segment_ids(random, batch, keys)
    if "sinks" in case.features:
        given["sinks"] = random.standard_normal(case.heads).astype(np.float32)
    arrays = {
        name: jnp.asarray(array.astype(np.int32) if array.dtype == np.int64 else array)
        for name, array in given.items()
    }
    return Semantics(
        scale=case.head_dim**-0.5,
        is_causal=case.is_causal,
        window=case.window,
        soft_cap=case.soft_cap,
        **arrays,
    )


def _lengths(random: np.random.Generator, batch: int, longest: int) -> np.ndarray:
    """Lengths of which one is the longest and, where there are two or more, one is 0."""
    lengths = random.integers(1, longest + 1, batch)
    lengths[0] = longest
    lengths[1:2] = 0
    return random.permutation(lengths)


def _segment_ids(random: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Rows of up to three segments, numbered 0, 1, 2, and then padding, numbered -1."""
    ends = np.sort(random.integers(0, length + 1, (batch, 3)), axis=1)
    segment = (np.arange(length) >= ends[:, :, None]).sum(axis=1)
    return np.where(segment == 3, -1, segment)


def poison_padding(inputs: Inputs) -> Inputs:
    """The inputs with NaN wherever the contract says that values do not matter.

    That is every padded position (past a length, or of a negative segment id) of query, key,
    value and both cotangents.
    """
    semantics = inputs.semantics

    def poison(array: jax.Array, lengths: Any, segment_ids: Any) -> jax.Array:
        poisoned = np.array(array)
        is_padding = np.zeros(array.shape[:2], bool)
        if lengths is not None:
            is_padding |= np.arange(array.shape[1]) >= np.asarray(lengths)[:, None]
        if segment_ids is not None:
            is_padding |= np.asarray(segment_ids) < 0
        poisoned[is_padding] = np.nan
        return jnp.asarray(poisoned)

    query_side = (semantics.query_lengths, semantics.query_segment_ids)
    key_side = (semantics.key_lengths, semantics.key_segment_ids)
    return replace(
        inputs,
        query=poison(inputs.query, *query_side),
        key=poison(inputs.key, *key_side),
        value=poison(inputs.value, *key_side),
        d_output=poison(inputs.d_output, *query_side),
        d_lse=poison(inputs.d_lse, *query_side),
    )
