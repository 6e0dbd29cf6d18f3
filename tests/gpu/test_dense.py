"""Dense biases and masks of every broadcast shape, and of more elements than 32 bits count."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.reference.chunked import chunked_attention
from jax_flash.testing import (
    Case,
    assert_bitwise_equal,
    assert_close_to_oracle,
    float64_oracle,
    make_inputs,
    public_attention,
    results_and_gradients,
)

from .test_accuracy import COMPILER_OPTIONS

B, N, T, S = 3, 4, 300, 460
CASE = Case(
    name="dense",
    tags=frozenset(),
    batch=B,
    heads=N,
    key_heads=2,
    queries=T,
    keys=S,
    head_dim=128,
    value_dim=128,
)
# Shapes of a bias and of a mask.
SHAPES = [
    ((B, N, T, S), (B, N, T, S)),
    ((N, T, S), (B, 1, 1, S)),
    ((B, 1, T, S), (T, 1)),
    ((B, 1, 1, S), (1, T, S)),
    ((N, 1, S), (B, N, 1, S)),
    ((B, N, T, 1), (B, 1, 1, 1)),
    ((1, 1), (N, 1, 1)),
]


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bfloat16"), (64, "float16")])
@pytest.mark.parametrize(("bias", "mask"), SHAPES, ids=str)
def test_shapes(bias: tuple[int, ...], mask: tuple[int, ...], head_dim: int, dtype: str) -> None:
    inputs = make_inputs(replace(CASE, head_dim=head_dim, value_dim=head_dim, dtype=dtype))
    random = np.random.default_rng(2)
    semantics = replace(
        inputs.semantics,
        bias=jnp.asarray(random.standard_normal(bias, np.float32)),
        mask=jnp.asarray(np.asarray(random.random(mask) < 0.7)),
    )
    inputs = replace(inputs, semantics=semantics)
    assert_close_to_oracle(
        results_and_gradients(public_attention(implementation="cuda"), inputs),
        oracle=float64_oracle(inputs, compiler_options=COMPILER_OPTIONS),
        ideal=results_and_gradients(chunked_attention, inputs, compiler_options=COMPILER_OPTIONS),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_bias_of_zeros_and_a_mask_of_true_change_no_bit(
    head_dim: int, value_dim: int, dtype: str
) -> None:
    """So ragged kernels give the bits of general ones."""
    features = frozenset({"key_lengths", "segment_ids"})
    case = replace(CASE, head_dim=head_dim, value_dim=value_dim, dtype=dtype, features=features)
    inputs = make_inputs(case)
    semantics = replace(
        inputs.semantics,
        bias=jnp.zeros((N, T, S), jnp.float32),
        mask=jnp.ones((B, 1, T, S), bool),
    )
    attention = public_attention(implementation="cuda", deterministic_bwd=True)
    without = results_and_gradients(attention, inputs)
    results = results_and_gradients(attention, replace(inputs, semantics=semantics))
    assert_bitwise_equal({name: results[name] for name in without}, without)


def test_more_elements_than_32_bits_count() -> None:
    """The last head's results, of a call with all heads, are those of that head alone."""
    heads, length = 33, 8192
    assert heads * length * length > 2**31
    seeds = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(seeds), shape, jnp.bfloat16)

    query, d_output = normal(length, heads, 64), normal(length, heads, 64)
    key, value = normal(length, 1, 64), normal(length, 1, 64)
    mask = jax.random.bernoulli(next(seeds), 0.7, (heads, length, length))

    @jax.jit
    def run(query: jax.Array, mask: jax.Array, bias: jax.Array, d_output: jax.Array):
        def attention(query: jax.Array, bias: jax.Array) -> jax.Array:
            return jax_flash.attention(
                query, key, value, bias, mask, deterministic_bwd=True, implementation="cuda"
            )

        output, pull_back = jax.vjp(attention, query, bias)
        return output, *pull_back(d_output)

    bias = jax.random.normal(next(seeds), (heads, length, length), jnp.float32)
    output, d_query, d_bias = run(query, mask, bias, d_output)
    whole = output[:, -1:], d_query[:, -1:], d_bias[-1:]
    alone = run(query[:, -1:], mask[-1:], bias[-1:], d_output[:, -1:])
    for got, want in zip(map(np.asarray, whole), map(np.asarray, alone), strict=True):
        assert (got == want).all()
        assert (want != 0).any()
