"""The calls of attention that one device makes: some of its queries with some keys."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash.context_parallel.order import Index, Layout
from jax_flash.ops.arguments import Arguments, Call
from jax_flash.ops.attention import backward_pass, forward_pass
from jax_flash.ops.dispatch import choose
from jax_flash.ops.validation import check_call
from jax_flash.reference.chunked_backward import Gradients, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is static of a call; hashable, part of every jit key.

    Attributes:
        axis_name: the mesh axis that the sequence is sharded over.
        shards: its size, n.
        mode: one of `attention.MODES`.
        order: one of `order.ORDERS`.
        scale: factor on the logits.
        is_causal: as in `jax_flash.attention`.
        window: (left, right).
        soft_cap: bound of the logits, or None.
        query_offset: when it is a Python integer, else 0.
        deterministic_bwd: as in `jax_flash.attention`.
        implementation: likewise.
    """

    axis_name: str
    shards: int
    mode: str
    order: str
    scale: float
    is_causal: bool
    window: tuple[int | None, int | None]
    soft_cap: float | None
    query_offset: int
    deterministic_bwd: bool
    implementation: str | None

    def layout(self, local_length: int) -> Layout:
        """How a sequence with `local_length` positions on each device is spread."""
        return Layout(order=self.order, shards=self.shards, local_length=local_length)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query",
        "key",
        "value",
        "query_offset",
        "query_lengths",
        "key_lengths",
        "query_segment_ids",
        "key_segment_ids",
        "sinks",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """One device's part of the arrays of a call; T and S are local lengths.

    Attributes:
        query: [..., T, N, D].
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        query_offset: int32, scalar or [...], or None where `Options.query_offset` says all.
        query_lengths: int32 [...], of whole sequences, or None.
        key_lengths: likewise.
        query_segment_ids: int32 [..., T], or None.
        key_segment_ids: int32 [..., S], or None.
        sinks: [N], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_offset: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None


class Queries(NamedTuple):
    """Consecutive queries of a sequence.

    Attributes:
        query: [..., t, N, D].
        start: position of the first one.
        lengths: of the whole sequences, int32 [...], or None.
        segment_ids: int32 [..., t], or None.
    """

    query: jax.Array
    start: Index
    lengths: jax.Array | None
    segment_ids: jax.Array | None

    @property
    def is_valid(self) -> jax.Array | None:
        """Which of them are not padding: bool, broadcastable to [..., t], or None for all."""
        conditions = []
        if self.lengths is not None:
            positions = self.start + jnp.arange(self.query.shape[-3], dtype=jnp.int32)
            conditions.append(positions < self.lengths[..., None])
        if self.segment_ids is not None:
            conditions.append(self.segment_ids >= 0)
        if len(conditions) == 2:
            return conditions[0] & conditions[1]
        return conditions[0] if conditions else None


class Keys(NamedTuple):
    """Consecutive keys of a sequence with their values.

    Attributes:
        key: [..., s, K, D].
        value: [..., s, K, Dv].
        start: position of the first one.
        lengths: of the whole sequences, int32 [...], or None.
        segment_ids: int32 [..., s], or None.
    """

    key: jax.Array
    value: jax.Array
    start: Index
    lengths: jax.Array | None
    segment_ids: jax.Array | None


class Held(NamedTuple):
    """What travels round a ring.

    Attributes:
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        segment_ids: int32 [..., S], or None.
    """

    key: jax.Array
    value: jax.Array
    segment_ids: jax.Array | None


Pair = tuple[int, int]
"""A part of this device's queries and a part of the keys it holds, by number."""


def query_chunks(options: Options, operands: Operands) -> list[Queries]:
    """Returns the chunks of queries that this device holds."""
    layout = options.layout(operands.query.shape[-3])
    ids = operands.query_segment_ids
    return [
        Queries(query, start, operands.query_lengths, chunk_ids)
        for query, start, chunk_ids in zip(
            layout.split(operands.query, -3),
            layout.starts(jax.lax.axis_index(options.axis_name)),
            [None] * layout.chunks if ids is None else layout.split(ids, -1),
            strict=True,
        )
    ]


def make_call(
    options: Options,
    operands: Operands,
    queries: Queries,
    keys: Keys,
    *,
    sinks: jax.Array | None = None,
) -> Call:
    """Returns the call of some queries with some keys.

    Positions count from the first key of the call, so that keys which begin at a later position
    than the queries give a negative query offset; where all of them lie in the future of a causal
    mask, the rows are empty.
    """
    offset = options.query_offset if operands.query_offset is None else operands.query_offset
    length, key_length = queries.query.shape[-3], keys.key.shape[-3]
    return check_call(
        Arguments(
            query=queries.query,
            key=keys.key,
            value=keys.value,
            scale=options.scale,
            is_causal=options.is_causal,
            query_offset=offset + queries.start - keys.start,
            local_window_size=options.window,
            query_seq_lengths=_lengths_from(queries.start, queries.lengths, length),
            key_value_seq_lengths=_lengths_from(keys.start, keys.lengths, key_length),
            query_segment_ids=queries.segment_ids,
            key_value_segment_ids=keys.segment_ids,
            logits_soft_cap=options.soft_cap,
            sinks=sinks,
            deterministic_bwd=options.deterministic_bwd,
            implementation=options.implementation,
        )
    )


def forward(call: Call) -> Results:
    """Output [..., t, N, Dv] and log-sum-exp [..., t, N] over the keys of the call."""
    return forward_pass(call, choose(call))


def backward(call: Call, results: Results, cotangents: Results) -> Gradients:
    """What the keys of the call add to the gradients; `results` are those over all keys."""
    return backward_pass(call, choose(call), results, cotangents)


def split_results(results: Results, parts: int) -> list[Results]:
    """Cuts the results of a device's queries, or their cotangents, into parts of one length."""
    outputs, lses = jnp.split(results.output, parts, -3), jnp.split(results.lse, parts, -2)
    return [Results(output, lse) for output, lse in zip(outputs, lses, strict=True)]


def join_results(chunks: list[Results]) -> Results:
    """The inverse of `split_results`."""
    return Results(join([x.output for x in chunks], -3), join([x.lse for x in chunks], -2))


def join(chunks: list[jax.Array], axis: int) -> jax.Array:
    """Puts a device's chunks together."""
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis)


def ordered_sum(terms: list[jax.Array]) -> jax.Array:
    """Adds from the first to the last, in float32 or wider."""
    wide = [term.astype(jnp.promote_types(term.dtype, jnp.float32)) for term in terms]
    total = wide[0]
    for term in wide[1:]:
        total = total + term
    return total


def sum_over_devices(options: Options, terms: list[jax.Array]) -> jax.Array:
    """The sum of every device's terms, in the order of devices.

    It is the cotangent of an operand that all devices share, which JAX sums over the devices once
    more. In what order, is for the collective to choose, so all but the first device give zeros.
    """
    gathered = jax.lax.all_gather(ordered_sum(terms), options.axis_name)
    total = ordered_sum(list(gathered))
    return jnp.where(jax.lax.axis_index(options.axis_name) == 0, total, 0)


def cotangent_of(operands: Operands, **gradients: jax.Array | None) -> Operands:
    """The record as a cotangent; None stands for that of an integer array."""
    absent = {field.name: None for field in fields(operands)}
    typed = {
        name: None if gradient is None else gradient.astype(getattr(operands, name).dtype)
        for name, gradient in gradients.items()
    }
    return replace(operands, **(absent | typed))


def _lengths_from(start: Index, lengths: jax.Array | None, longest: int) -> jax.Array | None:
    """How many of the `longest` positions from `start` on are not padding."""
    return None if lengths is None else jnp.clip(lengths - start, 0, longest)
