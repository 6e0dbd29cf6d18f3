"""`implementation="emulate"`: kernels on the emulator, under jit, vmap and grad."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.ops import registration
from jax_flash.ops.registration import Registration


def _inputs(queries: int = 70, keys: int = 90, heads: int = 2) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(3)
    shapes = ((queries, heads, 64), (keys, 1, 64), (keys, 1, 64))
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)


def _loss(implementation: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output, lse = jax_flash.attention(
        query,
        key,
        value,
        is_causal=True,
        query_offset=20,
        return_residual=True,
        implementation=implementation,
    )
    weights = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
    return (output.astype(jnp.float32) * weights).sum() + lse.sum()


def test_results_and_gradients_are_those_of_plain_jax(emulated: Registration) -> None:
    def both(implementation: str):
        run = jax.value_and_grad(_loss, argnums=(1, 2, 3))
        return jax.jit(run, static_argnums=0)(implementation, *_inputs())

    (loss, gradients), (expected_loss, expected) = both("emulate"), both("xla")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    for gradient, want in zip(gradients, expected, strict=True):
        gradient, want = (np.asarray(x, np.float64) for x in (gradient, want))
        assert np.abs(gradient - want).max() <= 2.0**-6 * np.abs(want).max()


def test_it_can_be_mapped(emulated: Registration) -> None:
    query, key, value = _inputs(queries=40, keys=40)
    queries = jnp.stack([query, query[::-1]])
    run = jax.vmap(lambda q: jax_flash.attention(q, key, value, implementation="emulate"))
    for index in range(2):
        alone = jax_flash.attention(queries[index], key, value, implementation="emulate")
        assert np.array_equal(np.asarray(run(queries)[index]), np.asarray(alone))


def test_explain_tells(emulated: Registration) -> None:
    told = jax_flash.explain(*_inputs(), implementation="emulate")
    assert told.elsewhere == told.on_cuda == "emulate"
    assert "emulated sm_90a device" in str(told) and "forward kernel" in str(told)
    refused = jax_flash.explain(*_inputs(), implementation="emulate", scale=-1.0)
    assert refused.elsewhere == "error"


def test_what_cannot_be_emulated_is_refused(emulated: Registration, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match='"emulate" cannot run this call: scale='):
        jax_flash.attention(*_inputs(), implementation="emulate", scale=-1.0)
    huge = [jax.ShapeDtypeStruct((1 << 13, 1, 64), jnp.bfloat16)] * 3
    with pytest.raises(ValueError, match="can be emulated"):
        jax.eval_shape(lambda *x: jax_flash.attention(*x, implementation="emulate"), *huge)
    registration.REGISTRATION = Registration(directory=tmp_path, kernels=emulated.kernels)
    with pytest.raises(RuntimeError, match="emulator runs PTX"):
        jax_flash.attention(*_inputs(), implementation="emulate")
