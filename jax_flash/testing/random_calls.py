"""Random attention calls of every feature, from a seed, and parts and variations of them.

Arrays are numpy's: to slice those of JAX would compile a program for every shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_flash.reference.semantics import Semantics, align_leading_dimensions, may_attend
from jax_flash.testing.cases import Case
from jax_flash.testing.inputs import Inputs, make_inputs, poison_padding

_OPERANDS = ("query", "key", "value", "d_output", "d_lse")
_QUERY_SIDE = ("query", "d_output", "d_lse")
PER_SEQUENCE = (
    "query_offset",
    "query_lengths",
    "key_lengths",
    "query_segment_ids",
    "key_segment_ids",
    "mask",
)
"""Fields of `Semantics` whose first axis is the batch's, as `make_inputs` makes them."""

ARRAY_FEATURES = ("query_offset", "query_lengths", "key_lengths", "segment_ids")
DENSE_FEATURES = ("bias", "mask")
AMPLITUDES = (1.0, 4.0, 16.0)
"""Factors on the query: with the larger ones a row's maximum moves often, by much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What to choose from: few values of each, so that calls share compiled programs.

    Attributes:
        queries: of T.
        keys: of S.
        batch: sequences of a call.
        heads: of (N, K).
        head_dims: of (D, Dv).
        chunks: numbers of queries that a part of T may have.
        padding: positions that may be added after the last query or key.
        repeats: how often a sequence is repeated to make a grid larger.
        array_features: of `cases.FEATURES`, without sinks: what calls of every feature may have.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    batch: int
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    padding: tuple[int, ...]
    repeats: int
    array_features: tuple[str, ...] = ARRAY_FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCall:
    """One call of attention.

    Attributes:
        case: shapes, dtype and features.
        inputs: its arrays, of numpy; NaN in padding.
        query_offset: the offset, where the call has it as a number and not as an array.
        is_mapped: whether `jax.vmap` is to map the call over the batch.
    """

    case: Case
    inputs: Inputs
    query_offset: int = 0
    is_mapped: bool = False

    @property
    def semantics(self) -> Semantics:
        """What the inputs ask for, beside operands."""
        return self.inputs.semantics

    def with_inputs(self, semantics: dict[str, Any], **changes: Any) -> RandomCall:
        """The call with other operands and fields of its semantics."""
        changes["semantics"] = replace(self.semantics, **semantics)
        return replace(self, inputs=replace(self.inputs, **changes))


def random_call(seed: int, sizes: Sizes) -> RandomCall:
    """Makes a call; full and causal masks, windows, and everything at once are equally likely."""
    random = np.random.default_rng(seed)

    def choose(options: Sequence[Any]) -> Any:
        return options[int(random.integers(len(options)))]

    queries, keys = choose(sizes.queries), choose(sizes.keys)
    kind = ("full", "causal", "window", "general")[seed % 4]
    features = {"sinks"} if random.random() < 0.25 else set()
    window, soft_cap = (None, None), None
    if kind == "general":
        features |= {name for name in sizes.array_features if random.random() < 0.5}
        soft_cap = choose((None, 5.0))
    if kind == "window" or (kind == "general" and random.random() < 0.4):
        window = choose(((17, 5), (60, 0), (0, 0), (None, 9), (100, None)))
    heads, key_heads = choose(sizes.heads)
    head_dim, value_dim = choose(sizes.head_dims)
    case = Case(
        name=f"{kind}-{seed}",
        tags=frozenset({"full"}),
        batch=sizes.batch,
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=choose(("bfloat16", "float16")),
        is_causal=kind == "causal" or (kind == "general" and random.random() < 0.5),
        window=window,
        soft_cap=soft_cap,
        features=frozenset(features),
    )
    inputs = make_inputs(case, seed=seed)
    louder = np.asarray(inputs.query) * jnp.dtype(case.dtype).type(choose(AMPLITUDES))
    inputs = poison_padding(replace(inputs, query=louder))
    has_offset = (case.is_causal or window != (None, None)) and "query_offset" not in features
    return RandomCall(
        case=case,
        inputs=_as_numpy(inputs),
        query_offset=choose((0, keys - queries, -(queries // 3))) if has_offset else 0,
    )


def _as_numpy(inputs: Inputs) -> Inputs:
    arrays: dict[str, Any] = {name: np.asarray(getattr(inputs, name)) for name in _OPERANDS}
    fields = {
        name: np.asarray(array)
        for name in (*PER_SEQUENCE, "bias", "sinks")
        if (array := getattr(inputs.semantics, name)) is not None
    }
    return replace(inputs, semantics=replace(inputs.semantics, **fields), **arrays)


def _changed(call: RandomCall, names: Sequence[str], change: Callable[[Any], Any]) -> dict:
    """The fields of a call's semantics that it has, changed."""
    return {
        name: change(array)
        for name in names
        if (array := getattr(call.semantics, name)) is not None
    }


def take_sequences(call: RandomCall, chosen: Sequence[int]) -> RandomCall:
    """The call of some of its sequences, in that order; one may be there several times."""
    index = np.asarray(chosen)
    operands = {name: getattr(call.inputs, name)[index] for name in _OPERANDS}
    fields = _changed(call, PER_SEQUENCE, lambda array: array[index])
    case = replace(call.case, batch=len(index))
    return replace(call, case=case).with_inputs(fields, **operands)


def take_head_groups(call: RandomCall, chosen: Sequence[int]) -> RandomCall:
    """The call of some of its key heads and their query heads; one may be there several times."""
    keys, queries = np.asarray(chosen), heads_of(call.case, chosen)
    operands = {
        name: getattr(call.inputs, name)[:, :, queries if name in _QUERY_SIDE else keys]
        for name in _OPERANDS
    }
    fields = _changed(call, ("sinks", "bias"), lambda array: array[queries])
    case = replace(call.case, heads=len(queries), key_heads=len(keys))
    return replace(call, case=case).with_inputs(fields, **operands)


def heads_of(case: Case, key_heads: Sequence[int]) -> np.ndarray:
    """The query heads that read the given key heads, in their order."""
    group = case.heads // case.key_heads
    return np.concatenate([np.arange(group) + group * head for head in key_heads])


def take_queries(call: RandomCall, start: int, count: int) -> RandomCall:
    """The call of a part of its queries, which keep their positions on the key axis."""
    rows = slice(start, start + count)
    operands = {name: getattr(call.inputs, name)[:, rows] for name in _QUERY_SIDE}
    fields = {
        **_changed(call, ("query_offset",), lambda array: array + np.int32(start)),
        **_changed(call, ("query_lengths",), lambda array: np.clip(array - start, 0, count)),
        **_changed(call, ("query_segment_ids",), lambda array: array[:, rows]),
        **_changed(call, ("bias", "mask"), lambda array: array[..., rows, :]),
    }
    has_number = call.semantics.query_offset is None and call.semantics.band != (None, None)
    case = replace(call.case, queries=count)
    return replace(
        call, case=case, query_offset=call.query_offset + start if has_number else 0
    ).with_inputs(fields, **operands)


def pad(call: RandomCall, queries: int, keys: int) -> RandomCall:
    """The call with positions of NaN after its last query and its last key, and lengths."""

    def longer(array: np.ndarray, count: int, filling: Any) -> np.ndarray:
        widths = [(0, 0), (0, count)] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, widths, constant_values=filling)

    def wider(array: np.ndarray, filling: Any) -> np.ndarray:
        widths = [(0, 0)] * (array.ndim - 2) + [(0, queries), (0, keys)]
        return np.pad(array, widths, constant_values=filling)

    operands = {
        name: longer(getattr(call.inputs, name), queries if name in _QUERY_SIDE else keys, np.nan)
        for name in _OPERANDS
    }
    case, given = call.case, call.semantics
    lengths = {
        name: np.full(case.batch, length, np.int32)
        for name, length in (("query_lengths", case.queries), ("key_lengths", case.keys))
        if getattr(given, name) is None
    }
    fields = {
        **lengths,
        **_changed(call, ("query_segment_ids",), lambda array: longer(array, queries, 0)),
        **_changed(call, ("key_segment_ids",), lambda array: longer(array, keys, 0)),
        **_changed(call, ("bias",), lambda array: wider(array, np.nan)),
        **_changed(call, ("mask",), lambda array: wider(array, True)),
    }
    case = replace(case, queries=case.queries + queries, keys=case.keys + keys)
    return replace(call, case=case).with_inputs(fields, **operands)


def replace_all_but(call: RandomCall, rows: np.ndarray, random: np.random.Generator) -> RandomCall:
    """The call with other values wherever the given queries cannot see them.

    Args:
        call: any.
        rows: of queries whose operands, and the keys and values that they see, stay.
        random: makes the other values, which are finite: a NaN may reach the rows that see it not,
            unless it is in padding.
    """
    semantics = align_leading_dimensions(call.semantics, 1)
    if semantics.query_offset is None:
        semantics = replace(semantics, query_offset=jnp.full(1, call.query_offset, jnp.int32))
    shape = (call.case.batch, call.case.heads, call.case.queries, call.case.keys)
    pairs = may_attend(semantics, jnp.arange(shape[2]), jnp.arange(shape[3]))
    visible = np.ones(shape, bool) if pairs is None else np.broadcast_to(np.asarray(pairs), shape)
    seen_keys = np.asarray(visible[:, :, rows].any(axis=(1, 2)))
    kept_queries = np.zeros((shape[0], shape[2]), bool)
    kept_queries[:, rows] = True

    def change(name: str) -> np.ndarray:
        array = np.array(getattr(call.inputs, name))
        kept = kept_queries if name in _QUERY_SIDE else seen_keys
        noise = random.standard_normal(array.shape, np.float32) * 8
        return np.where(kept[..., *[None] * (array.ndim - 2)], array, noise.astype(array.dtype))

    return call.with_inputs({}, **{name: change(name) for name in _OPERANDS})
