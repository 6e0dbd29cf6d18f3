"""Shapes and layouts at the limits of grids, and operands that XLA stores in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.testing import assert_bitwise_equal

NAMES = ("output", "d_query", "d_key", "d_value")
Results = tuple[jax.Array, ...]


def normal(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(jnp.bfloat16)


def results_and_gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> Results:
    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax_flash.attention(
            query, key, value, is_causal=True, deterministic_bwd=True, implementation="cuda"
        )

    output, pull_back = jax.vjp(attention, query, key, value)
    return output, *pull_back(output)


def by_name(results: Results) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in zip(NAMES, results, strict=True)}


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000), (8200, 9)])
def test_more_heads_and_sequences_than_a_grid_has_rows(batch: int, heads: int) -> None:
    """A grid's y and z end at 65535; the last head of the last sequence is computed alone, too."""
    arrays = (
        normal(0, batch, 3, heads, 64),
        normal(1, batch, 5, heads, 64),
        normal(2, batch, 5, heads, 64),
    )
    function = jax.jit(results_and_gradients)
    together = by_name(function(*arrays))
    assert all(np.isfinite(array.astype(np.float32)).all() for array in together.values())
    for sequence, head in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)):
        place = slice(sequence, sequence + 1), slice(None), slice(head, head + 1)
        alone = by_name(function(*(array[place] for array in arrays)))
        assert_bitwise_equal({name: array[place] for name, array in together.items()}, alone)


def heads_first(arrays: Any) -> Results:
    return tuple(array.transpose(0, 2, 1, 3) for array in arrays)


def features_before_heads(arrays: Any) -> Results:
    return tuple(array.transpose(0, 1, 3, 2) for array in arrays)


@pytest.mark.parametrize("transpose", [heads_first, features_before_heads])
def test_operands_and_results_in_other_layouts(transpose: Callable[[Any], Results]) -> None:
    """XLA turns a transpose beside the call into a layout; kernels are promised the default one."""
    arrays = (normal(0, 2, 130, 4, 64), normal(1, 2, 200, 2, 64), normal(2, 2, 200, 2, 64))
    expected = by_name(jax.jit(results_and_gradients)(*arrays))

    @jax.jit
    def turned(*arrays: jax.Array) -> Results:
        # Each transpose is its own inverse; the additions make XLA choose the operands' layout.
        arrays = tuple(array + 0 for array in transpose(arrays))
        return tuple(array * 1 for array in transpose(results_and_gradients(*arrays)))

    results = turned(*(jnp.array(array) for array in transpose(arrays)))
    assert_bitwise_equal(by_name(transpose(results)), expected)
