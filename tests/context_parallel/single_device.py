"""Context-parallel calls beside the single-device call that they must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_flash
from jax_flash import context_parallel

Values = dict[str, jax.Array]

CONTEXT = 4
"""Devices that share a sequence."""

MODES_AND_ORDERS = [
    (mode, order) for mode in context_parallel.MODES for order in context_parallel.ORDERS
]

SEQUENCE_AXES = {
    "query": 1,
    "key": 1,
    "value": 1,
    "output": 1,
    "lse": 1,
    "query_segment_ids": 1,
    "key_value_segment_ids": 1,
}
"""Where arrays have their sequence; the leading dimension is the batch."""


def make_mesh(axis_type: AxisType = AxisType.Auto, *, tensor: int = 1) -> Mesh:
    """8 devices: data x context x tensor, CONTEXT of them along "context"."""
    names, sizes = ("data", "context"), (8 // CONTEXT, CONTEXT)
    if tensor > 1:
        names, sizes = (*names, "tensor"), (8 // CONTEXT // tensor, CONTEXT, tensor)
    devices = jax.devices("cpu")[:8]
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names), devices=devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Arrays and options of a call.

    Attributes:
        arrays: those that may be differentiated: query, key, value, perhaps sinks.
        options: the other arguments of `jax_flash.attention`, arrays among them.
        padding: masks bool of padded positions, of "query" and "key", where there is padding.
    """

    arrays: Values
    options: dict[str, Any] = field(default_factory=dict)
    padding: Values = field(default_factory=dict)

    def single(self, arrays: Values) -> Values:
        """The call on one device."""
        output, lse = jax_flash.attention(**arrays, **self.options, return_residual=True)
        return {"output": output, "lse": lse}

    def spread(self, arrays: Values, **placement: Any) -> Values:
        """The call on several devices, its arguments and results in natural order."""
        given = arrays | self.options
        zigzag = placement.get("order") == "zigzag"
        if zigzag:
            given = {
                name: context_parallel.to_zigzag(value, CONTEXT, axis=SEQUENCE_AXES[name])
                if name in SEQUENCE_AXES
                else value
                for name, value in given.items()
            }
        output, lse = context_parallel.attention(
            **given, axis_name="context", return_residual=True, **placement
        )
        results = {"output": output, "lse": lse}
        if not zigzag:
            return results
        return {
            name: context_parallel.from_zigzag(value, CONTEXT, axis=SEQUENCE_AXES[name])
            for name, value in results.items()
        }


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def make_arrays(
    *,
    batch: int = 2,
    queries: int = 32,
    keys: int = 32,
    heads: tuple[int, int] = (4, 2),
    dim: int = 8,
    dtype: Any = jnp.float32,
) -> Values:
    """Query, key and value: normal numbers, seeded."""
    return {
        "query": normal(1, batch, queries, heads[0], dim, dtype=dtype),
        "key": normal(2, batch, keys, heads[1], dim, dtype=dtype),
        "value": normal(3, batch, keys, heads[1], dim, dtype=dtype),
    }


def results_and_gradients(call: Callable[[Values], Values], problem: Problem) -> Values:
    """Results of a call, and gradients named "d_<array>", for seeded cotangents."""

    # What takes time here is to compile.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(arrays: Values) -> Values:
        results, pull_back = jax.vjp(call, arrays)
        cotangents = {
            name: normal(7 + i, *array.shape, dtype=array.dtype)
            for i, (name, array) in enumerate(sorted(results.items()))
        }
        if "query" in problem.padding:  # What comes back to padding must not matter.
            rows = problem.padding["query"]
            for name, array in cotangents.items():
                rank = rows.reshape(*rows.shape, *[1] * (array.ndim - 2))
                cotangents[name] = jnp.where(rank, jnp.nan, array)
        cotangents = {name: _as(results[name], array) for name, array in cotangents.items()}
        (gradients,) = pull_back(cotangents)
        return results | {f"d_{name}": array for name, array in gradients.items()}

    return run(problem.arrays)


def _as(result: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Gives a cotangent the sharding that the type of its result says, if any."""
    sharding = jax.typeof(result).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return cotangent
    return jax.sharding.reshard(cotangent, sharding)


def assert_close(actual: Values, expected: Values, tolerance: float = 2e-5) -> None:
    """Compares with a relative and absolute tolerance; infinities must agree, NaN is an error."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        wanted = np.asarray(array, np.float32)
        assert not np.isnan(wanted).any(), name
        np.testing.assert_allclose(
            np.asarray(actual[name], np.float32),
            wanted,
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def assert_same_bits(actual: Values, expected: Values, *names: str) -> None:
    """Compares the named arrays bit for bit."""
    for name in names:
        left, right = np.asarray(actual[name]), np.asarray(expected[name])
        assert left.dtype == right.dtype, name
        assert left.tobytes() == right.tobytes(), name
