"""All GPUs of the machine together give one GPU's results (one GPU alone: an axis of size 1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import context_parallel
from jax_flash.testing import assert_bitwise_equal

LENGTH = 4096
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (700, 0)},
}
each_mask = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
NAMES = ("output", "lse", "d_query", "d_key", "d_value")


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("gpu",), axis_types=(AxisType.Explicit,))


def normal(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(jnp.bfloat16)


def operands(key_heads: int = 8) -> list[jax.Array]:
    """Query, key, value and the cotangents of output and log-sum-exp."""
    batch = len(jax.devices())
    rows = (batch, LENGTH, 16, 128)
    keys = (batch, LENGTH, key_heads, 128)
    d_lse = normal(4, *rows[:3]).astype(jnp.float32)
    return [normal(0, *rows), normal(1, *keys), normal(2, *keys), normal(3, *rows), d_lse]


def run(attention: Any, arrays: list[jax.Array], spec: PartitionSpec | None = None) -> Any:
    """Results and gradients; with a spec, of arrays that are sharded like that over all GPUs."""
    attention = partial(
        attention, deterministic_bwd=True, return_residual=True, implementation="cuda"
    )

    @jax.jit
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results, pull_back = jax.vjp(attention, *arrays[:3])
        return *results, *pull_back(arrays[3:])

    if spec is None:
        return call(*arrays)
    mesh = make_mesh()
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*tuple(spec)[: array.ndim])))
        for array in arrays
    ]
    with jax.set_mesh(mesh):
        return call(*placed)


def on_host(arrays: Any, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """By name, in natural order."""
    named = {name: np.asarray(array) for name, array in zip(NAMES, arrays, strict=True)}
    if order is None:
        return named
    return {name: array[:, np.argsort(order)] for name, array in named.items()}


def spread(mode: str, arrays: list[jax.Array], **options: Any) -> dict[str, np.ndarray]:
    order = context_parallel.zigzag_order(LENGTH, len(jax.devices()))
    attention = partial(
        context_parallel.attention, axis_name="gpu", mode=mode, order="zigzag", **options
    )
    zigzag = [array[:, order] for array in arrays]
    return on_host(run(attention, zigzag, PartitionSpec(None, "gpu")), order)


def assert_near(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Within what rounding the parts of a sum to bfloat16 does, in the norm of each array."""
    for name, array in expected.items():
        wanted = array.astype(np.float32)
        error = np.linalg.norm(actual[name].astype(np.float32) - wanted) / np.linalg.norm(wanted)
        assert error < 4e-3, (name, error)


@each_mask
@pytest.mark.parametrize(
    "spec", [PartitionSpec("gpu"), PartitionSpec(None, None, "gpu")], ids=["data", "heads"]
)
def test_batch_and_heads_have_one_gpus_bits(spec: PartitionSpec, options: Any) -> None:
    attention = partial(jax_flash.attention, **options)
    expected = on_host(run(attention, operands()))
    assert_bitwise_equal(on_host(run(attention, operands(), spec)), expected)


@each_mask
def test_all_gather_has_one_gpus_forward_bits(options: Any) -> None:
    expected = on_host(run(partial(jax_flash.attention, **options), operands()))
    actual = spread("all_gather", operands(), **options)
    for name in ("output", "lse"):
        assert_bitwise_equal({name: actual[name]}, {name: expected[name]})
    assert_near(actual, expected)


@each_mask
def test_ring(options: Any) -> None:
    expected = on_host(run(partial(jax_flash.attention, **options), operands()))
    assert_near(spread("ring", operands(), **options), expected)


@each_mask
def test_all_to_all_has_one_gpus_bits(options: Any) -> None:
    expected = on_host(run(partial(jax_flash.attention, **options), operands()))
    assert_bitwise_equal(spread("all_to_all", operands(), **options), expected)


def test_all_to_all_with_one_key_head() -> None:
    expected = on_host(run(partial(jax_flash.attention, is_causal=True), operands(1)))
    actual = spread("all_to_all", operands(1), is_causal=True)
    for name in ("output", "lse", "d_query"):
        assert_bitwise_equal({name: actual[name]}, {name: expected[name]})
    assert_near(actual, expected)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_two_runs_have_the_same_bits(mode: str) -> None:
    first, second = (spread(mode, operands(), is_causal=True) for _ in range(2))
    assert_bitwise_equal(second, first)
