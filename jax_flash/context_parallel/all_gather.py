"""Every device gathers all keys and values, and attends with its own queries.

    forward     device r: O_r, LSE_r = attention(Q_r, all K, all V)
    backward    device r: dQ_r, and its part of dK, dV for all keys; the parts go to the devices
                that hold the keys (all-to-all), which sum them in the order of the queries

Keys are put in natural order, so a row meets the same keys in the same tiles as on a single device:
the forward pass gives the same bits. Gathered keys are not kept for the backward pass but gathered
again, so memory kept by a layer is linear in the local length; while it runs, a layer takes memory
linear in the whole length for K, V, dK and dV.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.context_parallel.local_calls import (
    Keys,
    Operands,
    Options,
    backward,
    cotangent_of,
    forward,
    join,
    join_results,
    make_call,
    ordered_sum,
    query_chunks,
    split_results,
    sum_over_devices,
)
from jax_flash.context_parallel.two_passes import join_passes
from jax_flash.reference.chunked_backward import Results


def _forward(options: Options, operands: Operands) -> Results:
    keys = _gather_keys(options, operands)
    return join_results(
        [
            forward(make_call(options, operands, queries, keys, sinks=operands.sinks))
            for queries in query_chunks(options, operands)
        ]
    )


def _backward(
    options: Options, operands: Operands, results: Results, cotangents: Results
) -> Operands:
    keys = _gather_keys(options, operands)
    layout = options.layout(operands.query.shape[-3])
    gradients = [
        backward(make_call(options, operands, queries, keys, sinks=operands.sinks), *chunks)
        for queries, *chunks in zip(
            query_chunks(options, operands),
            split_results(results, layout.chunks),
            split_results(cotangents, layout.chunks),
            strict=True,
        )
    ]
    d_sinks = None
    if operands.sinks is not None:
        terms = [x.sinks for x in gradients if x.sinks is not None]
        d_sinks = sum_over_devices(options, terms)
    return cotangent_of(
        operands,
        query=join([x.query for x in gradients], -3),
        key=_send_to_holders(options, [x.key for x in gradients]),
        value=_send_to_holders(options, [x.value for x in gradients]),
        sinks=d_sinks,
    )


attend_all_gather = join_passes(_forward, _backward)
"""Returns the results of this device's queries."""


def _gather_keys(options: Options, operands: Operands) -> Keys:
    """All keys and values, in natural order."""
    layout = options.layout(operands.key.shape[-3])

    def gather(array: jax.Array, axis: int) -> jax.Array:
        axis %= array.ndim
        stored = jax.lax.all_gather(array, options.axis_name, axis=axis, tiled=True)
        return layout.to_natural(stored, axis)

    ids = operands.key_segment_ids
    return Keys(
        key=gather(operands.key, -3),
        value=gather(operands.value, -3),
        start=0,
        lengths=operands.key_lengths,
        segment_ids=None if ids is None else gather(ids, -1),
    )


def _send_to_holders(options: Options, terms: list[jax.Array]) -> jax.Array:
    """Sums what the chunks of queries give as gradients of all keys, [..., S, heads, dim].

    Terms travel in the dtype of the operands, in which kernels return them, and are added in
    float32, in the order of the chunks' positions.
    """
    axis = terms[0].ndim - 3
    layout = options.layout(terms[0].shape[axis] // options.shards)
    received = []
    for term in terms:
        stored = layout.to_stored(term, axis)
        by_holder = stored.reshape(
            *stored.shape[:axis], options.shards, layout.local_length, *stored.shape[axis + 1 :]
        )
        by_sender = jax.lax.all_to_all(by_holder, options.axis_name, axis, axis, tiled=True)
        received.append(jnp.moveaxis(by_sender, axis, 0))
    first, *second = (list(by_sender) for by_sender in received)
    # In zigzag order the second chunks come after all the first ones, those of the last device
    # before those of the first.
    return ordered_sum(first + [term for terms in second for term in reversed(terms)])
