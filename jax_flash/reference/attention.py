"""The oracle: attention in a few lines, quadratic in memory, differentiable by plain autodiff.

Everything else is compared with this, so it is written to be read, and in float64 (under
`jax.enable_x64`) it is as exact as is useful. For the formula see `semantics`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_flash.reference.semantics import (
    Semantics,
    align_leading_dimensions,
    check_operands,
    may_attend,
    valid_positions,
)


def attention_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    *,
    precision_dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Attention computed as its definition reads, with every intermediate in `precision_dtype`.

    A query that may attend to nothing gets output 0 and log-sum-exp -inf (with a sink: the sink).
    A padded query gets output 0 and log-sum-exp -inf, even with a sink. Padded positions of query,
    key and value, and of the cotangents, may hold NaN or Inf; their gradients are 0.

    Args:
        query: [..., T, N, D], any floating dtype.
        key: [..., S, K, D], N a multiple of K; query head n reads key head n // (N // K).
        value: [..., S, K, Dv].
        semantics: what else the call asks for.
        precision_dtype: dtype of the computation and of the results: float32, or float64 when
            64-bit types are enabled.

    Returns:
        output [..., T, N, Dv] and natural log-sum-exp [..., T, N], both in `precision_dtype`.

    Raises:
        ValueError: if `precision_dtype` is float64 and 64-bit types are not enabled.
        TypeError, ValueError: see `check_operands`.
    """
    if jnp.dtype(precision_dtype) == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "precision_dtype is float64, but 64-bit types are disabled, so it would be float32. "
            "Call this inside `with jax.enable_x64(True):`."
        )
    check_operands(query, key, value, semantics)
    semantics = align_leading_dimensions(semantics, query.ndim - 3)
    query_positions = jnp.arange(query.shape[-3], dtype=jnp.int32)
    key_positions = jnp.arange(key.shape[-3], dtype=jnp.int32)
    query_is_valid = valid_positions(
        query_positions, semantics.query_lengths, semantics.query_segment_ids
    )
    key_is_valid = valid_positions(key_positions, semantics.key_lengths, semantics.key_segment_ids)
    group = query.shape[-2] // key.shape[-2]

    # A masked pair has weight 0, but 0 * NaN is NaN: padding is erased, not only masked.
    q = _zero_where_padded(query.astype(precision_dtype), query_is_valid)
    k = _zero_where_padded(key.astype(precision_dtype), key_is_valid)
    v = _zero_where_padded(value.astype(precision_dtype), key_is_valid)
    k, v = jnp.repeat(k, group, axis=-2), jnp.repeat(v, group, axis=-2)

    logits = semantics.scale * jnp.einsum(
        "...tnd,...snd->...nts", q, k, precision=jax.lax.Precision.HIGHEST
    )
    if semantics.soft_cap is not None:
        logits = semantics.soft_cap * jnp.tanh(logits / semantics.soft_cap)
    if semantics.bias is not None:
        logits = logits + semantics.bias.astype(precision_dtype)
    allowed = may_attend(semantics, query_positions, key_positions)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)

    # Any number may be subtracted; for a row without logits it must not be -inf (-inf + inf).
    shift = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = None
    if semantics.sinks is not None:
        sinks = semantics.sinks.astype(precision_dtype)[..., None, None]
        shift = jnp.maximum(shift, sinks)
    shift = jax.lax.stop_gradient(jnp.where(shift == -jnp.inf, 0, shift))
    weights = jnp.exp(logits - shift)
    denominator = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        denominator = denominator + jnp.exp(sinks - shift)
    is_empty = denominator == 0
    denominator = jnp.where(is_empty, 1, denominator)  # Keeps 1 / 0 and log 0 out of gradients.

    output = jnp.einsum(
        "...nts,...snd->...tnd",
        weights / denominator,
        v,
        precision=jax.lax.Precision.HIGHEST,
    )
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(denominator) + shift)
    lse = jnp.swapaxes(lse[..., 0], -1, -2)
    if query_is_valid is not None:
        output = jnp.where(query_is_valid[..., None, None], output, 0)
        lse = jnp.where(query_is_valid[..., None], lse, -jnp.inf)
    return output, lse


def _zero_where_padded(array: jax.Array, is_valid: jax.Array | None) -> jax.Array:
    """Zeros array [..., positions, heads, dim] where is_valid [..., positions] is False."""
    return array if is_valid is None else jnp.where(is_valid[..., None, None], array, 0)
