"""Deterministic gradients: the same bits however, and beside whatever, they are computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.testing import (
    CASES,
    Case,
    Inputs,
    assert_bitwise_equal,
    make_inputs,
    poison_padding,
    public_attention,
)

from .contention import other_kernels_running

RUNS = int(os.environ.get("JAX_FLASH_TEST_RUNS", "1000"))
"""Of each case, beside other kernels."""

NAMES = ("d_query", "d_key", "d_value")
Gradients = tuple[jax.Array, ...]

EVERYTHING = next(case for case in CASES if case.name == "everything")
LONG = Case(
    name="long",
    tags=frozenset({"full"}),
    batch=3,
    queries=1700,
    keys=1700,
    heads=8,
    key_heads=2,
    head_dim=128,
    value_dim=128,
    is_causal=True,
)
LONG_CASES = {
    "causal": LONG,
    "full, D=64, float16": replace(
        LONG, head_dim=64, value_dim=64, is_causal=False, dtype="float16"
    ),
    "window": replace(LONG, window=(300, 0)),
    "fewer keys": replace(LONG, keys=400),
    "every feature": replace(
        LONG,
        name="long-everything",
        features=EVERYTHING.features,
        window=(500, 300),
        soft_cap=10.0,
        heads=6,
    ),
    "every feature, D=64, Dv=40": replace(
        LONG,
        name="long-everything-64",
        features=EVERYTHING.features,
        head_dim=64,
        value_dim=40,
        dtype="float16",
    ),
}
each_long_case = pytest.mark.parametrize("case", LONG_CASES.values(), ids=LONG_CASES.keys())
SHORT_CASES = {
    name: replace(case, queries=300, keys=min(case.keys, 500)) for name, case in LONG_CASES.items()
}
each_short_case = pytest.mark.parametrize("case", SHORT_CASES.values(), ids=SHORT_CASES.keys())


def gradient_function(inputs: Inputs, *, remat: bool = False) -> Callable[..., Gradients]:
    """Returns (query, key, value, d_output, d_lse) -> gradients, for what else the inputs ask."""
    attention = public_attention(implementation="cuda", deterministic_bwd=True)

    def gradients(*arrays: jax.Array) -> Gradients:
        query, key, value, *cotangents = arrays

        def results(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
            return attention(query, key, value, inputs.semantics)

        results = jax.checkpoint(results) if remat else results
        return jax.vjp(results, query, key, value)[1](tuple(cotangents))

    return gradients


def arrays_of(inputs: Inputs) -> tuple[jax.Array, ...]:
    return inputs.query, inputs.key, inputs.value, inputs.d_output, inputs.d_lse


def by_name(gradients: Gradients) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in zip(NAMES, gradients, strict=True)}


@each_long_case
def test_many_runs_beside_other_kernels(case: Case) -> None:
    inputs = poison_padding(make_inputs(case))
    arrays = arrays_of(inputs)
    gradients = gradient_function(inputs)

    @jax.jit
    def count_differences(count: jax.Array, first: Gradients, *arrays: jax.Array) -> jax.Array:
        differences = [
            jnp.sum(a.view(jnp.uint16) != b.view(jnp.uint16))
            for a, b in zip(first, gradients(*arrays), strict=True)
        ]
        return count + jnp.stack(differences)

    first = jax.jit(gradients)(*arrays)
    count = jnp.zeros(len(NAMES), jnp.int32)
    count = count_differences(count, first, *arrays).block_until_ready()
    with other_kernels_running() as launches:
        for _ in range(RUNS):
            count = count_differences(count, first, *arrays)
        count.block_until_ready()
    assert launches.count > 10
    assert dict(zip(NAMES, count.tolist(), strict=True)) == dict.fromkeys(NAMES, 0)


@each_short_case
def test_eager_jit_scan_and_remat(case: Case) -> None:
    inputs = poison_padding(make_inputs(case))
    arrays = arrays_of(inputs)
    gradients = gradient_function(inputs)
    expected = by_name(jax.jit(gradients)(*arrays))
    assert all(np.isfinite(array.astype(np.float32)).all() for array in expected.values())
    assert all((array != 0).any() for array in expected.values())
    assert_bitwise_equal(by_name(gradients(*arrays)), expected)

    @jax.jit
    def scanned(*stacks: jax.Array) -> Any:
        return jax.lax.scan(lambda _, own: (None, gradients(*own)), None, stacks)[1]

    twice = scanned(*(jnp.stack([array, array]) for array in arrays))
    for step in range(2):
        assert_bitwise_equal(by_name(tuple(array[step] for array in twice)), expected)

    recomputed = jax.jit(gradient_function(inputs, remat=True))
    assert_bitwise_equal(by_name(recomputed(*arrays)), expected)
