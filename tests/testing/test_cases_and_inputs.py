"""Cases are well named, inputs are reproducible, and the oracle is one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.reference.chunked import chunked_attention
from jax_flash.testing import (
    CASES,
    Case,
    assert_bitwise_equal,
    assert_close_to_oracle,
    cases_tagged,
    float64_oracle,
    make_inputs,
    poison_padding,
    results_and_gradients,
)
from jax_flash.testing.cases import FEATURES, TAGS

FIRST = 0.3987989  # The first number drawn for `_case()`.


def _case(**changes: Any) -> Case:
    shapes: dict[str, Any] = {"name": "case", "tags": frozenset(), "queries": 40, "keys": 50}
    return Case(**(shapes | changes))


def test_names_are_unique_and_every_tag_and_feature_is_used():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(cases_tagged(tag) for tag in TAGS)
    quick = cases_tagged("quick")
    assert {feature for case in quick for feature in case.features} == FEATURES
    assert {case.dtype for case in quick} == {"bfloat16", "float16", "float32"}
    assert all(case.tags for case in CASES)
    assert cases_tagged("quick", "bench") == [c for c in CASES if c.tags & {"quick", "bench"}]


def test_bench_cases_are_all_of_one_size():
    tokens = {case.batch * case.queries for case in cases_tagged("bench")}
    channels = {case.heads * case.head_dim for case in cases_tagged("bench")}
    assert (tokens, channels) == ({16384}, {2048})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tags": frozenset({"slow"})}, r"\['slow'\]"),
        ({"features": frozenset({"dropout"})}, r"\['dropout'\]"),
        ({"heads": 3, "key_heads": 2}, "3 query heads and 2 key heads"),
    ],
)
def test_impossible_cases_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _case(**changes)


def test_unknown_tags_are_refused():
    with pytest.raises(ValueError, match=r"\['fast'\] do not exist"):
        cases_tagged("quick", "fast")


def test_inputs_depend_on_seed_and_name_alone():
    def operands(inputs):
        return {"query": inputs.query, "key": inputs.key, "d_lse": inputs.d_lse}

    assert_bitwise_equal(operands(make_inputs(_case())), operands(make_inputs(_case())))
    for other in (make_inputs(_case(), seed=1), make_inputs(_case(name="other"))):
        with pytest.raises(AssertionError):
            assert_bitwise_equal(operands(other), operands(make_inputs(_case())))
    # A known value, so that a change of numpy, jax or this code cannot go unnoticed.
    assert float(make_inputs(_case(dtype="float32")).query[0, 0, 0, 0]) == pytest.approx(FIRST)


def test_outliers_have_the_stated_distribution():
    case = _case(queries=2000, heads=8, key_heads=8, dtype="float32")
    plain = np.asarray(make_inputs(case).query)
    mixed = np.asarray(make_inputs(case, with_outliers=True).query)
    assert np.abs(plain).max() < 7
    share = np.mean(np.abs(mixed) > 7)
    # P(|N(0, 101)| > 7) = 0.486, for one entry in a thousand.
    assert share == pytest.approx(0.486e-3, rel=0.1)
    assert np.var(mixed) == pytest.approx(1 + 0.1, rel=0.02)


def test_lengths_and_segments_cover_the_edges():
    case = _case(batch=4, features=frozenset({"query_lengths", "key_lengths", "segment_ids"}))
    semantics = make_inputs(case).semantics
    for lengths, longest in ((semantics.query_lengths, 40), (semantics.key_lengths, 50)):
        assert lengths is not None
        assert int(lengths.max()) == longest and int(lengths.min()) == 0
    ids = semantics.query_segment_ids
    assert ids is not None and {int(i) for i in np.unique(ids)} == {-1, 0, 1, 2}


def test_poison_is_on_padding_only():
    case = _case(batch=4, features=frozenset({"query_lengths", "segment_ids"}))
    clean, poisoned = make_inputs(case), poison_padding(make_inputs(case))
    lengths, ids = poisoned.semantics.query_lengths, poisoned.semantics.query_segment_ids
    assert lengths is not None and ids is not None
    is_padding = np.asarray((jnp.arange(40) >= lengths[:, None]) | (ids < 0))
    for name in ("query", "d_output", "d_lse"):
        values = np.asarray(getattr(poisoned, name)).astype(np.float32)
        assert np.isnan(values[is_padding]).all()
        untouched = np.asarray(getattr(clean, name)).astype(np.float32)
        np.testing.assert_array_equal(values[~is_padding], untouched[~is_padding])
    key_ids = np.asarray(poisoned.semantics.key_segment_ids)
    is_nan = np.isnan(np.asarray(poisoned.value).astype(np.float32)).all(axis=(2, 3))
    np.testing.assert_array_equal(is_nan, key_ids < 0)


def test_contract_holds_for_the_ideal_and_not_for_a_sloppy_implementation():
    inputs = make_inputs(_case(features=frozenset({"sinks", "bias"})))
    oracle, ideal = float64_oracle(inputs), results_and_gradients(chunked_attention, inputs)
    assert set(oracle) == {"output", "lse", "d_query", "d_key", "d_value", "d_bias", "d_sinks"}
    assert {array.dtype for array in oracle.values()} == {np.dtype(np.float64)}
    assert_close_to_oracle(ideal, oracle=oracle, ideal=ideal)

    def sloppy(query, key, value, semantics):
        coarse = value.astype(jnp.float8_e4m3fn).astype(value.dtype)
        return chunked_attention(query, key, coarse, semantics)

    with pytest.raises(AssertionError, match=r"output .*ratio"):
        assert_close_to_oracle(results_and_gradients(sloppy, inputs), oracle=oracle, ideal=ideal)
