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

Arrays = dict[str, jax.Array]

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
    "D=192, Dv=128": replace(LONG, head_dim=192),
    "full, D=256, grouped": replace(
        LONG, head_dim=256, value_dim=256, is_causal=False, heads=4, key_heads=2
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


def gradient_function(inputs: Inputs, *, remat: bool = False) -> Callable[[Arrays], Arrays]:
    """Returns `arrays_of(inputs)` -> gradients, for what else the inputs ask."""
    attention = public_attention(implementation="cuda", deterministic_bwd=True)

    def gradients(arrays: Arrays) -> Arrays:
        operands = {name: array for name, array in arrays.items() if not name.startswith("d_")}

        def results(operands: Arrays) -> Any:
            given = {name: operands[name] for name in ("bias", "sinks") if name in operands}
            semantics = replace(inputs.semantics, **given)
            return attention(operands["query"], operands["key"], operands["value"], semantics)

        results = jax.checkpoint(results) if remat else results
        _, pull_back = jax.vjp(results, operands)
        (own,) = pull_back((arrays["d_output"], arrays["d_lse"]))
        return {f"d_{name}": gradient for name, gradient in own.items()}

    return gradients


def arrays_of(inputs: Inputs) -> Arrays:
    """The operands that have gradients, and the cotangents, whose names begin with d_."""
    names = ("query", "key", "value", "d_output", "d_lse")
    given = {name: getattr(inputs.semantics, name) for name in ("bias", "sinks")}
    present = {name: array for name, array in given.items() if array is not None}
    return {name: getattr(inputs, name) for name in names} | present


def on_host(gradients: Arrays) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in gradients.items()}


def different_bits(left: jax.Array, right: jax.Array) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * left.dtype.itemsize}")
    return jnp.sum(left.view(bits) != right.view(bits))


@each_long_case
def test_many_runs_beside_other_kernels(case: Case) -> None:
    inputs = poison_padding(make_inputs(case))
    arrays = arrays_of(inputs)
    gradients = gradient_function(inputs)

    @jax.jit
    def count_differences(count: Arrays, first: Arrays, arrays: Arrays) -> Arrays:
        own = gradients(arrays)
        return {name: count[name] + different_bits(own[name], first[name]) for name in own}

    first = jax.jit(gradients)(arrays)
    count = {name: jnp.zeros((), jnp.int32) for name in first}
    count = jax.block_until_ready(count_differences(count, first, arrays))
    with other_kernels_running() as launches:
        for _ in range(RUNS):
            count = count_differences(count, first, arrays)
        jax.block_until_ready(count)
    assert launches.count > 10
    assert {name: int(number) for name, number in count.items()} == dict.fromkeys(first, 0)


@each_short_case
def test_eager_jit_scan_and_remat(case: Case) -> None:
    inputs = poison_padding(make_inputs(case))
    arrays = arrays_of(inputs)
    gradients = gradient_function(inputs)
    expected = on_host(jax.jit(gradients)(arrays))
    assert all(np.isfinite(array.astype(np.float32)).all() for array in expected.values())
    assert all((array != 0).any() for array in expected.values())
    assert_bitwise_equal(on_host(gradients(arrays)), expected)

    @jax.jit
    def scanned(stacks: Arrays) -> Arrays:
        return jax.lax.scan(lambda _, own: (None, gradients(own)), None, stacks)[1]

    twice = scanned({name: jnp.stack([array, array]) for name, array in arrays.items()})
    for step in range(2):
        assert_bitwise_equal({name: np.asarray(a[step]) for name, a in twice.items()}, expected)

    recomputed = jax.jit(gradient_function(inputs, remat=True))
    assert_bitwise_equal(on_host(recomputed(arrays)), expected)
