"""Devices exchange the sequence for heads: each attends to whole sequences with some of the heads.

    [T / n, N, D] -- all-to-all --> [T, N / n, D] -- attention -- all-to-all --> [T / n, N, Dv]

This is DeepSpeed-Ulysses (arXiv:2309.14509). A head is computed by one device just as on a single
device, so results have the same bits, and with at least one key head a device the gradients have,
too. With fewer key heads than devices each device gets the one that its queries need.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_flash.context_parallel.local_calls import Keys, Operands, Options, Queries, make_call
from jax_flash.context_parallel.order import Layout
from jax_flash.ops.attention import attend
from jax_flash.ops.dispatch import choose
from jax_flash.reference.chunked_backward import Results


def attend_all_to_all(options: Options, operands: Operands) -> Results:
    """Returns the results of this device's queries."""
    _check_heads(options, operands)
    queries = options.layout(operands.query.shape[-3])
    keys = options.layout(operands.key.shape[-3])
    key_heads = operands.key.shape[-2]
    key, value = operands.key, operands.value
    if key_heads < options.shards:
        copies = options.shards // key_heads
        key, value = _with_copies(copies, key), _with_copies(copies, value)
    output, lse = attend_to_heads(
        options,
        operands,
        Queries(
            _to_heads(options, queries, operands.query),
            0,
            operands.query_lengths,
            _gather_ids(options, queries, operands.query_segment_ids),
        ),
        Keys(
            _to_heads(options, keys, key),
            _to_heads(options, keys, value),
            0,
            operands.key_lengths,
            _gather_ids(options, keys, operands.key_segment_ids),
        ),
    )
    lse = _to_sequence(options, queries, lse[..., None])[..., 0]
    return Results(_to_sequence(options, queries, output), lse)


def attend_to_heads(options: Options, operands: Operands, queries: Queries, keys: Keys) -> Results:
    """Attention of this device's heads, over whole sequences."""
    sinks = operands.sinks
    if sinks is not None:
        heads = queries.query.shape[-2]
        first = jax.lax.axis_index(options.axis_name) * heads
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first, heads)
    call = make_call(options, operands, queries, keys, sinks=sinks)
    return attend(call, choose(call))


def _check_heads(options: Options, operands: Operands) -> None:
    heads, key_heads, shards = operands.query.shape[-2], operands.key.shape[-2], options.shards
    given = f"mode is 'all_to_all' over axis {options.axis_name!r} of size {shards}"
    other = "Use mode='ring' or 'all_gather', which leave heads alone, or a smaller axis."
    if heads % shards:
        raise ValueError(
            f"{given}, and query has N={heads} heads on a device; each device takes a share of the "
            f"heads, so N must be a multiple of {shards}. {other}"
        )
    if key_heads % shards and shards % key_heads:
        raise ValueError(
            f"{given}, and key has K={key_heads} heads on a device; K must be a multiple of "
            f"{shards}, or a divisor of it (then devices share heads). {other} Or repeat the key "
            "and value heads."
        )


def _to_heads(options: Options, layout: Layout, array: jax.Array) -> jax.Array:
    """[..., local length, heads, dim] to [..., whole length in natural order, heads / n, dim]."""
    heads, sequence = array.ndim - 2, array.ndim - 3
    stored = jax.lax.all_to_all(array, options.axis_name, heads, sequence, tiled=True)
    return layout.to_natural(stored, sequence)


def _to_sequence(options: Options, layout: Layout, array: jax.Array) -> jax.Array:
    """The inverse of `_to_heads`."""
    heads, sequence = array.ndim - 2, array.ndim - 3
    stored = layout.to_stored(array, sequence)
    return jax.lax.all_to_all(stored, options.axis_name, sequence, heads, tiled=True)


def _gather_ids(options: Options, layout: Layout, ids: jax.Array | None) -> jax.Array | None:
    if ids is None:
        return None
    stored = jax.lax.all_gather(ids, options.axis_name, axis=ids.ndim - 1, tiled=True)
    return layout.to_natural(stored, -1)


def _with_copies(copies: int, array: jax.Array) -> jax.Array:
    """Repeats each head of [..., heads, dim]; the gradient adds the copies in order in float32."""
    return jnp.asarray(_repeat_heads(copies, array))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat_heads(copies: int, array: jax.Array) -> jax.Array:
    return jnp.repeat(array, copies, axis=-2)


def _repeat_heads_forward(copies: int, array: jax.Array) -> tuple[jax.Array, None]:
    return jnp.repeat(array, copies, axis=-2), None


def _repeat_heads_backward(copies: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    *leading, heads, dim = cotangent.shape
    grouped = cotangent.reshape(*leading, heads // copies, copies, dim)
    terms = [grouped[..., copy, :] for copy in range(copies)]
    total = terms[0].astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    for term in terms[1:]:
        total = total + term
    return (total.astype(cotangent.dtype),)


_repeat_heads.defvjp(_repeat_heads_forward, _repeat_heads_backward)
