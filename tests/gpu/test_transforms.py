"""The kernels under vmap, scan and checkpoint, and gradients of the log-sum-exp alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.testing import assert_bitwise_equal

LAYERS = 5


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax_flash.attention(
        query, key, value, is_causal=True, deterministic_bwd=True, implementation="cuda"
    )


def normal(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(jnp.bfloat16)


def operands(*leading: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, *leading, 130, 4, 64),
        normal(1, *leading, 200, 2, 64),
        normal(2, *leading, 200, 2, 64),
    )


def gradients(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]
) -> dict[str, np.ndarray]:
    """Output and gradients of a function of query, key and value, compiled."""

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        output, pull_back = jax.vjp(function, *arrays)
        return output, *pull_back(jnp.cos(output))

    names = ("output", "d_query", "d_key", "d_value")
    results = zip(names, run(*arrays), strict=True)
    return {name: np.asarray(array) for name, array in results}


def test_vmap_has_the_bits_of_a_batch() -> None:
    arrays = operands(3, 2)
    expected = gradients(attention, arrays)
    assert_bitwise_equal(gradients(jax.vmap(attention), arrays), expected)
    assert_bitwise_equal(gradients(jax.vmap(jax.vmap(attention)), arrays), expected)


def test_vmap_over_an_inner_axis() -> None:
    arrays = operands(3, 2)
    over_second = jax.vmap(attention, in_axes=1, out_axes=1)
    assert_bitwise_equal(gradients(over_second, arrays), gradients(attention, arrays))


def test_vmap_with_shared_keys_has_gradients_of_each_use() -> None:
    query, (_, key, value) = operands(3)[0], operands()
    mapped = jax.vmap(attention, in_axes=(0, None, None))
    repeated = (jnp.broadcast_to(array, (3, *array.shape)) for array in (key, value))
    shared = gradients(mapped, (query, key, value))
    separate = gradients(attention, (query, *repeated))
    for name in ("output", "d_query"):
        assert_bitwise_equal({name: shared[name]}, {name: separate[name]})
    for name in ("d_key", "d_value"):
        total = separate[name].astype(np.float32).sum(axis=0)
        np.testing.assert_allclose(shared[name].astype(np.float32), total, rtol=0.02, atol=0.05)


def test_gradients_for_each_example_under_vmap_of_grad() -> None:
    arrays = operands(3)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sum(attention(query, key, value).astype(jnp.float32) ** 2)

    mapped = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(*arrays)
    for example in range(3):
        alone = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(array[example] for array in arrays))
        for left, right in zip(mapped, alone, strict=True):
            assert_bitwise_equal({"": np.asarray(left[example])}, {"": np.asarray(right)})


def test_the_log_sum_exp_alone_has_a_gradient() -> None:
    query, key, value = operands(2)

    def lse_sum(implementation: str, query: jax.Array, key: jax.Array) -> jax.Array:
        _, lse = jax_flash.attention(
            query,
            key,
            value,
            is_causal=True,
            return_residual=True,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(lse))

    def gradients_of(implementation: str) -> Any:
        function = jax.grad(lambda *arrays: lse_sum(implementation, *arrays), argnums=(0, 1))
        return jax.jit(function)(query, key)

    for ours, plain in zip(gradients_of("cuda"), gradients_of("xla"), strict=True):
        ours, plain = np.asarray(ours, np.float32), np.asarray(plain, np.float32)
        assert np.abs(plain).max() > 0.01
        np.testing.assert_allclose(ours, plain, atol=0.02 * np.abs(plain).max(), rtol=0.02)


def layers(policy: Any, *, remat: bool) -> Callable[..., jax.Array]:
    def layer(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        key = carry[:, :, :2]
        return carry + attention(carry * weight, key, key), None

    body = jax.checkpoint(layer, policy=policy) if remat else layer
    return lambda x, weights: jax.lax.scan(body, x, weights)[0]


@pytest.mark.parametrize(
    ("names", "forward_runs"),
    [(("flash_out", "flash_lse"), 1), ((), 2)],
    ids=["saved", "not saved"],
)
def test_launches_in_a_scanned_and_checkpointed_model(
    names: tuple[str, ...], forward_runs: int
) -> None:
    x, weights = normal(3, 2, 130, 4, 64), normal(4, LAYERS)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def loss(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x: jnp.sum(function(x, weights).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss(layers(policy, remat=True)))).lower(x).compile()
    text = compiled.as_text()
    assert text is not None
    # In the optimised program: what will be launched in each of the two loops.
    forward, backward = (
        text.count(f'custom_call_target="jax_flash_{direction}_v1"')
        for direction in ("forward", "backward")
    )
    assert backward > 0
    assert forward == forward_runs * backward

    plain = jax.jit(jax.grad(loss(layers(None, remat=False))))(x)
    # XLA may fuse the layers' other operations differently, so not bit for bit.
    np.testing.assert_allclose(
        np.asarray(compiled(x), np.float32), np.asarray(plain, np.float32), rtol=0.05, atol=0.25
    )


def test_the_automatic_choice_is_the_kernels() -> None:
    query, key, value = operands(2)
    explanation = jax_flash.explain(query, key, value, is_causal=True)
    assert explanation.implementation == "cuda"
    named = {"output": np.asarray(attention(query, key, value))}
    chosen = {"output": np.asarray(jax_flash.attention(query, key, value, is_causal=True))}
    assert_bitwise_equal(chosen, named)


def test_what_no_kernel_covers_runs_in_plain_jax_on_the_gpu() -> None:
    arrays = tuple(array.astype(jnp.float32) for array in operands(2))
    assert jax_flash.explain(*arrays).implementation == "xla"
    output = jax_flash.attention(*arrays)
    with jax.default_matmul_precision("float32"):
        expected = jax.nn.dot_product_attention(*arrays)
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), atol=0.01, rtol=0.01)
