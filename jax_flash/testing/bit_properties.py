"""What must not change the bits of a row (docs/numerics.md), as properties of random calls.

A property turns a call into another one that computes some of the same rows, and says which. Both
are run and compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_flash.reference.semantics import Semantics
from jax_flash.testing.closeness import assert_bitwise_equal
from jax_flash.testing.oracle import Implementation, results_and_gradients
from jax_flash.testing.public import public_attention
from jax_flash.testing.random_calls import (
    PER_SEQUENCE,
    RandomCall,
    Sizes,
    heads_of,
    pad,
    replace_all_but,
    take_head_groups,
    take_queries,
    take_sequences,
)

Results = dict[str, np.ndarray]
"""output, lse and, if asked for, d_query, d_key and d_value."""

_OF_QUERIES = frozenset({"output", "lse", "d_query"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Another call that computes some of the same rows.

    Attributes:
        call: the other call.
        of_original: picks what must be the same from the results of the first call.
        of_variation: picks the same things from the results of the other.
    """

    call: RandomCall
    of_original: Callable[[Results], Results]
    of_variation: Callable[[Results], Results]


def _all(results: Results) -> Results:
    return results


def _sequence(place: int) -> Callable[[Results], Results]:
    return lambda results: {name: array[place] for name, array in results.items()}


def alone(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """One sequence of a batch by itself."""
    chosen = int(random.integers(call.case.batch))
    return Variation(
        call=take_sequences(call, [chosen]),
        of_original=_sequence(chosen),
        of_variation=_sequence(0),
    )


def in_another_batch(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """One sequence at another place of another batch."""
    batch = call.case.batch
    chosen, place = int(random.integers(batch)), int(random.integers(batch + 2))
    others = random.integers(batch, size=batch + 2)
    others[place] = chosen
    return Variation(
        call=take_sequences(call, list(others)),
        of_original=_sequence(chosen),
        of_variation=_sequence(place),
    )


def on_a_larger_grid(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """One sequence many times over: more blocks than there are multiprocessors."""
    chosen = int(random.integers(call.case.batch))
    repeats = sizes.repeats

    def repeated(results: Results) -> Results:
        one = _sequence(chosen)(results)
        return {
            name: np.broadcast_to(array, (repeats, *array.shape)) for name, array in one.items()
        }

    return Variation(
        call=take_sequences(call, [chosen] * repeats), of_original=repeated, of_variation=_all
    )


def with_other_heads(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """One key head and its query heads, alone or among others of another number."""
    case = call.case
    chosen = int(random.integers(case.key_heads))
    key_heads = [chosen] if case.key_heads > 1 else [chosen] * 2
    own = {True: heads_of(case, [chosen]), False: np.array([chosen])}

    def pick(results: Results, heads: dict[bool, np.ndarray]) -> Results:
        return {name: array[:, :, heads[name in _OF_QUERIES]] for name, array in results.items()}

    first = {True: np.arange(case.heads // case.key_heads), False: np.array([0])}
    return Variation(
        call=take_head_groups(call, key_heads),
        of_original=lambda results: pick(results, own),
        of_variation=lambda results: pick(results, first),
    )


def with_other_rows(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """Some rows, while all other queries, and the keys that these do not see, are replaced."""
    count = int(random.integers(1, 4))
    rows = np.sort(random.choice(call.case.queries, min(count, call.case.queries), replace=False))

    def pick(results: Results) -> Results:
        return {name: array[:, rows] for name, array in results.items() if name in _OF_QUERIES}

    return Variation(call=replace_all_but(call, rows, random), of_original=pick, of_variation=pick)


def in_chunks(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """Some of the queries alone, with the query offset that keeps their positions."""
    queries = call.case.queries
    count = min(queries, int(random.choice(sizes.chunks)))
    # An offset that is a number is part of the compiled program: few places, then.
    start = int(random.choice([0, (queries - count) // 2, queries - count]))

    def pick(results: Results) -> Results:
        return {name: results[name][:, start : start + count] for name in ("output", "lse")}

    return Variation(
        call=take_queries(call, start, count),
        of_original=pick,
        of_variation=lambda results: {name: results[name] for name in ("output", "lse")},
    )


def with_padding(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """The same with NaN past the last query and the last key, which lengths hide."""
    queries, keys = (int(random.choice(sizes.padding)) for _ in range(2))
    length = call.case.queries

    def pick(results: Results) -> Results:
        return {name: results[name][:, :length] for name in ("output", "lse")}

    return Variation(call=pad(call, queries, keys), of_original=pick, of_variation=pick)


def under_vmap(call: RandomCall, sizes: Sizes, random: np.random.Generator) -> Variation:
    """The same, mapped over the batch."""
    return Variation(call=replace(call, is_mapped=True), of_original=_all, of_variation=_all)


Property = Callable[[RandomCall, Sizes, np.random.Generator], Variation]

PROPERTIES: dict[str, Property] = {
    function.__name__: function
    for function in (
        alone,
        in_another_batch,
        on_a_larger_grid,
        with_other_heads,
        with_other_rows,
        in_chunks,
        with_padding,
        under_vmap,
    )
}
"""All of them, for results; by name."""

GRADIENT_PROPERTIES = tuple(
    name for name in PROPERTIES if name not in ("in_chunks", "with_padding")
)
"""Those that hold for deterministic gradients, too: the order of their sums follows from T and S,
which these leave as they are."""


def run(call: RandomCall, *, implementation: str, gradients: bool) -> Results:
    """Computes a call, compiled; the gradients are the deterministic ones."""
    attention = public_attention(
        implementation=implementation,
        deterministic_bwd=gradients,
        query_offset=call.query_offset,
    )
    if call.is_mapped:
        attention = mapped_over_batch(attention)
    inputs = call.inputs
    if gradients:
        results = results_and_gradients(attention, inputs)
        return {name: results[name] for name in ("output", "lse", "d_query", "d_key", "d_value")}
    output, lse = _compiled(attention)(inputs.query, inputs.key, inputs.value, inputs.semantics)
    return {"output": np.asarray(output), "lse": np.asarray(lse)}


@functools.lru_cache(maxsize=256)
def _compiled(attention: Implementation) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(attention)


@functools.cache
def mapped_over_batch(attention: Implementation) -> Implementation:
    """The same attention, with every sequence a call of its own under `jax.vmap`."""

    def mapped(
        query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> tuple[jax.Array, jax.Array]:
        mapped = [name for name in PER_SEQUENCE if getattr(semantics, name) is not None]
        axes: dict[str, Any] = dict.fromkeys(mapped, 0) | dict.fromkeys(("bias", "sinks"))
        in_axes = (0, 0, 0, replace(semantics, **axes))
        return jax.vmap(attention, in_axes=in_axes)(query, key, value, semantics)

    return mapped


def check(
    name: str,
    call: RandomCall,
    sizes: Sizes,
    seed: int,
    *,
    implementation: str,
    gradients: bool = False,
) -> None:
    """Asserts one property of one call.

    Args:
        name: of `PROPERTIES`.
        call: the call.
        sizes: what the property may choose from.
        seed: of its choices.
        implementation: as in `jax_flash.attention`.
        gradients: whether to compare gradients, too; the property is then one of
            `GRADIENT_PROPERTIES`.

    Raises:
        AssertionError: bits differ; it says of what, where and by how much.
    """
    variation = PROPERTIES[name](call, sizes, np.random.default_rng(seed))
    original = run(call, implementation=implementation, gradients=gradients)
    varied = run(variation.call, implementation=implementation, gradients=gradients)
    actual, expected = variation.of_variation(varied), variation.of_original(original)
    assert actual, "a property must compare something"
    assert_bitwise_equal(actual, expected)
