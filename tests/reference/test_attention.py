"""The oracle against a pair-by-pair softmax, jax.nn, and finite differences."""

import itertools
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.semantics import Semantics
from tests.reference.direct_softmax import direct_attention

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 6, 4, 2, 3, 2

_random = np.random.default_rng(3)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window-left": {"window": (1, None)},
    "window-right": {"window": (None, 2)},
    "window-both": {"window": (2, 0)},
    "soft-cap": {"soft_cap": 0.7},
    "query-offset": {"query_offset": np.array([2, -3]), "window": (2, 1)},
    "query-lengths": {"query_lengths": np.array([3, 0])},
    "key-lengths": {"key_lengths": np.array([0, 4])},
    "segment-ids": {
        "query_segment_ids": np.array([[0, 0, 1, 2, -1], [-1, -2, 3, 3, 1]]),
        "key_segment_ids": np.array([[0, 1, 1, -1, -1, 0], [3, 3, -2, 1, 0, 3]]),
    },
    "bias": {"bias": _random.standard_normal((HEADS, 1, KEYS))},
    "bias-infinite": {
        "bias": np.where(_random.random((BATCH, 1, QUERIES, KEYS)) < 0.6, -np.inf, 1)
    },
    "mask": {"mask": _random.random((BATCH, 1, QUERIES, KEYS)) < 0.5},
    "sinks": {"sinks": _random.standard_normal(HEADS)},
}
PAIRS = [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2))


def _operands(dtype: Any = np.float64) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(11)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape).astype(dtype))

    return (
        normal(BATCH, QUERIES, HEADS, HEAD_DIM),
        normal(BATCH, KEYS, KEY_HEADS, HEAD_DIM),
        normal(BATCH, KEYS, KEY_HEADS, VALUE_DIM),
    )


def _semantics(*names: str) -> Semantics:
    merged: dict[str, Any] = {"scale": 0.8}
    for name in names:
        merged |= FEATURES[name]
    return Semantics(**merged)


def _oracle(query, key, value, semantics: Semantics):
    return attention_reference(query, key, value, semantics, precision_dtype=jnp.float64)


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_every_feature_and_pair_is_what_the_definition_says(names):
    semantics = _semantics(*names)
    with jax.enable_x64(True):
        output, lse = _oracle(*_operands(), jax.tree.map(jnp.asarray, semantics))
        expected_output, expected_lse = direct_attention(*_operands(), semantics)
        np.testing.assert_allclose(output, expected_output, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_each_feature_changes_the_result():
    """So that a feature which both implementations forgot would be noticed."""
    operands = _operands(np.float32)
    plain, _ = direct_attention(*operands, _semantics())
    for name in FEATURES:
        changed, _ = direct_attention(*operands, _semantics(name))
        assert np.abs(changed - plain).max() > 1e-3, name


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (2, 1)},
        {"bias": np.random.default_rng(0).standard_normal((1, HEADS, 1, KEYS)).astype(np.float32)},
        {"mask": np.tri(QUERIES, KEYS, 1, bool)[None, None]},
        {"query_seq_lengths": np.array([3, 5]), "key_value_seq_lengths": np.array([2, 6])},
    ],
    ids=lambda arguments: "+".join(arguments) or "plain",
)
def test_agrees_with_jax_nn_where_both_define_the_result(arguments: dict[str, Any]):
    query, key, value = _operands(np.float32)
    value = value[..., jnp.array([0, 1, 0])]  # jax.nn wants Dv = D.
    expected = jax.nn.dot_product_attention(query, key, value, scale=0.8, **arguments)
    names = {
        "local_window_size": "window",
        "query_seq_lengths": "query_lengths",
        "key_value_seq_lengths": "key_lengths",
    }
    given = {names.get(name, name): array for name, array in arguments.items()}
    actual, _ = attention_reference(query, key, value, Semantics(scale=0.8, **given))
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "names",
    [
        ("causal", "sinks", "soft-cap"),
        ("bias", "window-both", "key-lengths"),
        ("mask", "sinks", "query-lengths"),
        ("segment-ids", "bias"),
    ],
    ids="+".join,
)
def test_gradients_match_finite_differences(names):
    with jax.enable_x64(True):
        semantics = jax.tree.map(jnp.asarray, _semantics(*names))
        floats = dict(zip("qkv", _operands(), strict=True))
        floats |= {
            name: getattr(semantics, name)
            for name in ("bias", "sinks")
            if getattr(semantics, name) is not None
        }

        @jax.jit
        def finite_results(floats):
            given = {name: x for name, x in floats.items() if name in ("bias", "sinks")}
            output, lse = _oracle(
                floats["q"], floats["k"], floats["v"], replace(semantics, **given)
            )
            return output, jnp.where(lse == -jnp.inf, 0, lse)

        check_grads(finite_results, (floats,), order=1, modes=("fwd", "rev"), rtol=1e-6)


@pytest.mark.parametrize("name", ["query-lengths", "key-lengths", "segment-ids", "mask"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_without_keys_are_empty_and_have_no_gradient(name, with_sinks):
    names = (name, "sinks") if with_sinks else (name,)
    semantics = jax.tree.map(jnp.asarray, _semantics(*names))
    if name == "mask":
        semantics = replace(semantics, mask=semantics.mask & (jnp.arange(QUERIES) > 1)[:, None])
    operands = _operands(np.float32)

    @jax.jit
    def oracle(query, key, value):
        return attention_reference(query, key, value, semantics)

    (output, lse), pull_back = jax.vjp(oracle, *operands)
    _, expected_lse = direct_attention(*operands, semantics)
    _, lse_without_sinks = direct_attention(*operands, replace(semantics, sinks=None))
    is_empty = lse_without_sinks == -np.inf
    assert is_empty.any() and not is_empty.all()
    assert (np.asarray(output)[is_empty] == 0).all()
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-6)
    gradients = pull_back((jnp.ones_like(output), jnp.ones_like(lse)))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (np.asarray(gradients[0])[is_empty] == 0).all()


def test_any_number_of_leading_dimensions():
    semantics = jax.tree.map(jnp.asarray, _semantics("causal", "key-lengths", "bias"))
    query, key, value = _operands(np.float32)
    output, lse = attention_reference(query, key, value, semantics)
    for index in range(BATCH):
        one = replace(semantics, key_lengths=semantics.key_lengths[index])
        alone = attention_reference(query[index], key[index], value[index], one)
        np.testing.assert_allclose(alone[0], output[index], rtol=1e-6)
        np.testing.assert_allclose(alone[1], lse[index], rtol=1e-6)
    nested = replace(semantics, key_lengths=semantics.key_lengths[:, None])
    output_nested, _ = attention_reference(query[:, None], key[:, None], value[:, None], nested)
    np.testing.assert_allclose(output_nested[:, 0], output, rtol=1e-6)


def test_float64_without_64_bit_types_is_refused():
    with pytest.raises(ValueError, match=r"float64.*enable_x64"):
        _oracle(*_operands(np.float32), _semantics())


def test_every_array_field_is_tested_here():
    given = {name for feature in FEATURES.values() for name in feature}
    assert given == {field.name for field in fields(Semantics)} - {"scale"}
