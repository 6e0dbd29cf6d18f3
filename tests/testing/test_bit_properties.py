"""The generator of random calls, and that each property notices what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.semantics import Semantics
from jax_flash.testing import bit_properties
from jax_flash.testing.bit_properties import GRADIENT_PROPERTIES, PROPERTIES, check, run
from jax_flash.testing.random_calls import (
    ARRAY_FEATURES,
    DENSE_FEATURES,
    RandomCall,
    Sizes,
    random_call,
)

SIZES = Sizes(
    queries=(10, 14),
    keys=(12, 20),
    batch=3,
    heads=((4, 2), (3, 3)),
    head_dims=((16, 8),),
    chunks=(1, 4),
    padding=(2, 6),
    repeats=4,
    array_features=ARRAY_FEATURES + DENSE_FEATURES,
)
ALL_FEATURES = 343
"""A seed whose call has lengths, segments, a bias, a mask and a window."""


def test_a_seed_gives_the_same_call_and_another_seed_another() -> None:
    first, again, other = (random_call(seed, SIZES) for seed in (3, 3, 4))
    assert first.case == again.case != other.case
    queries = [np.asarray(call.inputs.query, np.float32) for call in (first, again)]
    np.testing.assert_array_equal(queries[0], queries[1])


def test_calls_cover_the_features() -> None:
    calls = [random_call(seed, SIZES) for seed in range(128)]
    cases = [call.case for call in calls]
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    assert {(case.heads, case.key_heads) for case in cases} == set(SIZES.heads)
    for name in (*SIZES.array_features, "sinks"):
        assert 3 <= sum(name in case.features for case in cases) < len(cases)
    assert 0 < sum(case.soft_cap is not None for case in cases) < len(cases)
    assert any(case.is_causal and case.window != (None, None) for case in cases)
    assert any(call.query_offset > 0 for call in calls)
    assert any(call.query_offset < 0 for call in calls)
    padded = [call for call in calls if "key_lengths" in call.case.features]
    assert all(np.isnan(np.asarray(call.inputs.key, np.float32)).any() for call in padded)


Attention = Callable[[jax.Array, jax.Array, jax.Array, Semantics], tuple[jax.Array, jax.Array]]


def install(monkeypatch: pytest.MonkeyPatch, make: Callable[[int], Attention]) -> None:
    """Makes properties run the attention that `make` gives for a query offset."""
    made: dict[int, Attention] = {}

    def public(*, implementation: str, deterministic_bwd: bool, query_offset: int) -> Attention:
        return made.setdefault(query_offset, make(query_offset))

    monkeypatch.setattr(bit_properties, "public_attention", public)


def reference(query_offset: int) -> Attention:
    def attend(query: Any, key: Any, value: Any, semantics: Semantics) -> Any:
        if semantics.query_offset is None:
            offset = jnp.full(query.shape[:-3], query_offset, jnp.int32)
            semantics = replace(semantics, query_offset=offset)
        return attention_reference(query, key, value, semantics)

    return attend


def dependent_on_everything(query_offset: int) -> Attention:
    """Adds a little of the sum of all queries, which a row must not see."""
    right = reference(query_offset)

    def attend(query: Any, key: Any, value: Any, semantics: Semantics) -> Any:
        output, lse = right(query, key, value, semantics)
        total = jnp.nansum(query.astype(jnp.float32)) * 1e-2 + 1e-3 * query.size
        return output + total.astype(output.dtype), lse

    return attend


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_notices_a_row_that_depends_on_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, dependent_on_everything)
    with pytest.raises(AssertionError, match=r"output: .* entries differ"):
        check(name, random_call(0, SIZES), SIZES, 0, implementation="any")


@pytest.mark.parametrize(
    ("name", "seed", "gradients"),
    [(name, seed, False) for name in PROPERTIES for seed in (2, ALL_FEATURES)]
    + [("in_another_batch", 3, True), ("with_other_heads", 3, True)],
)
def test_a_variation_computes_the_same_rows(
    name: str, seed: int, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an algorithm whose bits XLA decides, so closely instead of bit for bit."""
    install(monkeypatch, reference)
    call = random_call(seed, SIZES)
    variation = PROPERTIES[name](call, SIZES, np.random.default_rng(seed))
    original = run(call, implementation="any", gradients=gradients)
    varied = run(variation.call, implementation="any", gradients=gradients)
    actual, expected = variation.of_variation(varied), variation.of_original(original)
    assert actual.keys() == expected.keys()
    assert {"output", "lse"} <= actual.keys()
    assert ("d_key" in actual) == gradients
    for key, array in actual.items():
        wanted = np.asarray(expected[key], np.float32)
        assert array.size > 0
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
        np.testing.assert_allclose(
            np.asarray(array, np.float32), wanted, rtol=0.02, atol=0.02 * largest, err_msg=key
        )


def test_gradients_are_compared_where_a_property_holds_for_them() -> None:
    assert {"in_chunks", "with_padding"} == PROPERTIES.keys() - set(GRADIENT_PROPERTIES)


def test_the_features_of_that_seed() -> None:
    call: RandomCall = random_call(ALL_FEATURES, SIZES)
    assert call.case.features >= {"key_lengths", "segment_ids", "bias", "mask"}
    assert call.case.window != (None, None)
