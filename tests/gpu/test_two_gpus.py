"""Data and head sharding over two GPUs: the bits of one, without communication.

`pytest -m gpu` includes them where JAX sees at least two devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpus

NAMES = ("output", "lse", "d_query", "d_key", "d_value")
SPECS = {
    "data": PartitionSpec("device"),
    "heads": PartitionSpec(None, None, "device"),
}
_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


@pytest.fixture(autouse=True)
def two_gpus() -> list[Any]:
    """The devices under test."""
    return jax.devices()[:2]


def operands(*, heads: int = 8, key_heads: int = 4, length: int = 515) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(4, length, n, 128) for n in (heads, key_heads, key_heads)]
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    return [jnp.asarray(array, jnp.bfloat16) for array in arrays]


def gradients(*operands: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
    """Results and gradients, by deterministic kernels, without communication of its own."""
    attention = partial(
        jax_flash.attention,
        is_causal=True,
        deterministic_bwd=True,
        return_residual=True,
        implementation="cuda",
        **arguments,
    )
    results, pull_back = jax.vjp(attention, *operands)
    return *results, *pull_back(jax.tree.map(jnp.cos, results))


def named(results: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in zip(NAMES, results, strict=True)}


def on_mesh(
    devices: list[Any], kind: str, arrays: list[jax.Array], specs: list[PartitionSpec]
) -> tuple[tuple[jax.Array, ...], list[str]]:
    """Runs `gradients` sharded; gives its results and the names of its collectives."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("device",), axis_types=(axis_type,), devices=devices)
    function: Callable[..., Any] = gradients
    with jax.set_mesh(mesh):
        if kind == "manual":
            function = jax.shard_map(
                gradients, in_specs=tuple(specs), out_specs=(specs[0], specs[0], *specs)
            )
        sharded = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in zip(arrays, specs, strict=True)
        ]
        program = jax.jit(function).lower(*sharded).compile()
        text = program.as_text()
        assert text is not None
        return program(*sharded), re.findall(rf" ({_COLLECTIVES})(?:-start)?\(", text)


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("axis", SPECS)
def test_the_bits_of_one_gpu(axis: str, kind: str, two_gpus: list[Any]) -> None:
    arrays = operands()
    expected = named(jax.jit(gradients)(*arrays))
    results, collectives = on_mesh(two_gpus, kind, arrays, [SPECS[axis]] * 3)
    assert_bitwise_equal(named(results), expected)
    assert collectives == []
    assert all(len(array.addressable_shards) == 2 for array in results)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_one_key_head_for_two_gpus(kind: str, two_gpus: list[Any]) -> None:
    """The devices share the key head: its gradient alone is summed over them."""
    arrays = operands(key_heads=1)
    expected = named(jax.jit(gradients)(*arrays))
    specs = [SPECS["heads"], PartitionSpec(), PartitionSpec()]
    results, collectives = on_mesh(two_gpus, kind, arrays, specs)
    actual = named(results)
    own = ("output", "lse", "d_query")
    assert_bitwise_equal({n: actual[n] for n in own}, {n: expected[n] for n in own})
    for name in ("d_key", "d_value"):
        ours, one_device = (x[name].astype(np.float32) for x in (actual, expected))
        np.testing.assert_allclose(ours, one_device, rtol=0.02, atol=0.02 * np.abs(ours).max())
    assert set(collectives) == {"all-reduce"}


def test_two_gpus_at_once_in_one_process(two_gpus: list[Any]) -> None:
    """The same program on each device, without waiting for one another."""
    arrays = operands()
    function = jax.jit(gradients)
    expected = named(function(*arrays))
    runs = [
        function(*(jax.device_put(array, device) for array in arrays))
        for _ in range(5)
        for device in two_gpus
    ]
    for run in runs:
        assert_bitwise_equal(named(run), expected)
