"""The forward pass of chunked attention: FlashAttention-2 (arXiv:2307.08691), Algorithm 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.semantics import Semantics
from jax_flash.reference.tiled_call import TiledCall, dot, finite_shift, repeat_last, sum_dtype
from jax_flash.reference.tiling import Index


@jax.jit
def chunked_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> tuple[jax.Array, jax.Array]:
    """The forward pass of `chunked_attention` alone: its arguments, unchecked, and its results."""
    if query.shape[-3] == 0 or key.shape[-3] == 0:
        return forward_without_pairs(query, key, value, semantics)
    call = TiledCall.of(query, key, value, semantics)

    def visit(i: Index, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output, lse = results
        tile_output, tile_lse = _attend(call, i)
        return (
            call.queries.write(output, tile_output, i, -4),
            call.queries.write(lse, tile_lse, i, -3),
        )

    rows = jnp.zeros_like(call.query[..., 0])
    output, lse = call.queries.loop(
        visit, (repeat_last(rows, value.shape[-1]), rows.astype(sum_dtype(query)))
    )
    return output.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])


def forward_without_pairs(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> tuple[jax.Array, jax.Array]:
    """The forward pass for T = 0 or S = 0, where quadratic memory is none."""
    output, lse = attention_reference(
        query, key, value, semantics, precision_dtype=sum_dtype(query)
    )
    return output.astype(query.dtype), lse


def _attend(call: TiledCall, i: Index) -> tuple[jax.Array, jax.Array]:
    """Output [..., t, K, G, Dv] and log-sum-exp [..., t, K, G] of query tile i."""
    q = call.read_query(i)
    rows = jnp.moveaxis(jnp.zeros_like(q[..., 0], sum_dtype(q)), -3, -1)

    def visit(j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        maximum, denominator, weighted = state
        k, v = call.read_key_value(j)
        logits, _ = call.logits(q, k, i, j)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        shift = finite_shift(new_maximum)
        weights = jnp.exp(logits - shift[..., None])
        rescale = jnp.exp(maximum - shift)
        product = dot("...kgts,...skv->...kgtv", weights.astype(v.dtype), v)
        return (
            new_maximum,
            rescale * denominator + jnp.sum(weights, axis=-1),
            rescale[..., None] * weighted + product,
        )

    # Made from q, the initial values have the sharding and the varying axes of the results.
    maximum, denominator, weighted = call.keys.loop(
        visit,
        (jnp.full_like(rows, -jnp.inf), rows, repeat_last(rows, call.value.shape[-1])),
        call.key_tiles(i),
    )
    shift = finite_shift(maximum)
    if call.sinks is not None:
        shift = finite_shift(jnp.maximum(maximum, call.sinks))
        rescale = jnp.exp(maximum - shift)
        denominator = rescale * denominator + jnp.exp(call.sinks - shift)
        weighted = rescale[..., None] * weighted
    is_empty = denominator == 0
    denominator = jnp.where(is_empty, 1, denominator)
    output = jnp.moveaxis(weighted / denominator[..., None], -2, -4)
    # Where XLA for CPUs (jax 0.12) merges the sum into the logarithm, bits depend on the program.
    logarithm = jax.lax.optimization_barrier(jnp.log(denominator))
    lse = jnp.moveaxis(jnp.where(is_empty, -jnp.inf, shift + logarithm), -1, -3)
    is_valid = call.valid_queries(i)
    if is_valid is not None:
        output = jnp.where(is_valid[..., None, None, None], output, 0)
        lse = jnp.where(is_valid[..., None, None], lse, -jnp.inf)
    return output.astype(q.dtype), lse
