"""Steps of the ring under a causal mask in zigzag order: one call of attention each.

Of n devices, device r holds the chunks r and 2n - 1 - r. Whoever's keys it holds, its own queries
attend to them in a shape that needs no positions:

    holder r'      chunks of queries   chunks of keys     mask
    r' = r         both                both               causal: one chunk follows the other
    r' < r         both                r'                 none: all of them come earlier
    r' > r         2n - 1 - r          both               none, likewise

So every step but the first has the same work on every device, in one of two shapes, and calls are
few and large. A chunk of queries that has no part in a step has empty rows.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_flash.context_parallel.local_calls import (
    Held,
    Keys,
    Operands,
    Options,
    Pair,
    Queries,
    make_call,
)
from jax_flash.context_parallel.local_calls import backward as backward_of
from jax_flash.context_parallel.local_calls import forward as forward_of
from jax_flash.context_parallel.order import Index, Layout
from jax_flash.reference.chunked_backward import Gradients, Results


def applies(options: Options, operands: Operands) -> bool:
    """Whether the steps of a call have these shapes."""
    return (
        options.order == "zigzag"
        and options.is_causal
        and options.window == (None, None)
        and options.query_offset == 0
        and operands.query_offset is None
        and operands.query.shape[-3] == operands.key.shape[-3]
    )


def parts(options: Options, length: int) -> int:
    """Queries and keys stay whole."""
    del options, length
    return 1


def queries(options: Options, operands: Operands) -> list[Queries]:
    """All queries of this device, as one stretch that starts at 0."""
    layout = options.layout(operands.query.shape[-3])
    lengths = _local_lengths(layout, jax.lax.axis_index(options.axis_name), operands.query_lengths)
    return [Queries(operands.query, 0, lengths, operands.query_segment_ids)]


def keys(options: Options, operands: Operands, held: Held, step: Index) -> list[Keys]:
    """All keys that this device holds in a step, as one stretch that starts at 0."""
    holder = (jax.lax.axis_index(options.axis_name) - step) % options.shards
    lengths = _local_lengths(options.layout(held.key.shape[-3]), holder, operands.key_lengths)
    return [Keys(held.key, held.value, 0, lengths, held.segment_ids)]


def pairs(options: Options, operands: Operands) -> list[list[Pair]]:
    """One pair a step: all queries with all keys."""
    del operands
    return [[(0, 0)]] * options.shards


def forward(
    options: Options, operands: Operands, queries: Queries, keys: Keys, step: Index
) -> Results:
    """Results of this device's queries over the keys that it holds in a step."""
    if _is_first(step):
        return forward_of(make_call(options, operands, queries, keys))
    unmasked = replace(options, is_causal=False)

    def earlier_keys() -> Results:
        return forward_of(make_call(unmasked, operands, queries, _first_chunk(keys)))

    def later_keys() -> Results:
        output, lse = forward_of(make_call(unmasked, operands, _last_chunk(queries), keys))
        return Results(
            _behind_zeros(output), jnp.concatenate([jnp.full_like(lse, -jnp.inf), lse], -2)
        )

    return jax.lax.cond(_holds_earlier_keys(options, step), earlier_keys, later_keys)


def backward(
    options: Options,
    operands: Operands,
    queries: Queries,
    keys: Keys,
    step: Index,
    rows: tuple[Results, Results],
) -> Gradients:
    """What these keys add to the gradients; `rows` are the queries' results and cotangents."""
    if _is_first(step):
        return backward_of(make_call(options, operands, queries, keys), *rows)
    unmasked = replace(options, is_causal=False)

    def earlier_keys() -> Gradients:
        call = make_call(unmasked, operands, queries, _first_chunk(keys))
        gradients = backward_of(call, *rows)
        key, value = (_before_zeros(x) for x in (gradients.key, gradients.value))
        return gradients._replace(key=key, value=value)

    def later_keys() -> Gradients:
        call = make_call(unmasked, operands, _last_chunk(queries), keys)
        gradients = backward_of(call, *(_last_rows(x) for x in rows))
        return gradients._replace(query=_behind_zeros(gradients.query))

    return jax.lax.cond(_holds_earlier_keys(options, step), earlier_keys, later_keys)


def _is_first(step: Index) -> bool:
    # Of the steps in a loop, whose number is traced, none is the first.
    return isinstance(step, int) and step == 0


def _holds_earlier_keys(options: Options, step: Index) -> jax.Array:
    return jax.lax.axis_index(options.axis_name) >= step  # else the rank wrapped around


def _local_lengths(layout: Layout, rank: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
    """How many positions of a device are not padding, of `lengths` of whole sequences.

    They are the first ones: its first chunk is full before its last one begins.
    """
    if lengths is None:
        return None
    first, last = (
        jnp.clip(lengths - start, 0, layout.chunk_length) for start in layout.starts(rank)
    )
    return first + last


def _first_chunk(keys: Keys) -> Keys:
    key, value = (_halves(x, -3)[0] for x in (keys.key, keys.value))
    ids = None if keys.segment_ids is None else _halves(keys.segment_ids, -1)[0]
    return Keys(key, value, 0, keys.lengths, ids)


def _last_chunk(queries: Queries) -> Queries:
    query = _halves(queries.query, -3)[1]
    ids = None if queries.segment_ids is None else _halves(queries.segment_ids, -1)[1]
    return Queries(query, query.shape[-3], queries.lengths, ids)


def _last_rows(results: Results) -> Results:
    return Results(_halves(results.output, -3)[1], _halves(results.lse, -2)[1])


def _halves(array: jax.Array, axis: int) -> list[jax.Array]:
    return jnp.split(array, 2, axis)


def _behind_zeros(last: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(last), last], -3)


def _before_zeros(first: jax.Array) -> jax.Array:
    return jnp.concatenate([first, jnp.zeros_like(first)], -3)
