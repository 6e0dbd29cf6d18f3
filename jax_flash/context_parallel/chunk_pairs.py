"""Steps of the ring under any mask: every chunk of queries with every chunk of keys in reach."""

from __future__ import annotations

import jax

from jax_flash.context_parallel.local_calls import (
    Held,
    Keys,
    Operands,
    Options,
    Pair,
    Queries,
    make_call,
    query_chunks,
)
from jax_flash.context_parallel.local_calls import backward as backward_of
from jax_flash.context_parallel.local_calls import forward as forward_of
from jax_flash.context_parallel.order import Index
from jax_flash.reference.chunked_backward import Gradients, Results


def parts(options: Options, length: int) -> int:
    """How many chunks `length` queries or keys of a device are cut into."""
    return options.layout(length).chunks


def queries(options: Options, operands: Operands) -> list[Queries]:
    """The chunks of queries of this device."""
    return query_chunks(options, operands)


def keys(options: Options, operands: Operands, held: Held, step: Index) -> list[Keys]:
    """The chunks of keys that this device holds in a step."""
    layout = options.layout(held.key.shape[-3])
    holder = (jax.lax.axis_index(options.axis_name) - step) % options.shards
    ids = held.segment_ids
    return [
        Keys(key, value, start, operands.key_lengths, chunk_ids)
        for key, value, start, chunk_ids in zip(
            layout.split(held.key, -3),
            layout.split(held.value, -3),
            layout.starts(holder),
            [None] * layout.chunks if ids is None else layout.split(ids, -1),
            strict=True,
        )
    ]


def pairs(options: Options, operands: Operands) -> list[list[Pair]]:
    """The pairs of chunks to visit in each step: those in which some device has work."""
    query_layout = options.layout(operands.query.shape[-3])
    key_layout = options.layout(operands.key.shape[-3])
    left, right = options.window
    if options.is_causal:
        right = 0

    def in_reach(first_query: int, first_key: int) -> bool:
        if operands.query_offset is not None:
            return True
        # Distances from a query's own position on the key axis to a key.
        nearest = first_key - (first_query + options.query_offset)
        lowest, highest = (
            nearest - query_layout.chunk_length + 1,
            nearest + key_layout.chunk_length - 1,
        )
        return (left is None or highest >= -left) and (right is None or lowest <= right)

    def some_device_needs(step: int, pair: Pair) -> bool:
        return any(
            in_reach(
                query_layout.starts(rank)[pair[0]],
                key_layout.starts((rank - step) % options.shards)[pair[1]],
            )
            for rank in range(options.shards)
        )

    all_pairs = [(i, j) for i in range(query_layout.chunks) for j in range(key_layout.chunks)]
    steps = [
        [pair for pair in all_pairs if some_device_needs(step, pair)]
        for step in range(options.shards)
    ]
    while len(steps) > 1 and not steps[-1]:
        steps.pop()
    return steps


def forward(
    options: Options, operands: Operands, queries: Queries, keys: Keys, step: Index
) -> Results:
    """Results of a chunk of queries over a chunk of keys, the same in whatever step."""
    del step
    return forward_of(make_call(options, operands, queries, keys))


def backward(
    options: Options,
    operands: Operands,
    queries: Queries,
    keys: Keys,
    step: Index,
    rows: tuple[Results, Results],
) -> Gradients:
    """What these keys add to the gradients; `rows` are the queries' results and cotangents."""
    del step
    return backward_of(make_call(options, operands, queries, keys), *rows)
