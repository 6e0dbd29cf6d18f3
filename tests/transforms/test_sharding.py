"""Sharded arrays, by every kind of mesh axis: values, bits, and exactly which collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash

from .programs import (
    BATCH,
    BATCH_AND_HEADS,
    attention,
    collectives,
    compiled,
    expect_close,
    expect_equal,
    make_mesh,
    make_operands,
    put,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How operands are sharded.

    Attributes:
        heads: N and K.
        query: its sharding.
        key: that of key and value.
        shares_keys: whether devices share key heads, and sum gradients of them.
    """

    heads: tuple[int, int] = (8, 4)
    query: PartitionSpec = BATCH_AND_HEADS
    key: PartitionSpec = BATCH_AND_HEADS
    shares_keys: bool = False


CASES = {
    "batch": Case(query=BATCH, key=BATCH),
    "batch over both axes": Case(
        query=PartitionSpec(("data", "model")), key=PartitionSpec(("data", "model"))
    ),
    "heads": Case(query=PartitionSpec(None, None, "model"), key=PartitionSpec(None, None, "model")),
    "equal heads": Case(heads=(8, 8)),
    "grouped heads": Case(),
    "heads over both axes": Case(
        heads=(8, 8),
        query=PartitionSpec(None, None, ("model", "data")),
        key=PartitionSpec(None, None, ("model", "data")),
    ),
    "fewer key heads": Case(heads=(8, 2), key=BATCH, shares_keys=True),
    "one key head": Case(heads=(8, 1), key=BATCH, shares_keys=True),
    # Three query heads a device: they read key heads 0 0 0, 0 1 1, 1 1 2, 2 2 2.
    "uneven groups": Case(heads=(12, 3), key=BATCH, shares_keys=True),
}


def check_gradients(actual: Any, expected: Any, case: Case) -> None:
    """The bits of one device, but for gradients that devices add up in another order."""
    (results, (d_query, *d_keys)) = actual
    (expected_results, (expected_d_query, *expected_d_keys)) = expected
    expect_equal((results, d_query), (expected_results, expected_d_query))
    (expect_close if case.shares_keys else expect_equal)(d_keys, expected_d_keys)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_batch_and_heads(name: str, axis_type: AxisType) -> None:
    case = CASES[name]
    operands = make_operands(8, heads=case.heads)
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (case.query, case.key, case.key))
        actual, communication = compiled(with_gradients(attention), *sharded)
        _, forward_communication = compiled(attention, *sharded)
    check_gradients(actual, expected, case)
    assert forward_communication == {}
    assert communication == ({"all-reduce": 1} if case.shares_keys else {})
    gradients = actual[1]
    for gradient, operand in zip(gradients, sharded, strict=True):
        assert gradient.sharding.is_equivalent_to(operand.sharding, gradient.ndim)


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("name", CASES)
def test_plain_jax_follows_the_same_rules_on_explicit_axes(
    name: str, implementation: str | None
) -> None:
    case = CASES[name]
    operands = make_operands(8, heads=case.heads)
    function = partial(attention, implementation=implementation)
    expected = jax.jit(with_gradients(function))(*operands)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (case.query, case.key, case.key))
        actual, communication = compiled(with_gradients(function), *sharded)
    expect_close(actual, expected)
    assert communication == ({"all-reduce": 1} if case.shares_keys else {})


@pytest.mark.parametrize("name", ["batch", "equal heads", "grouped heads"])
def test_xla_partitions_plain_jax_on_automatic_axes(name: str) -> None:
    case = CASES[name]
    operands = make_operands(8, heads=case.heads)
    function = partial(attention, implementation="xla")
    expected = jax.jit(with_gradients(function))(*operands)
    mesh = make_mesh(AxisType.Auto)
    sharded = put(mesh, operands, (case.query, case.key, case.key))
    actual, communication = compiled(with_gradients(function), *sharded)
    expect_close(actual, expected)
    assert communication == {}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["batch over both axes", "grouped heads", "one key head"])
def test_manual_axes(name: str, check_vma: bool) -> None:
    case = CASES[name]
    operands = make_operands(8, heads=case.heads)
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(AxisType.Auto)
    by_hand = jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(case.query, case.key, case.key),
        out_specs=(case.query, case.query),
        check_vma=check_vma,
    )
    actual, communication = compiled(
        with_gradients(by_hand), *put(mesh, operands, (case.query, case.key, case.key))
    )
    check_gradients(actual, expected, case)
    assert communication == ({"all-reduce": 1} if case.shares_keys else {})


def partly_manual(axis: str, function: Callable[..., Any], check_vma: bool = True) -> Any:
    """A shard_map over one mesh axis; the other is left to the mesh's axis type."""
    spec = BATCH if axis == "data" else PartitionSpec(None, None, "model")
    return jax.shard_map(
        function,
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
        axis_names={axis},
        check_vma=check_vma,
    )


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize(
    "axis_types",
    [
        (AxisType.Auto, AxisType.Auto),
        (AxisType.Explicit, AxisType.Explicit),
        (AxisType.Auto, AxisType.Explicit),
    ],
    ids=str,
)
def test_partly_manual_axes(axis_types: tuple[AxisType, AxisType], axis: str) -> None:
    operands = make_operands(8, heads=(8, 8))
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(*axis_types)

    def elementwise(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return query + key * value, query[..., 0]

    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (BATCH_AND_HEADS,) * 3)
        actual, communication = compiled(with_gradients(partly_manual(axis, attention)), *sharded)
        # jax 0.10 gathers what enters and leaves a shard_map over some axes, whatever is inside.
        _, of_jax = compiled(with_gradients(partly_manual(axis, elementwise)), *sharded)
    expect_equal(actual, expected)
    if not of_jax:
        assert communication == {}


def test_a_mesh_is_not_needed_in_the_context() -> None:
    """Shardings of the arrays are enough, with Auto and Explicit axes, and outside of jit."""
    operands = make_operands(8)
    expected = with_gradients(attention)(*operands)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(axis_type)
        sharded = put(mesh, operands, (BATCH_AND_HEADS,) * 3)
        actual, communication = compiled(with_gradients(attention), *sharded)
        expect_equal(actual, expected)
        assert communication == {}
        expect_equal(with_gradients(attention)(*sharded), expected)


OPTIONAL = {
    "query_offset": (np.arange(8, dtype=np.int32) % 3, BATCH),
    "query_seq_lengths": (np.arange(8, dtype=np.int32) + 1, BATCH),
    "key_value_seq_lengths": (np.int32(8) - np.arange(8, dtype=np.int32) % 5, BATCH),
    "query_segment_ids": (np.arange(64, dtype=np.int32).reshape(8, 8) // 3 % 4, BATCH),
    "key_value_segment_ids": (np.arange(64, dtype=np.int32).reshape(8, 8) // 5 % 3, BATCH),
    "sinks": (np.linspace(-1, 1, 8, dtype=np.float32), PartitionSpec("model")),
}


@pytest.mark.parametrize("implementation", ["cuda", "xla"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("replicated", [True, False])
def test_arrays_beside_query_key_and_value(
    replicated: bool, axis_type: AxisType, implementation: str
) -> None:
    operands = make_operands(8)
    integers = {name: array for name, (array, _) in OPTIONAL.items() if name != "sinks"}

    def run(sinks: jax.Array, integers: Any, *operands: jax.Array) -> Any:
        arguments = {"sinks": sinks, "implementation": implementation, **integers}
        return with_gradients(lambda sinks, *x: attention(*x, **arguments | {"sinks": sinks}))(
            sinks, *operands
        )

    expected = jax.jit(run)(OPTIONAL["sinks"][0], integers, *operands)
    mesh = make_mesh(axis_type)
    whole = PartitionSpec()
    with jax.set_mesh(mesh):
        given = {
            name: put(mesh, [array], [whole if replicated else spec])[0]
            for name, (array, spec) in OPTIONAL.items()
        }
        sinks = given.pop("sinks")
        sharded = put(mesh, operands, (BATCH_AND_HEADS,) * 3)
        actual, communication = compiled(run, sinks, given, *sharded)
    expect_close(actual, expected)
    # Every batch element has a part in the gradient of sinks, which are gathered if they were.
    assert communication.pop("all-reduce") == 1
    assert set(communication) <= ({"all-gather"} if replicated else set())


@pytest.mark.parametrize(
    ("implementation", "axis_type"),
    [("xla", AxisType.Explicit), (None, AxisType.Explicit), (None, AxisType.Auto)],
    ids=["plain-explicit", "kernels-explicit", "kernels-auto"],
)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 8, 8, 8), PartitionSpec("data")),
        ((8, 8, 8, 8), PartitionSpec("data", "model")),
        ((1, 8, 8, 8), PartitionSpec(None, "model")),
        ((1, 8, 8, 8), PartitionSpec()),
        ((8, 1, 1, 8), PartitionSpec("data")),
        ((8, 8), PartitionSpec()),
    ],
    ids=str,
)
def test_bias_and_mask(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    implementation: str | None,
    axis_type: AxisType,
) -> None:
    operands = make_operands(8)
    random = np.random.default_rng(3)
    bias, mask = random.standard_normal(shape, np.float32), random.random(shape) > 0.3

    def run(bias: jax.Array, mask: jax.Array, *operands: jax.Array) -> Any:
        call = partial(attention, implementation=implementation, mask=mask)
        return with_gradients(lambda bias, *x: call(*x, bias=bias))(bias, *operands)

    expected = jax.jit(run)(bias, mask, *operands)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        sharded = put(mesh, (bias, mask, *operands), (spec, spec, *[BATCH_AND_HEADS] * 3))
        actual, communication = compiled(run, *sharded)
    expect_close(actual, expected)
    if implementation is None:
        # Elements of the bias that several devices share are summed over them. An Explicit type
        # says that the gradient of a bias with all heads on each device has all of them, too.
        summed = shape != (8, 8, 8, 8)
        gathered = (
            axis_type is AxisType.Explicit and shape[:-2][-1:] == (8,) and "model" not in spec
        )
        expected_communication = {"all-reduce": 1} if summed else {}
        assert communication == expected_communication | ({"all-gather": 1} if gathered else {})


def test_a_query_sharded_over_its_sequence_by_hand() -> None:
    """With all keys on each device, the offset says which queries a device has."""
    operands = make_operands(2, queries=16, keys=16)
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(AxisType.Auto)
    queries = PartitionSpec(None, "model")

    def part(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        first = jax.lax.axis_index("model") * query.shape[1]
        return attention(query, key, value, query_offset=first)

    by_hand = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(queries, PartitionSpec(), PartitionSpec()),
        out_specs=(queries, queries),
    )
    actual, communication = compiled(
        with_gradients(by_hand), *put(mesh, operands, (queries, PartitionSpec(), PartitionSpec()))
    )
    expect_close(actual, expected)
    assert communication == {"all-reduce": 1}


def test_an_axis_of_one_device_stays_in_the_results() -> None:
    """A mesh of size 1, as programs for many devices have it on one."""
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    operands = [jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32, sharding=sharding)] * 4

    def gradients(query: Any, key: Any, value: Any, d_output: Any) -> Any:
        output, pull_back = jax.vjp(jax_flash.attention, query, key, value)
        return output, *pull_back(d_output)

    with jax.set_mesh(mesh):
        results = jax.eval_shape(gradients, *operands)
    for result in results:
        assert result.sharding.spec[0] == "device"


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_results_may_be_wanted_otherwise(axis_type: AxisType) -> None:
    """A result is cut up after the call as its user wants it: the call is not refused for it."""
    operands = make_operands(8)
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(axis_type)
    by_queries = NamedSharding(mesh, PartitionSpec("data", "model"))

    def function(*operands: jax.Array) -> Any:
        output, lse = attention(*operands)
        if axis_type is AxisType.Explicit:
            return jax.sharding.reshard(output, by_queries), lse
        return jax.lax.with_sharding_constraint(output, by_queries), lse

    with jax.set_mesh(mesh):
        actual, _ = compiled(with_gradients(function), *put(mesh, operands, (BATCH,) * 3))
        forward, communication = compiled(function, *put(mesh, operands, (BATCH,) * 3))
    expect_equal(actual, expected)
    assert communication == {}
    assert forward[0].sharding.is_equivalent_to(by_queries, 4)


def test_each_device_calls_the_kernels_once(cpu_kernels: Any) -> None:
    operands = make_operands(8)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(axis_type)
        with jax.set_mesh(mesh):
            sharded = put(mesh, operands, (BATCH_AND_HEADS,) * 3)
            program = jax.jit(with_gradients(attention)).lower(*sharded).compile()
            assert cpu_kernels.calls_of(program, *sharded) == (8, 8)


def test_a_layer_of_a_tensor_parallel_model() -> None:
    """Projections around attention: one all-reduce forward, for the output; one more backward."""
    mesh = make_mesh(AxisType.Auto)
    width, heads, dim = 32, 8, 16
    rng = np.random.default_rng(5)
    weights = {
        name: jnp.asarray(rng.standard_normal(shape, np.float32) * 0.2, jnp.bfloat16)
        for name, shape in {
            "query": (width, heads, dim),
            "key": (width, heads // 2, dim),
            "value": (width, heads // 2, dim),
            "output": (heads, dim, width),
        }.items()
    }
    specs = {name: PartitionSpec(None, "model") for name in ("query", "key", "value")}
    specs["output"] = PartitionSpec("model")

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        projected = (
            jnp.einsum("...tc,cnd->...tnd", x, weights[name]) for name in ("query", "key", "value")
        )
        output = jax_flash.attention(*projected, is_causal=True, implementation="cuda")
        return jnp.einsum("...tnd,ndc->...tc", output, weights["output"])

    x = jnp.asarray(rng.standard_normal((8, 8, width), np.float32), jnp.bfloat16)
    expected = layer(weights, x)
    (x,) = put(mesh, [x], [BATCH])
    weights = {name: put(mesh, [w], [specs[name]])[0] for name, w in weights.items()}
    with jax.set_mesh(mesh):
        program = jax.jit(layer).lower(weights, x).compile()
    expect_close(program(weights, x), expected)
    assert collectives(program) == {"all-reduce": 1}
