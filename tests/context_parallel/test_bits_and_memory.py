"""Which bits are a single device's, what is communicated, and how memory grows."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash import context_parallel

from .single_device import (
    MODES_AND_ORDERS,
    Problem,
    assert_same_bits,
    make_arrays,
    make_mesh,
    normal,
    results_and_gradients,
)

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def long_problem(key_heads: int, dtype: Any = jnp.float32) -> Problem:
    """Chunks as long as the tiles of plain JAX, whose matrix products round by their height."""
    arrays = make_arrays(batch=1, queries=2048, keys=2048, heads=(4, key_heads), dtype=dtype)
    return Problem(arrays=arrays | {"sinks": normal(5, 4)}, options={"is_causal": True})


@pytest.mark.parametrize("order", context_parallel.ORDERS)
@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_forward_bits_of_a_single_device(dtype: Any, mode: str, order: str) -> None:
    """With chunks as long as the tiles of plain JAX, whose products round by their height."""
    arrays = make_arrays(batch=1, queries=2048, keys=2048, dtype=dtype)
    problem = Problem(arrays=arrays | {"sinks": normal(5, 4)}, options={"is_causal": True})
    spread = jax.jit(partial(problem.spread, mode=mode, order=order, mesh=make_mesh()))
    assert_same_bits(spread(arrays), jax.jit(problem.single)(arrays), "output", "lse")


@pytest.mark.parametrize(("mode", "order"), MODES_AND_ORDERS)
def test_two_runs_have_the_same_bits(mode: str, order: str) -> None:
    problem = Problem(
        arrays=make_arrays(dtype=jnp.bfloat16) | {"sinks": normal(5, 4)},
        options={"is_causal": True, "deterministic_bwd": True},
    )

    def call(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return problem.spread(arrays, mode=mode, order=order, mesh=make_mesh())

    first, second = (results_and_gradients(call, problem) for _ in range(2))
    assert_same_bits(first, second, *first)


Programs = dict[str, Any]


def compiled(mode: str, order: str, *, devices: int = 4, **options: Any) -> Programs:
    """Compiles the two passes of a call with 32 positions a device, sharded as it is used."""
    mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices("cpu")[:devices])
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    rows = jax.device_put(jnp.ones((1, 32 * devices, 8, 16)), sharding)

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context_parallel.attention(
            query, key, value, axis_name="context", mode=mode, order=order, mesh=mesh, **options
        )

    forward = jax.jit(lambda *arrays: jax.vjp(call, *arrays)).lower(rows, rows, rows).compile()
    _, pull_back = forward(rows, rows, rows)
    backward = jax.jit(lambda pull_back, d_output: pull_back(d_output)).lower(pull_back, rows)
    return {"forward": forward, "backward": backward.compile()}


def communication(program: Any) -> dict[str, int]:
    return dict(Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", program.as_text())))


@pytest.mark.parametrize(
    ("mode", "order", "forward", "backward"),
    [
        # Keys and values; again, and dK and dV of each chunk of queries go home.
        ("all_gather", "contiguous", {"all-gather": 2}, {"all-gather": 2, "all-to-all": 2}),
        ("all_gather", "zigzag", {"all-gather": 2}, {"all-gather": 2, "all-to-all": 4}),
        # Keys and values after the first step and, in a loop, after all but the last. Again, and
        # dK and dV behind them, in the loop, and home at last.
        ("ring", "contiguous", {"collective-permute": 4}, {"collective-permute": 4 + 2 + 2}),
        ("ring", "zigzag", {"collective-permute": 4}, {"collective-permute": 4 + 2 + 2}),
        # Query, key, value and output; their gradients.
        ("all_to_all", "contiguous", {"all-to-all": 4}, {"all-to-all": 4}),
        ("all_to_all", "zigzag", {"all-to-all": 4}, {"all-to-all": 4}),
    ],
)
def test_what_is_communicated(
    mode: str, order: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    programs = compiled(mode, order, is_causal=True)
    assert communication(programs["forward"]) == forward
    assert communication(programs["backward"]) == backward


def test_a_ring_stops_where_no_window_reaches() -> None:
    """33 positions back: from the part of a device, into those of the two before it, of three."""
    window = {"is_causal": True, "local_window_size": (33, None)}
    program = compiled("ring", "contiguous", **window)["forward"]
    assert communication(program) == {"collective-permute": 4}
    assert " while(" not in program.as_text()
    alone = {"is_causal": True, "local_window_size": (1, None)}
    program = compiled("ring", "contiguous", **alone)["forward"]
    assert communication(program) == {"collective-permute": 2}


def test_a_rings_memory_does_not_grow_with_the_number_of_devices() -> None:
    def bytes_of(devices: int) -> list[int]:
        programs = compiled("ring", "zigzag", devices=devices, is_causal=True)
        return [program.memory_analysis().temp_size_in_bytes for program in programs.values()]

    assert bytes_of(8) == bytes_of(4)
