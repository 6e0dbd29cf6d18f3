"""Keys and values travel round the ring of devices; each device keeps its queries.

    step i, device r: attend to the keys of device r - i, while they move on to device r + 1

    forward     O, LSE of the steps are merged in float32, in the order of the steps
    backward    dQ is summed over the steps; dK, dV of the other devices' queries travel behind
                their keys, each device adding its part, and go home after the last step

The backward pass does not differentiate the merge: with the merged log-sum-exp, each step's part of
the gradient stands alone (Ring Attention, arXiv:2310.01889). Memory is linear in the local length.
Steps whose keys no device may attend to, with windows, are left out, and so is their communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_flash.context_parallel import balanced_causal, chunk_pairs
from jax_flash.context_parallel.local_calls import (
    Held,
    Keys,
    Operands,
    Options,
    Pair,
    Queries,
    cotangent_of,
    join,
    join_results,
    split_results,
    sum_over_devices,
)
from jax_flash.context_parallel.order import Index
from jax_flash.context_parallel.two_passes import join_passes
from jax_flash.reference.chunked_backward import Gradients, Results


class Steps(Protocol):
    """What is computed in the steps: `chunk_pairs`, or `balanced_causal` where it applies."""

    def parts(self, options: Options, length: int) -> int:
        """How many parts `length` queries or keys of a device are cut into, all of one length."""
        ...

    def queries(self, options: Options, operands: Operands) -> list[Queries]:
        """The parts of the queries."""
        ...

    def keys(self, options: Options, operands: Operands, held: Held, step: Index) -> list[Keys]:
        """The parts of the keys that this device holds in a step."""
        ...

    def pairs(self, options: Options, operands: Operands) -> list[list[Pair]]:
        """Which parts of queries attend to which parts of keys, in each step."""
        ...

    def forward(
        self, options: Options, operands: Operands, queries: Queries, keys: Keys, step: Index
    ) -> Results:
        """Results of a part of the queries over a part of the keys."""
        ...

    def backward(
        self,
        options: Options,
        operands: Operands,
        queries: Queries,
        keys: Keys,
        step: Index,
        rows: tuple[Results, Results],
    ) -> Gradients:
        """What these keys add to the gradients; `rows` are the queries' results and cotangents."""
        ...


def _steps_of(options: Options, operands: Operands) -> Steps:
    return balanced_causal if balanced_causal.applies(options, operands) else chunk_pairs


def _forward(options: Options, operands: Operands) -> Results:
    steps = _steps_of(options, operands)
    parts = steps.queries(options, operands)

    def visit(step: Step, state: tuple[Held, list[_Sums]]) -> tuple[Held, list[_Sums]]:
        held, sums = state
        arriving = held if step.is_last else _rotate(options, held, 1)
        keys = steps.keys(options, operands, held, step.number)
        for i, j in step.pairs:
            results = steps.forward(options, operands, parts[i], keys[j], step.number)
            sums = [total.add(results) if k == i else total for k, total in enumerate(sums)]
        return arriving, sums

    held = Held(operands.key, operands.value, operands.key_segment_ids)
    empty = [_Sums.empty(queries, operands.value) for queries in parts]
    _, sums = _go_round(steps.pairs(options, operands), visit, (held, empty))
    return join_results(
        [total.results(queries, operands.sinks) for total, queries in zip(sums, parts, strict=True)]
    )


def _backward(
    options: Options, operands: Operands, results: Results, cotangents: Results
) -> Operands:
    steps = _steps_of(options, operands)
    parts = steps.queries(options, operands)
    rows = list(
        zip(split_results(results, len(parts)), split_results(cotangents, len(parts)), strict=True)
    )

    def visit(step: Step, state: _BackwardState) -> _BackwardState:
        held, at_home, (d_query, d_key, d_value) = state
        arriving = held if step.is_last else _rotate(options, held, 1)
        keys = steps.keys(options, operands, held, step.number)
        for i, j in step.pairs:
            terms = steps.backward(options, operands, parts[i], keys[j], step.number, rows[i])
            d_query = _add_to(d_query, i, terms.query)
            d_key = _add_to(d_key, j, terms.key)
            d_value = _add_to(d_value, j, terms.value)
        if step.is_first:
            at_home, d_key, d_value = _KeySums(d_key, d_value), zeros.key, zeros.value
        elif not step.is_last:  # The sums follow their keys.
            d_key, d_value = _rotate(options, (d_key, d_value), 1)
        return _BackwardState(arriving, at_home, _GradientSums(d_query, d_key, d_value))

    held = Held(operands.key, operands.value, operands.key_segment_ids)
    pairs = steps.pairs(options, operands)
    zeros = _GradientSums.zeros(operands, partial(steps.parts, options))
    start = _BackwardState(held, _KeySums(zeros.key, zeros.value), zeros)
    _, at_home, sums = _go_round(pairs, visit, start)
    if len(pairs) > 1:
        arrived = _KeySums(*_rotate(options, (sums.key, sums.value), 1 - len(pairs)))
        at_home = jax.tree.map(jnp.add, at_home, arrived)
    return cotangent_of(
        operands,
        query=join(sums.query, -3),
        key=join(at_home.key, -3),
        value=join(at_home.value, -3),
        sinks=_sinks_gradient(options, operands, results, cotangents),
    )


_attend = join_passes(_forward, _backward)


def attend_ring(options: Options, operands: Operands) -> Results:
    """Returns the results of this device's queries."""
    positions_matter = (
        options.is_causal
        or options.window != (None, None)
        or operands.query_lengths is not None
        or operands.key_lengths is not None
    )
    if not positions_matter:  # Then a device's two chunks are as good as one.
        options = replace(options, order="contiguous")
    return _attend(options, operands)


class Step(NamedTuple):
    """One step of the ring.

    Attributes:
        number: of the step, from 0.
        pairs: of parts to visit.
        is_first: whether the device holds its own keys.
        is_last: whether the keys stay where they are.
    """

    number: Index
    pairs: list[Pair]
    is_first: bool
    is_last: bool


State = TypeVar("State")


def _go_round(
    pairs: list[list[Pair]], visit: Callable[[Step, State], State], state: State
) -> State:
    """Runs the steps; those between the first and the last in a loop.

    Without the loop nothing would keep XLA from running all communication first, and then memory
    would be linear in the whole length.
    """
    last = len(pairs) - 1
    state = visit(Step(0, pairs[0], True, last == 0), state)
    between = sorted({pair for step in pairs[1:last] for pair in step})
    if last == 2:
        state = visit(Step(1, between, False, False), state)
    elif last > 2:
        state = jax.lax.fori_loop(
            1, last, lambda number, state: visit(Step(number, between, False, False), state), state
        )
    return state if last == 0 else visit(Step(last, pairs[last], False, True), state)


class _GradientSums(NamedTuple):
    """Sums of gradients in float32, one for each part.

    Attributes:
        query: of [..., t, N, D].
        key: of [..., s, K, D], those of the keys that the device holds.
        value: of [..., s, K, Dv], likewise.
    """

    query: list[jax.Array]
    key: list[jax.Array]
    value: list[jax.Array]

    @classmethod
    def zeros(cls, operands: Operands, parts: Callable[[int], int]) -> _GradientSums:
        """Sums of nothing; `parts` tells how many parts a length is cut into."""

        def zeros(array: jax.Array) -> list[jax.Array]:
            wide = jnp.zeros_like(array, jnp.promote_types(array.dtype, jnp.float32))
            return jnp.split(wide, parts(array.shape[-3]), -3)

        return cls(zeros(operands.query), zeros(operands.key), zeros(operands.value))


class _KeySums(NamedTuple):
    """Sums of the gradients of this device's own keys, as in `_GradientSums`."""

    key: list[jax.Array]
    value: list[jax.Array]


class _BackwardState(NamedTuple):
    """What a step of the backward pass hands on.

    Attributes:
        held: the keys.
        at_home: what this device's queries add to the gradients of its own keys.
        sums: dQ, and what the other devices' queries have added to the gradients of `held`.
    """

    held: Held
    at_home: _KeySums
    sums: _GradientSums


def _add_to(sums: list[jax.Array], index: int, term: jax.Array) -> list[jax.Array]:
    return [total + term if i == index else total for i, total in enumerate(sums)]


class _Sums(NamedTuple):
    """Results over the keys so far, before the division; rows are [..., t, N], in float32.

    Attributes:
        maximum: rows, the greatest log-sum-exp.
        denominator: rows, sum of exp(lse - maximum).
        weighted: [..., t, N, Dv], sum of exp(lse - maximum) * output.
    """

    maximum: jax.Array
    denominator: jax.Array
    weighted: jax.Array

    @classmethod
    def empty(cls, queries: Queries, value: jax.Array) -> _Sums:
        """Results over no keys."""
        dtype = jnp.promote_types(value.dtype, jnp.float32)
        rows = jnp.zeros_like(queries.query[..., 0], dtype)
        weighted = jnp.broadcast_to(rows[..., None], (*rows.shape, value.shape[-1]))
        return cls(jnp.full_like(rows, -jnp.inf), rows, weighted)

    def add(self, results: Results) -> _Sums:
        """Merges results over other keys."""
        maximum = jnp.maximum(self.maximum, results.lse)
        shift = _finite(maximum)
        rescale = jnp.exp(self.maximum - shift)
        weight = jnp.exp(results.lse - shift)
        return _Sums(
            maximum,
            rescale * self.denominator + weight,
            rescale[..., None] * self.weighted + weight[..., None] * results.output,
        )

    def results(self, queries: Queries, sinks: jax.Array | None) -> Results:
        """Divides; sinks [N] join the denominator."""
        maximum, denominator, weighted = self
        shift = _finite(maximum)
        if sinks is not None:
            sinks = sinks.astype(maximum.dtype)
            shift = _finite(jnp.maximum(maximum, sinks))
            rescale = jnp.exp(maximum - shift)
            denominator = rescale * denominator + jnp.exp(sinks - shift)
            weighted = rescale[..., None] * weighted
        is_empty = denominator == 0
        is_valid = queries.is_valid
        if is_valid is not None:
            is_empty = is_empty | ~is_valid[..., None]
        denominator = jnp.where(is_empty, 1, denominator)
        output = jnp.where(is_empty[..., None], 0, weighted / denominator[..., None])
        lse = jnp.where(is_empty, -jnp.inf, shift + jnp.log(denominator))
        return Results(output.astype(queries.query.dtype), lse)


def _finite(maximum: jax.Array) -> jax.Array:
    """0 where `maximum` is -inf, so that exp(x - shift) of an empty row is 0, not NaN."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def _rotate(options: Options, tree, shift: int):
    """Gives every array to the device `shift` ranks further."""
    shards = options.shards
    if shift % shards == 0:
        return tree
    ring = [(rank, (rank + shift) % shards) for rank in range(shards)]
    return jax.tree.map(lambda array: jax.lax.ppermute(array, options.axis_name, ring), tree)


def _sinks_gradient(
    options: Options, operands: Operands, results: Results, cotangents: Results
) -> jax.Array | None:
    """The sinks join at the merge, so their gradient is not one of a step."""
    if operands.sinks is None:
        return None
    dtype = results.lse.dtype
    # A row that attends to nothing is constant: its cotangents, NaN perhaps, count for nothing.
    is_live = results.lse != -jnp.inf
    d_output = jnp.where(is_live[..., None], cotangents.output, 0).astype(dtype)
    delta = jnp.sum(results.output.astype(dtype) * d_output, axis=-1)
    delta = delta - jnp.where(is_live, cotangents.lse, 0)
    weights = jnp.exp(operands.sinks.astype(dtype) - _finite(results.lse))
    terms = jnp.where(is_live, -weights * delta, 0)
    return sum_over_devices(options, [jnp.sum(terms, axis=tuple(range(terms.ndim - 1)))])
