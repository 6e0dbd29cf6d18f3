"""jax.export: programs that run elsewhere, with sizes or devices that come later."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding

import jax_flash
from jax_flash.spec.support import variants_to_build

from .conftest import TARGETS
from .programs import (
    BATCH_AND_HEADS,
    attention,
    collectives,
    expect_close,
    expect_equal,
    make_mesh,
    make_operands,
    normal,
    put,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def exported(
    function: Callable[..., Any], *operands: Any, platforms: tuple[str, ...] = ("cpu",)
) -> export.Exported:
    """Exports a function, and reads back what was written."""
    program = export.export(
        jax.jit(function), platforms=platforms, disabled_checks=jax_flash.export_checks()
    )(*operands)
    return export.deserialize(program.serialize())


def shapes(text: str, heads: int = 2, dim: int = 16) -> list[jax.ShapeDtypeStruct]:
    """Query, key and value of symbolic sizes "b, t, s" or numbers."""
    batch, queries, keys = text.split()
    scope = export.SymbolicScope()
    query, key = (
        export.symbolic_shape(f"{batch}, {length}, {heads}, {dim}", scope=scope)
        for length in (queries, keys)
    )
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, key)]


def test_without_the_checks_jax_refuses() -> None:
    with pytest.raises(ValueError, match="jax_flash_forward_v1"):
        export.export(jax.jit(attention))(*make_operands(2))


def test_the_checks_name_every_target() -> None:
    from jax_flash.ops.exporting import FFI_TARGETS

    assert FFI_TARGETS == TARGETS
    assert len(jax_flash.export_checks()) == len(TARGETS)


def test_a_program_for_one_device() -> None:
    operands = make_operands(2)
    function = with_gradients(attention)
    program = exported(function, *operands)
    expect_equal(jax.jit(program.call)(*operands), jax.jit(function)(*operands))


@pytest.mark.parametrize("sizes", ["2 8 8", "b 8 8", "b t s"])
def test_a_program_for_cuda_made_without_one(sizes: str) -> None:
    program = exported(with_gradients(attention), *shapes(sizes), platforms=("cuda",))
    assert program.platforms == ("cuda",)
    text = program.mlir_module()
    for target in ("jax_flash_forward_v1", "jax_flash_backward_v1"):
        assert len(re.findall(f"custom_call @{target}", text)) == 1
    names = {kernel.name for kernel in variants_to_build()}
    named = re.findall(r'kernels = "([^"]*)"', text)
    assert len(named) == 2
    assert {name for kernels in named for name in kernels.split(",")} <= names


@pytest.mark.parametrize("implementation", ["cuda", "xla", None])
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids=str)
def test_symbolic_sizes(implementation: str | None, platforms: tuple[str, ...]) -> None:
    """Lengths below, at and above the tiles of plain JAX, from one program."""
    function = with_gradients(partial(attention, implementation=implementation))
    program = exported(function, *shapes("b t s"), platforms=platforms)
    for batch, queries, keys in ((1, 3, 5), (2, 256, 257), (1, 300, 2)):
        operands = make_operands(batch, queries=queries, keys=keys, heads=(2, 2))
        plain = with_gradients(partial(attention, implementation="xla"))
        expect_close(program.call(*operands), jax.jit(plain)(*operands))


@pytest.mark.parametrize("implementation", ["xla", None])
def test_symbolic_sizes_with_every_argument(implementation: str | None) -> None:
    def function(query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> Any:
        bias, lengths, query_ids, key_ids = rest
        return attention(
            query,
            key,
            value,
            bias=bias,
            local_window_size=(3, None),
            query_offset=lengths - 1,
            key_value_seq_lengths=lengths,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            logits_soft_cap=9.0,
            implementation=implementation,
        )

    scope = export.SymbolicScope()
    of = partial(export.symbolic_shape, scope=scope)
    struct = jax.ShapeDtypeStruct
    program = exported(
        function,
        struct(of("b, t, 2, 16"), jnp.bfloat16),
        struct(of("b, s, 2, 16"), jnp.bfloat16),
        struct(of("b, s, 2, 16"), jnp.bfloat16),
        struct(of("t, s"), jnp.float32),
        struct(of("b"), jnp.int32),
        struct(of("b, t"), jnp.int32),
        struct(of("b, s"), jnp.int32),
    )
    for batch, queries, keys in ((2, 4, 6), (1, 260, 300)):
        arrays = (
            *make_operands(batch, queries=queries, keys=keys, heads=(2, 2)),
            normal(4, queries, keys, dtype=jnp.float32),
            jnp.full((batch,), keys - 1, jnp.int32),
            jnp.arange(queries, dtype=jnp.int32) // 3 * jnp.ones((batch, 1), jnp.int32),
            jnp.arange(keys, dtype=jnp.int32) // 3 * jnp.ones((batch, 1), jnp.int32),
        )
        expect_close(program.call(*arrays), jax.jit(function)(*arrays))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_program_for_eight_devices(by_hand: bool) -> None:
    """On Explicit axes, and in a shard_map over any; Auto axes cannot be exported."""
    mesh = make_mesh(AxisType.Auto if by_hand else AxisType.Explicit)
    spec = BATCH_AND_HEADS
    function = attention
    if by_hand:
        function = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec))
    operands = make_operands(8)
    expected = jax.jit(with_gradients(attention))(*operands)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (spec,) * 3)
        program = exported(with_gradients(function), *sharded)
        assert program.nr_devices == 8
        compiled = jax.jit(program.call).lower(*sharded).compile()
        expect_equal(compiled(*sharded), expected)
        assert collectives(compiled) == {}
        sharding = NamedSharding(mesh, spec)
        for_cuda = exported(
            with_gradients(function),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands),
            platforms=("cuda",),
        )
        assert for_cuda.nr_devices == 8
