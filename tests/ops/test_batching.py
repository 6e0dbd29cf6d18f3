"""vmap: a mapped axis becomes a leading dimension, and what is not mapped is shared."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

Operands = Callable[..., dict[str, Any]]

M = 3  # size of the mapped axis
MAPPINGS = {
    "all": (0, 0, 0),
    "other axes": (1, -1, 2),
    "query alone": (0, None, None),
    "keys and values alone": (None, 0, 0),
    "value alone": (None, None, -1),
}


def total(query: Any, key: Any, value: Any, implementation: Any = None) -> jax.Array:
    output, lse = jax_flash.attention(
        query, key, value, is_causal=True, return_residual=True, implementation=implementation
    )
    return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(lse)


def stack(operands: dict[str, Any], axes: tuple[int | None, ...]) -> list[jax.Array]:
    """Gives each mapped operand an axis of size M, with another operand at each index."""
    stacked = []
    for operand, axis in zip(operands.values(), axes, strict=True):
        several = jnp.stack([operand, 2 * operand, operand[..., ::-1]])
        stacked.append(operand if axis is None else jnp.moveaxis(several, 0, axis))
    return stacked


def one_by_one(
    function: Callable[..., Any], operands: list[jax.Array], axes: tuple[int | None, ...]
) -> Any:
    """What vmap means."""
    results = [
        function(
            *(
                x if axis is None else jnp.take(x, index, axis=axis)
                for x, axis in zip(operands, axes, strict=True)
            )
        )
        for index in range(M)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), actual, expected
    )


# With kernels registered, the route is the one that a GPU takes; without, plain JAX is batched.
def operands_for(kernels: bool, request: pytest.FixtureRequest, make: Operands) -> dict[str, Any]:
    if kernels:
        request.getfixturevalue("all_kernels")
        return make((2,), queries=5, keys=5, dtype=jnp.bfloat16)
    return make((2,), queries=5, keys=5, dims=(16, 16), dtype=jnp.float32)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_vmap_of_values_and_gradients(
    mapping: str, kernels: bool, request: pytest.FixtureRequest, make_operands: Operands
) -> None:
    axes = MAPPINGS[mapping]
    operands = stack(operands_for(kernels, request, make_operands), axes)
    function = jax.value_and_grad(total, (0, 1, 2))
    assert_close(
        as_float32(jax.vmap(function, in_axes=axes)(*operands)),
        as_float32(one_by_one(function, operands, axes)),
    )


def as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_gradient_of_vmap_sums_over_what_is_shared(
    mapping: str, kernels: bool, request: pytest.FixtureRequest, make_operands: Operands
) -> None:
    axes = MAPPINGS[mapping]
    operands = stack(operands_for(kernels, request, make_operands), axes)

    def mapped(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(total, in_axes=axes)(*operands))

    def looped(*operands: jax.Array) -> jax.Array:
        return jnp.sum(one_by_one(total, list(operands), axes))

    tolerance = 0.05 if kernels else 3e-5  # bfloat16 gradients are summed in another order
    for actual, expected in zip(
        as_float32(jax.grad(mapped, (0, 1, 2))(*operands)),
        as_float32(jax.grad(looped, (0, 1, 2))(*operands)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", [True, False])
def test_nested_vmap(
    kernels: bool, request: pytest.FixtureRequest, make_operands: Operands
) -> None:
    query, key, value = operands_for(kernels, request, make_operands).values()
    function = jax.value_and_grad(total, (0, 1, 2))
    twice = jax.vmap(jax.vmap(function, in_axes=(0, None, None)), in_axes=(None, 0, 0))
    rows = [[function(query[j], key[i], value[i]) for j in range(2)] for i in range(2)]
    expected = jax.tree.map(
        lambda *leaves: jnp.stack(leaves).reshape(2, 2, *leaves[0].shape), *rows[0], *rows[1]
    )
    assert_close(as_float32(twice(query, key, value)), as_float32(expected))


@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.usefixtures("all_kernels")
def test_a_mapped_axis_is_a_leading_dimension_of_the_call(
    implementation: str | None,
) -> None:
    gradient = jax.grad(
        lambda *operands: total(*operands, implementation=implementation), (0, 1, 2)
    )
    mapped = jax.vmap(jax.vmap(gradient, in_axes=(1, None, None)), in_axes=(0, 0, None))
    query = jnp.zeros((2, 4, 7, 5, 4, 64), jnp.bfloat16)  # outer, batch, inner, T, N, D
    key = jnp.zeros((2, 4, 6, 2, 64), jnp.bfloat16)
    value = jnp.zeros((4, 6, 2, 64), jnp.bfloat16)
    text = jax.jit(mapped).trace(query, key, value).lower(lowering_platforms=("cuda",)).as_text()
    types = re.findall(r"custom_call @jax_flash.*? : \(([^()]*)\) -> \(([^()]*)\)", text)
    assert len(types) == 2
    for operand_types, result_types in types:
        for type_ in re.findall(r"tensor<([^>]*)>", operand_types + result_types):
            assert type_.startswith("2x7x4x")


def test_every_optional_operand_may_be_mapped(make_operands: Operands) -> None:
    operands = make_operands((), queries=5, keys=6, dims=(16, 16), dtype=jnp.float32)
    rng = np.random.default_rng(1)
    optional = {
        "bias": rng.normal(size=(M, 4, 5, 6)).astype(np.float32),
        "mask": rng.normal(size=(M, 5, 6)) > -1,
        "sinks": rng.normal(size=(M, 4)).astype(np.float32),
        "query_offset": np.array([0, 2, -1], np.int32),
        "query_seq_lengths": np.array([5, 3, 4], np.int32),
        "key_value_seq_lengths": np.array([6, 6, 2], np.int32),
        "query_segment_ids": rng.integers(0, 2, (M, 5)).astype(np.int32),
        "key_value_segment_ids": rng.integers(0, 2, (M, 6)).astype(np.int32),
    }
    floats = ("bias", "sinks")

    def gradients(optional: dict[str, Any]) -> Any:
        def loss(floats: dict[str, Any], query: jax.Array) -> jax.Array:
            arguments: dict[str, Any] = operands | optional | floats | {"query": query}
            return jnp.sum(jnp.sin(jax_flash.attention(**arguments, is_causal=True)))

        given = {name: optional[name] for name in floats}
        return jax.value_and_grad(loss, (0, 1))(given, operands["query"])

    actual = jax.vmap(gradients)(optional)
    rows = [gradients({name: x[index] for name, x in optional.items()}) for index in range(M)]
    assert_close(actual, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))


def test_vmap_over_heads_and_batch_as_equinox_does(make_operands: Operands) -> None:
    operands = make_operands((2,), heads=(4, 1), dims=(16, 16), dtype=jnp.float32)

    def single(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax_flash.attention(query[:, None], key[:, None], value[:, None])[:, 0]

    over_heads = jax.vmap(single, in_axes=(1, None, None), out_axes=1)
    actual = jax.vmap(over_heads)(
        operands["query"], operands["key"][:, :, 0], operands["value"][:, :, 0]
    )
    assert_close(actual, jax_flash.attention(**operands))
