"""Chunked attention against the oracle: values, gradients, padding, rounding."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.chunked import chunked_attention
from jax_flash.reference.semantics import Semantics
from jax_flash.reference.tiled_call import TILE_KEYS, TILE_QUERIES
from jax_flash.testing import (
    CASES,
    Case,
    Inputs,
    assert_bitwise_equal,
    cases_tagged,
    float64_oracle,
    make_inputs,
    poison_padding,
    results_and_gradients,
)
from jax_flash.testing.cases import FEATURES

# Errors are at most this many roundings to the operands' dtype of the largest magnitude. Rounding
# P, dS and the result accounts for about three; float32 adds the order of its sums.
ROUNDINGS = {"bfloat16": 4, "float16": 4, "float32": 24}


# These tests compile for longer than they run; `test_compiled_as_users_compile` is the exception.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _run(inputs: Inputs) -> dict[str, np.ndarray]:
    return results_and_gradients(chunked_attention, inputs, compiler_options=QUICK)


def _assert_near_oracle(inputs: Inputs, actual: dict[str, np.ndarray] | None = None) -> None:
    actual = actual or _run(inputs)
    oracle = float64_oracle(inputs, compiler_options=QUICK)
    dtype = inputs.query.dtype
    for name, expected in oracle.items():
        # The log-sum-exp is never rounded to the operands' dtype.
        known_to = jnp.finfo(jnp.float32 if name == "lse" else dtype).eps / 2
        roundings = ROUNDINGS["float32" if name == "lse" else dtype.name]
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
        np.testing.assert_allclose(
            actual[name].astype(np.float64),
            expected,
            rtol=0,
            atol=roundings * float(known_to) * float(largest) + 1e-30,
            err_msg=name,
        )


def _case(**changes: Any) -> Case:
    shapes = {"queries": 9, "keys": 9, "head_dim": 16, "value_dim": 16, "dtype": "float32"}
    return Case(**({"name": "case", "tags": frozenset()} | shapes | changes))


@pytest.mark.parametrize("case", cases_tagged("quick"), ids=lambda case: case.name)
def test_named_cases(case):
    _assert_near_oracle(make_inputs(case))


@pytest.mark.parametrize("name", ["causal-129x129", "dtype-float32", "everything"])
def test_compiled_as_users_compile(name):
    (case,) = [case for case in CASES if case.name == name]
    inputs = make_inputs(case)
    _assert_near_oracle(inputs, results_and_gradients(chunked_attention, inputs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outliers(dtype):
    _assert_near_oracle(make_inputs(_case(queries=140, keys=300, dtype=dtype), with_outliers=True))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 257), (257, 1), (255, 513), (513, 256), (63, 1000), (1000, 127), (700, 600)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_are_not_multiples_of_the_tiles(queries, keys, is_causal):
    _assert_near_oracle(make_inputs(_case(queries=queries, keys=keys, is_causal=is_causal)))


@pytest.mark.parametrize("feature", ["plain", *sorted(FEATURES)])
def test_every_feature_over_several_tiles(feature):
    features = frozenset() if feature == "plain" else frozenset({feature})
    case = _case(
        name=feature,
        queries=2 * TILE_QUERIES + 30,
        keys=TILE_KEYS + 50,
        features=features,
        window=(300, 100),
        soft_cap=3.0,
    )
    _assert_near_oracle(make_inputs(case))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_head_groups_and_value_sizes(group):
    _assert_near_oracle(
        make_inputs(_case(queries=40, keys=270, heads=2 * group, head_dim=24, value_dim=8))
    )


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 1, 1, 300), (1, 2, 290, 1), (290, 300), (2, 2, 290, 300), ()],
    ids=str,
)
def test_bias_gradient_has_the_shape_of_the_bias(shape):
    inputs = make_inputs(_case(queries=290, keys=300))
    bias = jnp.asarray(np.random.default_rng(5).standard_normal(shape).astype(np.float32))
    inputs = replace(inputs, semantics=replace(inputs.semantics, bias=bias))
    results = _run(inputs)
    assert results["d_bias"].shape == shape
    _assert_near_oracle(inputs, results)


def test_bias_of_another_dtype_and_minus_infinity():
    inputs = make_inputs(_case(queries=40, keys=50, dtype="bfloat16"))
    bias = jnp.where(jnp.arange(50) % 3 == 0, -jnp.inf, jnp.ones((40, 1)))
    bias = bias.at[7].set(-jnp.inf)
    for dtype in (jnp.float32, jnp.bfloat16):
        given = replace(inputs, semantics=replace(inputs.semantics, bias=bias.astype(dtype)))
        results = _run(given)
        assert results["d_bias"].dtype == dtype
        assert (results["lse"][:, 7] == -np.inf).all() and (results["output"][:, 7] == 0).all()
        _assert_near_oracle(given, results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "features", [{"query_lengths", "key_lengths"}, {"segment_ids"}, {"segment_ids", "key_lengths"}]
)
@pytest.mark.parametrize("queries", [70, 300])
def test_padding_reaches_nothing(features, dtype, queries):
    case = _case(
        name=f"padding-{queries}",
        batch=3,
        queries=queries,
        keys=280,
        dtype=dtype,
        features=frozenset(features | {"sinks", "bias"}),
        soft_cap=4.0,
    )
    clean = make_inputs(case)
    poisoned = poison_padding(clean)
    assert jnp.isnan(poisoned.query).any() and jnp.isnan(poisoned.value).any()
    for implementation in (chunked_attention, attention_reference):
        assert_bitwise_equal(
            results_and_gradients(implementation, poisoned, compiler_options=QUICK),
            results_and_gradients(implementation, clean, compiler_options=QUICK),
        )


def test_not_a_number_in_a_valid_row_is_not_hidden():
    inputs = make_inputs(_case())
    query = inputs.query.at[0, 4, 0, 0].set(jnp.nan)
    results = _run(replace(inputs, query=query))
    is_affected = np.isnan(results["lse"])
    assert is_affected[0, 4, 0] and is_affected.sum() == 1
    assert np.isnan(results["output"][0, 4, 0]).all()
    assert np.isnan(results["d_query"][0, 4, 0]).all()


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 1)])
def test_axes_of_no_entries(queries, keys, batch):
    inputs = make_inputs(_case(queries=5, keys=5, features=frozenset({"bias", "sinks"})))
    bias = inputs.semantics.bias
    assert bias is not None
    semantics = replace(inputs.semantics, bias=bias[:, :queries, :keys])
    inputs = Inputs(
        query=inputs.query[:batch, :queries],
        key=inputs.key[:batch, :keys],
        value=inputs.value[:batch, :keys],
        semantics=semantics,
        d_output=inputs.d_output[:batch, :queries],
        d_lse=inputs.d_lse[:batch, :queries],
    )
    results = _run(inputs)
    assert results["output"].shape == inputs.d_output.shape
    _assert_near_oracle(inputs, results)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_output_and_lse_match_finite_differences(is_causal):
    with jax.enable_x64(True):
        random = np.random.default_rng(2)
        query, key, value = (
            jnp.asarray(random.standard_normal(shape))
            for shape in ((270, 4, 3), (300, 2, 3), (300, 2, 2))
        )
        bias = jnp.asarray(random.standard_normal((4, 1, 300)))
        sinks = jnp.asarray(random.standard_normal(4))

        def attention(query, key, value, bias, sinks):
            semantics = Semantics(
                scale=0.6, is_causal=is_causal, soft_cap=2.0, bias=bias, sinks=sinks
            )
            return chunked_attention(query, key, value, semantics)

        operands = (query, key, value, bias, sinks)
        check_grads(attention, operands, order=1, modes=("rev",), rtol=1e-6)


def test_gradient_may_be_differentiated_in_forward_mode():
    random = np.random.default_rng(6)
    query, key, value = (
        jnp.asarray(random.standard_normal((300, 1, 4)).astype(np.float32)) for _ in range(3)
    )
    semantics = Semantics(scale=0.5, is_causal=True, soft_cap=3.0)

    def hessian_product(implementation):
        def loss(query, key):
            output, lse = implementation(query, key, value, semantics)
            return jnp.sum(output**2) + jnp.sum(lse**2)

        gradient = jax.grad(loss, (0, 1))
        return jax.jit(lambda *x: jax.jvp(gradient, x, (x[1], x[0]))[1])(query, key)

    for actual, expected in zip(
        hessian_product(chunked_attention), hessian_product(attention_reference), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_before_the_second_product(dtype):
    """That is part of the contract, and compilers may drop a pair of conversions."""
    inputs = make_inputs(_case(batch=1, queries=64, keys=200, heads=1, key_heads=1, dtype=dtype))
    query, key, value = (
        np.asarray(x[0, :, 0]).astype(np.float64) for x in (inputs.query, inputs.key, inputs.value)
    )
    logits = query @ key.T * inputs.semantics.scale
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True)).astype(np.float32)
    denominator = weights.sum(axis=-1, keepdims=True)
    output = results_and_gradients(chunked_attention, inputs)["output"][0, :, 0]

    def distance(weights):
        expected = (weights.astype(np.float64) @ value / denominator).astype(output.dtype)
        return np.abs(output.astype(np.float64) - expected.astype(np.float64)).mean()

    assert distance(weights.astype(output.dtype)) < 0.1 * distance(weights)


_sides = st.none() | st.integers(0, 40)


@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    is_causal=st.booleans(),
    window=st.tuples(_sides, _sides),
    soft_cap=st.none() | st.floats(0.5, 20),
    features=st.sets(
        st.sampled_from(["bias", "mask", "query_offset", "key_lengths", "segment_ids", "sinks"])
    ),
)
def test_any_combination(lengths, heads, dims, features, **static):
    case = Case(
        name="combination",
        tags=frozenset(),
        queries=lengths[0],
        keys=lengths[1],
        heads=heads[0],
        key_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        features=frozenset(features),
        **static,
    )
    _assert_near_oracle(make_inputs(case))
