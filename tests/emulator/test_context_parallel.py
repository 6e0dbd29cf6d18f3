"""Kernels under context parallelism: offsets before the first key, rows without keys, the merge."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_flash
from jax_flash import context_parallel

pytestmark = pytest.mark.usefixtures("emulated")

NAMES = ("output", "lse", "d_query", "d_key", "d_value")
LENGTH = 128


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def results_and_gradients(attention: Any) -> dict[str, np.ndarray]:
    query, d_output = normal(1, LENGTH, 2, 64), normal(4, LENGTH, 2, 64)
    key, value = normal(2, LENGTH, 2, 64), normal(3, LENGTH, 2, 64)
    attention = partial(
        attention, return_residual=True, deterministic_bwd=True, implementation="emulate"
    )
    results, pull_back = jax.vjp(attention, query, key, value)
    gradients = pull_back((d_output, normal(5, LENGTH, 2, dtype=jnp.float32)))
    return dict(zip(NAMES, map(np.asarray, (*results, *gradients)), strict=True))


@pytest.mark.parametrize(
    ("mode", "same_bits"),
    [("all_gather", ("output", "lse", "d_query")), ("ring", ()), ("all_to_all", NAMES)],
)
def test_two_devices_have_the_results_of_one(mode: str, same_bits: tuple[str, ...]) -> None:
    # jax 0.10 cannot transpose a shard_map over Explicit axes outside of jit.
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,), devices=devices)
    zigzag = partial(context_parallel.to_zigzag, shards=2, axis=0)
    natural = partial(context_parallel.from_zigzag, shards=2, axis=0)

    def spread(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        results = context_parallel.attention(
            *map(zigzag, arrays),
            axis_name="context",
            mode=mode,
            order="zigzag",
            mesh=mesh,
            **options,
        )
        return tuple(map(natural, results))

    expected = results_and_gradients(partial(jax_flash.attention, is_causal=True))
    actual = results_and_gradients(partial(spread, is_causal=True))
    for name, array in expected.items():
        if name in same_bits:
            assert actual[name].tobytes() == array.tobytes(), name
        left, right = (x.astype(np.float32) for x in (actual[name], array))
        assert np.linalg.norm(left - right) < 4e-3 * np.linalg.norm(right), name
