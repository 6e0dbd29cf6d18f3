"""What the tests of this folder share: operands, functions to transform, compiled programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_flash

JAX_VERSION = tuple(int(number) for number in jax.__version__.split(".")[:2])

Operands = tuple[jax.Array, jax.Array, jax.Array]

BATCH = PartitionSpec("data")
BATCH_AND_HEADS = PartitionSpec("data", None, "model")

_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal numbers."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


def make_operands(
    *leading: int, queries: int = 8, keys: int = 8, heads: tuple[int, int] = (8, 4), dim: int = 16
) -> Operands:
    """Query, key and value."""
    key_shape = (*leading, keys, heads[1], dim)
    return (
        normal(0, *leading, queries, heads[0], dim),
        normal(1, *key_shape),
        normal(2, *key_shape),
    )


def attention(*operands: jax.Array, **arguments: Any) -> tuple[jax.Array, jax.Array]:
    """Causal attention by kernels, with the log-sum-exp."""
    settings = {"is_causal": True, "implementation": "cuda"} | arguments
    return jax_flash.attention(*operands, **settings, return_residual=True)


def with_gradients(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Returns a function for results and gradients, with cotangents that need no communication."""

    def run(*operands: Any) -> tuple[Any, Any]:
        results, pull_back = jax.vjp(function, *operands)
        return results, pull_back(jax.tree.map(jnp.cos, results))

    return run


def make_mesh(*axis_types: AxisType) -> Mesh:
    """Two by four simulated devices; one axis type for both axes, or one for each."""
    types = axis_types if len(axis_types) == 2 else axis_types * 2
    devices = jax.devices("cpu")[:8]
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=types, devices=devices)


def put(mesh: Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[jax.Array]:
    """Shards arrays."""
    return [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


def compiled(function: Callable[..., Any], *operands: Any) -> tuple[Any, dict[str, int]]:
    """Runs a function jitted; gives its results, and how many collectives of each kind it has."""
    program = jax.jit(function).lower(*operands).compile()
    return program(*operands), collectives(program)


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """Counts the collectives of a compiled program."""
    return dict(Counter(re.findall(rf" ({_COLLECTIVES})(?:-start)?\(", text_of(program))))


def text_of(program: jax.stages.Compiled) -> str:
    """The text of a compiled program."""
    text = program.as_text()
    assert text is not None
    return text


def expect_equal(actual: Any, expected: Any) -> None:
    """All bits equal."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_wide(a), _wide(b)), actual, expected)


def expect_close(actual: Any, expected: Any, tolerance: float = 0.04) -> None:
    """Equal but for the rounding of bfloat16."""
    compare = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(lambda a, b: compare(_wide(a), _wide(b)), actual, expected)


def _wide(array: jax.Array) -> np.ndarray:
    return np.asarray(jnp.asarray(array).astype(jnp.float32))
