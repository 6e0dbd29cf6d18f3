"""Results and gradients on this machine's CPU, against the oracle and against jax.nn."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.reference.attention import attention_reference
from jax_flash.reference.semantics import Semantics

Operands = Callable[..., dict[str, Any]]

B, T, S, N = 2, 9, 12, 4


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


# Arguments of the public function, and the same call in the oracle's terms.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "causal with an offset": (
        {"is_causal": True, "query_offset": S - T},
        {"is_causal": True, "query_offset": np.int32(S - T)},
    ),
    "causal with a negative offset": (
        {"is_causal": True, "query_offset": -4},
        {"is_causal": True, "query_offset": np.int32(-4)},
    ),
    "causal with offsets": (
        {"is_causal": True, "query_offset": np.array([3, -2])},
        {"is_causal": True, "query_offset": np.array([3, -2], np.int32)},
    ),
    "window": ({"local_window_size": (2, 1)}, {"window": (2, 1)}),
    "window of one number": ({"local_window_size": 2}, {"window": (2, 2)}),
    "window of zero": ({"local_window_size": (0, None)}, {"window": (0, None)}),
    "causal window": (
        {"is_causal": True, "local_window_size": (2, 1)},
        {"is_causal": True, "window": (2, 0)},
    ),
    "lengths": (
        {"query_seq_lengths": np.array([5, 9]), "key_value_seq_lengths": np.array([12, 0])},
        {
            "query_lengths": np.array([5, 9], np.int32),
            "key_lengths": np.array([12, 0], np.int32),
        },
    ),
    "key lengths": (
        {"key_value_seq_lengths": np.array([3, 7], np.int32)},
        {"key_lengths": np.array([3, 7], np.int32)},
    ),
    "segment ids": (
        {
            "query_segment_ids": np.array([[0, 0, 0, 1, 1, 1, 2, -1, -1]] * B),
            "key_value_segment_ids": np.array([[0, 0, 1, 1, 1, 1, 3, 3, -1, -1, -1, -1]] * B),
        },
        {
            "query_segment_ids": np.array([[0, 0, 0, 1, 1, 1, 2, -1, -1]] * B, np.int32),
            "key_segment_ids": np.array([[0, 0, 1, 1, 1, 1, 3, 3, -1, -1, -1, -1]] * B, np.int32),
        },
    ),
    "soft cap": ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
    "mask": (
        {"mask": _random(T, S) > 0},
        {"mask": _random(T, S) > 0},
    ),
    "mask of keys": (
        {"mask": _random(B, 1, 1, S) > 0},
        {"mask": _random(B, 1, 1, S) > 0},
    ),
    "bias and sinks": (
        {"bias": _random(N, 1, S), "sinks": _random(N)},
        {"bias": _random(N, 1, S), "sinks": _random(N)},
    ),
}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(
    case: str, implementation: str | None, make_operands: Operands
) -> None:
    arguments, fields = CASES[case]
    operands = make_operands((B,), queries=T, keys=S, dims=(16, 8), dtype=jnp.float32)
    floats = {name: jnp.asarray(arguments[name]) for name in ("bias", "sinks") if name in arguments}
    static = {name: value for name, value in arguments.items() if name not in floats}
    weights = _random(B, T, N, 8), _random(B, T, N)

    def total(output: jax.Array, lse: jax.Array) -> jax.Array:
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(output * weights[0]) + jnp.sum(finite * weights[1])

    def ours(differentiable: dict[str, jax.Array]) -> Any:
        output, lse = jax_flash.attention(
            **differentiable, **static, return_residual=True, implementation=implementation
        )
        return total(output, lse), (output, lse)

    def oracle(differentiable: dict[str, jax.Array]) -> Any:
        query, key, value = (differentiable[name] for name in ("query", "key", "value"))
        semantics = Semantics(
            **{"scale": 16**-0.5, **fields, **{name: differentiable[name] for name in floats}}
        )
        output, lse = attention_reference(query, key, value, semantics)
        return total(output, lse), (output, lse)

    differentiable = operands | floats
    (_, results), gradients = jax.value_and_grad(ours, has_aux=True)(differentiable)
    (_, expected), expected_gradients = jax.value_and_grad(oracle, has_aux=True)(differentiable)
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)
    for name, wanted in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], wanted, rtol=5e-5, atol=5e-5, err_msg=name)


DROP_IN: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "window": {"local_window_size": (2, 1)},
    "window of one number": {"local_window_size": 3},
    "bias and mask": {"bias": _random(1, N, T, T), "mask": _random(B, 1, T, T) > -2},
    "lengths": {
        "query_seq_lengths": np.array([9, 4], np.int32),
        "key_value_seq_lengths": np.array([8, 5], np.int32),
    },
}


@pytest.mark.parametrize("case", DROP_IN)
def test_drop_in_for_jax_nn(case: str, make_operands: Operands) -> None:
    operands = make_operands((B,), queries=T, keys=T, dtype=jnp.float32)
    ours = jax_flash.attention(*operands.values(), **DROP_IN[case])
    theirs = jax.nn.dot_product_attention(*operands.values(), **DROP_IN[case])
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_any_number_of_leading_dimensions(
    leading: tuple[int, ...], make_operands: Operands
) -> None:
    operands = make_operands(leading, dtype=jnp.float32)
    output, lse = jax_flash.attention(**operands, is_causal=True, return_residual=True)
    assert output.shape == operands["query"].shape
    assert lse.shape == output.shape[:-1]
    semantics = Semantics(scale=64**-0.5, is_causal=True)
    expected, _ = attention_reference(
        operands["query"], operands["key"], operands["value"], semantics
    )
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_of_results(dtype: Any, make_operands: Operands) -> None:
    operands = make_operands(dtype=dtype)
    output, lse = jax_flash.attention(**operands, return_residual=True)
    assert output.dtype == dtype
    assert lse.dtype == jnp.float32
    gradients = jax.grad(lambda operands: jax_flash.attention(**operands).sum())(operands)
    assert {gradient.dtype for gradient in gradients.values()} == {jnp.dtype(dtype)}


def test_integer_arguments_have_float0_cotangents(make_operands: Operands) -> None:
    operands = make_operands(dtype=jnp.float32)
    ids = jnp.zeros((2, 9), jnp.int32)

    def total(query: jax.Array, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax_flash.attention(
            query,
            operands["key"],
            operands["value"],
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            query_seq_lengths=lengths,
        ).sum()

    gradients = jax.grad(total, (0, 1, 2), allow_int=True)(
        operands["query"], ids, jnp.array([3, 9])
    )
    assert gradients[0].dtype == jnp.float32
    assert [gradient.dtype for gradient in gradients[1:]] == [jax.dtypes.float0] * 2


def test_eager_and_jit_give_the_same_bits(make_operands: Operands) -> None:
    operands = make_operands(dtype=jnp.float32)

    def call(operands: dict[str, Any]) -> jax.Array:
        return jax_flash.attention(**operands, is_causal=True)

    np.testing.assert_array_equal(call(operands), jax.jit(call)(operands))


@pytest.mark.parametrize("operand", ["query", "key", "value", "bias"])
def test_a_second_derivative_is_refused(operand: str, make_operands: Operands) -> None:
    operands = make_operands(dims=(16, 16), dtype=jnp.float32) | {"bias": jnp.ones((9, 9))}

    def gradient(x: jax.Array) -> jax.Array:
        def total(query: jax.Array) -> jax.Array:
            arguments: dict[str, Any] = operands | {operand: x} | {"query": query}
            return jnp.sum(jax_flash.attention(**arguments) ** 2)

        return jnp.sum(jax.grad(total)(x if operand == "query" else operands["query"]) ** 2)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(gradient)(operands[operand])


def test_forward_mode_is_refused(make_operands: Operands) -> None:
    operands = make_operands(dims=(16, 16), dtype=jnp.float32)

    def total(query: jax.Array) -> jax.Array:
        return jax_flash.attention(query, operands["key"], operands["value"]).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (operands["query"],), (operands["query"],))


def test_equal_calls_trace_once(make_operands: Operands) -> None:
    """Layers of one shape share a trace, so that deep models trace quickly."""
    operands = make_operands(queries=11, keys=13, dtype=jnp.float32)
    forward = jax_flash.ops.attention._forward
    jax_flash.attention(**operands)
    entries = forward._cache_size()
    for _ in range(3):
        jax_flash.attention(**operands)
    assert forward._cache_size() == entries
