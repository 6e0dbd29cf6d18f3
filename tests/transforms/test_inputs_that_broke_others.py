"""Transformations under which other attention libraries for JAX failed, by their issue numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash

from .programs import (
    attention,
    collectives,
    expect_close,
    expect_equal,
    make_mesh,
    make_operands,
    normal,
    put,
    text_of,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def output_sum(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """A loss whose cotangent, ones, does not depend on what is mapped."""
    output = jax_flash.attention(query, key, value, is_causal=True, implementation="cuda")
    return output.astype(jnp.float32).sum()


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 0, None)], ids=str)
def test_a_cotangent_that_is_not_mapped(in_axes: tuple[int | None, ...]) -> None:
    """jax-ml/jax#38495, #39451, #36702: vmap(grad) of a sum, with some operands mapped."""
    operands = [
        normal(index, *(() if axis is None else (2,)), 1, 4, 2, 8)
        for index, axis in enumerate(in_axes)
    ]
    gradient = jax.grad(output_sum, (0, 1, 2))
    actual = jax.vmap(gradient, in_axes)(*operands)
    for index in range(2):
        one = [x if axis is None else x[index] for x, axis in zip(operands, in_axes, strict=True)]
        expect_equal(tuple(g[index] for g in actual), gradient(*one))


def test_stages_of_a_pipeline() -> None:
    """TransformerEngine#2545: vmap over stages, each with segment ids and a batch of its own."""
    query, key, value = make_operands(3, 2)
    segments = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 2, 8)).astype(np.int32))

    def stage(segments: jax.Array, *operands: jax.Array) -> Any:
        ids = {"query_segment_ids": segments, "key_value_segment_ids": segments}
        return with_gradients(partial(attention, implementation=None, **ids))(*operands)

    actual = jax.jit(jax.vmap(stage, spmd_axis_name=None))(segments, query, key, value)
    for index in range(3):
        expected = stage(segments[index], query[index], key[index], value[index])
        expect_close(jax.tree.map(lambda x, index=index: x[index], actual), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_jacobian_inside_shard_map(check_vma: bool) -> None:
    """jax-ml/jax#36008, #38143, #29832: the cotangent's manual axes, under vmap in shard_map."""
    operands = make_operands(8, queries=2, keys=3, heads=(2, 1), dim=8)
    mesh = make_mesh(AxisType.Auto)
    spec = PartitionSpec(("data", "model"))

    def jacobian(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def one(query: jax.Array) -> jax.Array:
            return jax_flash.attention(query[None], key, value, implementation="cuda")[0]

        return jax.jacrev(one)(query[0])[None]

    by_hand = jax.shard_map(
        jacobian, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma
    )
    actual = jax.jit(by_hand)(*operands)
    for index in range(8):
        expected = jacobian(*(x[index : index + 1] for x in operands))
        expect_equal(actual[index], expected[0])


def test_a_scan_carry_inside_shard_map() -> None:
    """A carry that attention made varies over the mesh as its operands do."""
    operands = make_operands(8, heads=(4, 4))
    mesh = make_mesh(AxisType.Auto)
    spec = PartitionSpec("data", None, "model")

    def layers(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def one(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return attention(carry, key, value)[0], None

        return jax.lax.scan(one, query, length=2)[0]

    by_hand = jax.shard_map(layers, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    sharded = put(mesh, operands, (spec,) * 3)
    actual = jax.jit(with_gradients(by_hand))(*sharded)
    expect_equal(actual, jax.jit(with_gradients(layers))(*operands))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_sees_its_part_alone(axis_type: AxisType) -> None:
    """jax-ml/jax#32098, #38551, marin#6470: kernels that saw the global batch, after a gather."""
    operands = make_operands(8)
    mesh = make_mesh(axis_type)
    spec = PartitionSpec("data", None, "model")
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (spec,) * 3)
        program = jax.jit(with_gradients(attention)).lower(*sharded).compile()
    calls = [
        line for line in text_of(program).splitlines() if 'custom_call_target="jax_flash' in line
    ]
    assert len(calls) == 2
    # 8 batch elements over 2 devices, 8 heads over 4; forward, both heads of a key head are packed.
    for call, query in zip(calls, ("bf16[4,16,1,16]", "bf16[4,8,2,16]"), strict=True):
        assert query in call
        assert "bf16[8," not in call
    assert collectives(program) == {}


def test_gradients_with_integer_arguments() -> None:
    """nebius/kvax#3: float0 cotangents of segment ids and lengths, accumulated by two uses."""
    query, key, value = make_operands(2)
    ids = jnp.zeros((2, 8), jnp.int32)
    lengths = jnp.array([8, 5], jnp.int32)

    def loss(arrays: dict[str, jax.Array], ids: jax.Array, lengths: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for _ in range(2):
            output = jax_flash.attention(
                arrays["query"],
                arrays["key"],
                arrays["value"],
                query_segment_ids=ids,
                key_value_segment_ids=ids,
                key_value_seq_lengths=lengths,
            )
            total += output.astype(jnp.float32).sum()
        return total

    arrays = {"query": query, "key": key, "value": value}
    gradient = jax.grad(loss, argnums=(0, 1, 2), allow_int=True)
    of_arrays, of_ids, of_lengths = jax.jit(gradient)(arrays, ids, lengths)
    assert of_ids.dtype == of_lengths.dtype == jax.dtypes.float0
    expect_equal(of_arrays, jax.grad(loss)(arrays, ids, lengths))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_fewer_key_heads_than_devices_stay_where_they_are(key_heads: int) -> None:
    """maxtext#4906, torchtitan#2577: tensor parallelism wider than the key heads."""
    operands = make_operands(4, heads=(8, key_heads))
    expected = jax.jit(with_gradients(attention))(*operands)
    mesh = make_mesh(AxisType.Auto)
    specs = (PartitionSpec(None, None, ("data", "model")), PartitionSpec(), PartitionSpec())
    sharded = put(mesh, operands, specs)
    program = jax.jit(with_gradients(attention)).lower(*sharded).compile()
    actual = program(*sharded)
    expect_close(actual, expected)
    assert collectives(program) == {"all-reduce": 1}
    whole = NamedSharding(mesh, PartitionSpec())
    assert all(gradient.sharding.is_equivalent_to(whole, 4) for gradient in actual[1][1:])
