"""The backward pass of chunked attention: FlashAttention-2 (arXiv:2307.08691), Algorithm 2.

The loops are exchanged: query tiles outside, so that both passes visit the same pairs of tiles,
and dK and dV are summed in memory in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash.reference.chunked_forward import forward_without_pairs
from jax_flash.reference.semantics import Semantics
from jax_flash.reference.tiled_call import (
    TiledCall,
    dot,
    finite_shift,
    repeat_last,
    split_heads,
    sum_dtype,
)
from jax_flash.reference.tiling import Index


class Results(NamedTuple):
    """The results of a forward pass, or their cotangents.

    Attributes:
        output: [..., T, N, Dv].
        lse: [..., T, N].
    """

    output: jax.Array
    lse: jax.Array


class Gradients(NamedTuple):
    """Cotangents of the differentiable operands, each in the shape and dtype of its operand.

    Attributes:
        query: [..., T, N, D].
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        bias: in the shape the bias was given in, summed where it was broadcast; or None.
        sinks: [N], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None


class _Rows(NamedTuple):
    """What a query tile brings to its key tiles; "rows" are [..., K, G, t].

    Attributes:
        q: [..., t, K, G, D], padding zeroed.
        d_output: [..., t, K, G, Dv], zero in rows that have no gradient.
        lse: rows, finite.
        delta: rows: what dP is reduced by.
    """

    q: jax.Array
    d_output: jax.Array
    lse: jax.Array
    delta: jax.Array


class _Sums(NamedTuple):
    """Gradients being summed, in float32 (float64 for float64 operands).

    Attributes:
        query: of one query tile, [..., K, G, t, D].
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        bias: in the aligned shape of the bias, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


@jax.jit
def chunked_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    results: Results,
    cotangents: Results,
) -> Gradients:
    """The backward pass of `chunked_attention` alone.

    Every gradient is a sum in a fixed order: of query over key tiles, of the others over query
    tiles, both ascending.

    Args:
        query: [..., T, N, D], as the forward pass got it.
        key: [..., S, K, D], likewise.
        value: [..., S, K, Dv], likewise.
        semantics: likewise.
        results: what the forward pass, of any implementation, returned.
        cotangents: of these results.

    Returns:
        The gradients.
    """
    if query.shape[-3] == 0 or key.shape[-3] == 0:
        return _backward_without_pairs(query, key, value, semantics, cotangents)
    call = TiledCall.of(query, key, value, semantics)
    dtype = sum_dtype(query)
    results, cotangents = (
        Results(split_heads(x.output, -2, key.shape[-2]), split_heads(x.lse, -1, key.shape[-2]))
        for x in (results, cotangents)
    )

    bias, sinks = call.semantics.bias, call.sinks

    def visit(i: Index, state: tuple) -> tuple:
        d_query, d_key, d_value, d_bias, d_sinks = state
        rows = _read_rows(call, i, results, cotangents)
        if sinks is not None:
            d_sinks = d_sinks + _sinks_gradient(call, i, sinks, results.lse, rows.delta)
        zeros = repeat_last(jnp.zeros_like(rows.delta), query.shape[-1])
        sums = call.keys.loop(
            lambda j, sums: _add_pair(call, i, j, rows, sums),
            _Sums(zeros, d_key, d_value, d_bias),
            call.key_tiles(i),
        )
        tile_d_query = jnp.moveaxis(semantics.scale * sums.query, -2, -4).astype(query.dtype)
        owned = call.queries.owned(i)
        if owned is not None:  # Where tiles overlap, the earlier tile has the whole sum.
            earlier = call.queries.read(d_query, i, -4)
            tile_d_query = jnp.where(owned[:, None, None, None], tile_d_query, earlier)
        d_query = call.queries.write(d_query, tile_d_query, i, -4)
        return d_query, sums.key, sums.value, sums.bias, d_sinks

    d_query, d_key, d_value, d_bias, d_sinks = call.queries.loop(
        visit,
        (
            jnp.zeros_like(call.query),
            jnp.zeros_like(key, dtype),
            jnp.zeros_like(value, dtype),
            None if bias is None else jnp.zeros_like(bias, dtype),
            None if sinks is None else jnp.zeros_like(sinks),
        ),
    )
    return Gradients(
        query=d_query.reshape(query.shape),
        key=d_key.astype(key.dtype),
        value=d_value.astype(value.dtype),
        bias=_like(d_bias, semantics.bias),
        sinks=_like(d_sinks, semantics.sinks),
    )


def _like(array: jax.Array | None, operand: jax.Array | None) -> jax.Array | None:
    if array is None or operand is None:
        return None
    return array.reshape(operand.shape).astype(operand.dtype)


def _read_rows(call: TiledCall, i: Index, results: Results, cotangents: Results) -> _Rows:
    output, d_output = (call.queries.read(x.output, i, -4) for x in (results, cotangents))
    lse, d_lse = (call.queries.read(x.lse, i, -3) for x in (results, cotangents))
    dtype = sum_dtype(call.query)
    # A row that attends to nothing is constant: its cotangents, NaN perhaps, count for nothing.
    is_live = lse != -jnp.inf
    d_output = jnp.where(is_live[..., None], d_output, 0).astype(call.query.dtype)
    delta = jnp.sum(output.astype(dtype) * d_output.astype(dtype), axis=-1)
    delta = delta - jnp.where(is_live, d_lse, 0).astype(dtype)
    return _Rows(
        q=call.read_query(i),
        d_output=d_output,
        lse=jnp.moveaxis(finite_shift(lse), -3, -1),
        delta=jnp.moveaxis(delta, -3, -1),
    )


def _sinks_gradient(
    call: TiledCall, i: Index, sinks: jax.Array, lse: jax.Array, delta: jax.Array
) -> jax.Array:
    """What query tile i adds to the gradient of the sinks, in their shape [..., K, G, 1]."""
    lse = jnp.moveaxis(call.queries.read(lse, i, -3), -3, -1)
    counts = lse != -jnp.inf
    owned = call.queries.owned(i)
    if owned is not None:
        counts = counts & owned
    weights = jnp.exp(sinks - finite_shift(lse))
    terms = jnp.where(counts, -weights * delta, 0)
    return jnp.sum(terms, axis=(*range(terms.ndim - sinks.ndim), -1))[..., None]


def _add_pair(call: TiledCall, i: Index, j: Index, rows: _Rows, sums: _Sums) -> _Sums:
    """Adds what query tile i and key tile j contribute."""
    k, v = call.read_key_value(j)
    logits, slope = call.logits(rows.q, k, i, j)
    weights = jnp.exp(logits - rows.lse[..., None])
    owned = call.queries.owned(i)
    if owned is not None:
        weights = jnp.where(owned[:, None], weights, 0)
    d_weights = dot("...tkgv,...skv->...kgts", rows.d_output, v)
    d_logits = weights * (d_weights - rows.delta[..., None])
    d_bias = sums.bias
    if d_bias is not None:
        d_bias = _add_to_bias(call, i, j, d_logits, d_bias)
    if slope is not None:
        d_logits = d_logits * slope
    d_logits = d_logits.astype(k.dtype)
    # Scaled here, not at the end: jaxlib 0.10.2 miscompiles sum(c * x) + sum(c * y) on CPUs, which
    # is what two calls that share keys over a mapped axis would end in.
    d_key = call.semantics.scale * dot("...kgts,...tkgd->...skd", d_logits, rows.q)
    d_value = dot("...kgts,...tkgv->...skv", weights.astype(v.dtype), rows.d_output)
    return _Sums(
        query=sums.query + dot("...kgts,...skd->...kgtd", d_logits, k),
        key=call.keys.write(sums.key, call.keys.read(sums.key, j, -3) + d_key, j, -3),
        value=call.keys.write(sums.value, call.keys.read(sums.value, j, -3) + d_value, j, -3),
        bias=d_bias,
    )


def _add_to_bias(
    call: TiledCall, i: Index, j: Index, d_logits: jax.Array, d_bias: jax.Array
) -> jax.Array:
    by_rows = call.queries.read(d_bias, i, -2)
    tile = call.keys.read(by_rows, j, -1)
    heads = d_logits.shape[-4] * d_logits.shape[-3]
    d_logits = d_logits.reshape(*d_logits.shape[:-4], heads, *d_logits.shape[-2:])
    broadcast = [axis for axis, size in enumerate(tile.shape) if size == 1]
    tile = tile + jnp.sum(d_logits, axis=broadcast, keepdims=True)
    by_rows = call.keys.write(by_rows, tile, j, -1)
    return call.queries.write(d_bias, by_rows, i, -2)


def _backward_without_pairs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    cotangents: Results,
) -> Gradients:
    """The backward pass for T = 0 or S = 0: only sinks can have a gradient."""
    floats = {
        name: getattr(semantics, name)
        for name in ("bias", "sinks")
        if getattr(semantics, name) is not None
    }
    _, pull_back = jax.vjp(
        lambda q, k, v, floats: forward_without_pairs(q, k, v, replace(semantics, **floats)),
        query,
        key,
        value,
        floats,
    )
    d_query, d_key, d_value, d_floats = pull_back(tuple(cotangents))
    return Gradients(d_query, d_key, d_value, d_floats.get("bias"), d_floats.get("sinks"))
