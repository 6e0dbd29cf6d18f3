"""vmap of calls of kernels: one call with a leading dimension more, and the values of a loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_flash

from .programs import (
    JAX_VERSION,
    attention,
    collectives,
    expect_close,
    expect_equal,
    make_mesh,
    make_operands,
    put,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

M = 3  # size of the mapped axis
SMALL = {"queries": 5, "keys": 6, "heads": (4, 2)}

Axes = tuple[int | None, ...]


def stacked(operands: tuple[jax.Array, ...], axes: Axes) -> list[jax.Array]:
    """Gives each mapped operand an axis of size M, with another operand at each index."""
    several = (jnp.stack([x, -x, x[..., ::-1]]) for x in operands)
    return [
        one if axis is None else jnp.moveaxis(many, 0, axis)
        for one, many, axis in zip(operands, several, axes, strict=True)
    ]


def looped(function: Callable[..., Any], in_axes: Axes) -> Callable[..., Any]:
    """What vmap means."""

    def run(*operands: Any) -> Any:
        rows = [
            function(
                *(
                    x if axis is None else jnp.take(x, index, axis=axis)
                    for x, axis in zip(operands, in_axes, strict=True)
                )
            )
            for index in range(M)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    return run


MAPPINGS = [
    (0, 0, 0),
    (1, -1, 2),
    (0, None, None),
    (None, 0, 0),
    (None, 0, None),
    (None, None, 1),
    (2, None, 0),
]


@pytest.mark.parametrize("in_axes", MAPPINGS, ids=str)
def test_values_and_gradients_of_each_example(in_axes: Axes, cpu_kernels: Any) -> None:
    """An inner batch above one, and gradients of operands that are not mapped, for each example."""
    operands = stacked(make_operands(2, **SMALL), in_axes)
    function = with_gradients(attention)
    mapped = jax.jit(jax.vmap(function, in_axes))
    expect_equal(mapped(*operands), looped(jax.jit(function), in_axes)(*operands))
    assert cpu_kernels.calls_of(mapped, *operands) == (1, 1)


@pytest.mark.parametrize("in_axes", MAPPINGS, ids=str)
def test_gradients_of_a_mapped_function(in_axes: Axes, cpu_kernels: Any) -> None:
    operands = stacked(make_operands(2, **SMALL), in_axes)
    mapped = jax.jit(with_gradients(jax.vmap(attention, in_axes)))
    expect_close(mapped(*operands), with_gradients(looped(attention, in_axes))(*operands))
    assert cpu_kernels.calls_of(mapped, *operands) == (1, 1)


def test_nested_maps_of_different_operands(cpu_kernels: Any) -> None:
    query, key, value = make_operands(M, **SMALL)
    function = with_gradients(attention)
    inner = partial(jax.vmap, in_axes=(0, None, None))
    outer = partial(jax.vmap, in_axes=(None, 0, 0))
    twice = jax.jit(outer(inner(function)))
    loops = looped(looped(function, (0, None, None)), (None, 0, 0))
    expect_equal(twice(query, key, value), loops(query, key, value))
    assert cpu_kernels.calls_of(twice, query, key, value) == (1, 1)


def test_a_map_inside_a_gradient_inside_a_map() -> None:
    """grad over an inner vmap, itself mapped: sums over the inner axis alone."""
    query, key, value = make_operands(M, 2, **SMALL)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        output, lse = jax.vmap(attention, (0, None, None))(query, key, value)
        return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(lse)

    gradient = jax.grad(loss, (0, 1, 2))
    in_axes = (0, 0, 0)
    actual = jax.jit(jax.vmap(gradient, in_axes))(query, key[:, 0], value[:, 0])
    expect_close(actual, looped(gradient, in_axes)(query, key[:, 0], value[:, 0]))


OPTIONAL = {
    "query_offset": np.array([0, 2, -1], np.int32),
    "query_seq_lengths": np.array([5, 3, 4], np.int32),
    "key_value_seq_lengths": np.array([6, 6, 2], np.int32),
    "sinks": np.random.default_rng(4).standard_normal((M, 4), np.float32),
    "segments": np.random.default_rng(5).integers(0, 2, (M, 11)).astype(np.int32),
    "bias": np.random.default_rng(6).standard_normal((M, 4, 5, 6), np.float32),
    "mask": np.random.default_rng(7).random((M, 5, 6)) > 0.2,
}


def arguments_of(optional: dict[str, Any]) -> dict[str, Any]:
    optional = dict(optional)
    segments = optional.pop("segments", None)
    if segments is None:
        return optional
    return optional | {
        "query_segment_ids": segments[..., :5],
        "key_value_segment_ids": segments[..., 5:],
    }


@pytest.mark.parametrize("mapped_too", [True, False])
@pytest.mark.parametrize("name", OPTIONAL)
def test_every_optional_array(name: str, mapped_too: bool) -> None:
    """Mapped alone, and with the query: the values and gradients of a loop."""
    query, key, value = make_operands(**SMALL)
    queries = stacked((query,), (0,))[0] if mapped_too else query

    def run(array: jax.Array, query: jax.Array) -> Any:
        def call(query: jax.Array, key: jax.Array, floats: dict[str, jax.Array]) -> Any:
            optional = arguments_of({name: array} | floats)
            return attention(query, key, value, implementation=None, **optional)

        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return with_gradients(call)(query, key, {name: array} if is_float else {})

    in_axes = (0, 0 if mapped_too else None)
    actual = jax.jit(jax.vmap(run, in_axes))(OPTIONAL[name], queries)
    expect_close(actual, looped(run, in_axes)(OPTIONAL[name], queries))


def test_all_optional_arrays_that_kernels_take(cpu_kernels: Any) -> None:
    arrays = {name: array for name, array in OPTIONAL.items() if name != "segments"}
    query, key, value = make_operands(M, **SMALL)

    def run(arrays: dict[str, Any], query: jax.Array) -> Any:
        def call(query: jax.Array, sinks: jax.Array, bias: jax.Array) -> Any:
            optional = arrays | {"sinks": sinks, "bias": bias}
            return attention(query, key[0], value[0], **optional)

        return with_gradients(call)(query, arrays["sinks"], arrays["bias"])

    mapped = jax.jit(jax.vmap(run))
    rows = [run({name: x[index] for name, x in arrays.items()}, query[index]) for index in range(M)]
    expect_close(mapped(arrays, query), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    assert cpu_kernels.calls_of(mapped, arrays, query) == (1, 1)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_jacobians(argument: int, cpu_kernels: Any) -> None:
    """A jacobian is a vmap of the pull-back: one forward and one backward call."""
    operands = make_operands(queries=3, keys=4, heads=(2, 1), dim=8)

    def output(*operands: jax.Array, implementation: str) -> jax.Array:
        return attention(*operands, implementation=implementation)[0]

    jacobian = {
        name: jax.jit(jax.jacrev(partial(output, implementation=name), argument))
        for name in ("cuda", "xla")
    }
    expect_close(jacobian["cuda"](*operands), jacobian["xla"](*operands))
    assert cpu_kernels.calls_of(jacobian["cuda"], *operands) == (1, 1)


@pytest.mark.parametrize("key_axis", [None, 1])
def test_single_heads_as_equinox_maps_them(key_axis: int | None, cpu_kernels: Any) -> None:
    """Attention of one head without a batch, mapped over heads and then over the batch."""
    query, key, value = make_operands(2, heads=(4, 4))
    if key_axis is None:
        key, value = key[:, :, 0], value[:, :, 0]

    def single(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        heads = (x[:, None] for x in (query, key, value))
        return jax_flash.attention(*heads, is_causal=True, implementation="cuda")[:, 0]

    over_heads = jax.vmap(single, in_axes=(1, key_axis, key_axis), out_axes=1)
    mapped = jax.jit(with_gradients(jax.vmap(over_heads)))

    def whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if key_axis is None:
            key, value = key[:, :, None], value[:, :, None]
        return attention(query, key, value)[0]

    expect_close(mapped(query, key, value), jax.jit(with_gradients(whole))(query, key, value))
    assert cpu_kernels.calls_of(mapped, query, key, value) == (1, 1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None)], ids=str)
def test_mapped_and_sharded(in_axes: Axes, axis_type: AxisType) -> None:
    """The mapped axis stays whole, the others are sharded: no communication for the map."""
    inner = PartitionSpec("data", None, "model")
    operands = stacked(make_operands(4), in_axes)
    specs = [inner if axis is None else PartitionSpec(None, *inner) for axis in in_axes]
    function = jax.vmap(with_gradients(attention), in_axes)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, specs)
        program = jax.jit(function).lower(*sharded).compile()
        expect_equal(program(*sharded), jax.jit(function)(*operands))
    assert collectives(program) == {}


@pytest.mark.parametrize("implementation", ["cuda", None])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None)], ids=str)
def test_mapped_over_a_sharded_axis(
    in_axes: Axes, axis_type: AxisType, implementation: str | None
) -> None:
    """Each device has its part of the mapped axis; shared keys get gradients summed over it."""
    heads = PartitionSpec(None, None, "model")
    operands = stacked(make_operands(2), in_axes)
    operands = [
        x if axis is None else jnp.concatenate([x, x])[:4]
        for x, axis in zip(operands, in_axes, strict=True)
    ]
    specs = [heads if axis is None else PartitionSpec("data", *heads) for axis in in_axes]
    call = partial(attention, implementation=implementation)
    function = with_gradients(jax.vmap(call, in_axes))
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, specs)
        program = jax.jit(function).lower(*sharded).compile()
        expect_close(program(*sharded), jax.jit(function)(*operands))

    communication = collectives(program)
    # jax 0.10 gathers what enters a shard_map over some axes; with Explicit ones, ours is inside.
    if axis_type is AxisType.Auto or JAX_VERSION >= (0, 11):
        assert communication == ({} if in_axes == (0, 0, 0) else {"all-reduce": 1})
