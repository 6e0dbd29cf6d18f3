"""shard_map over batch and heads, with its check of what varies over the mesh, and without."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_flash

Operands = Callable[..., dict[str, Any]]

BATCH_AND_HEADS = PartitionSpec("data", None, "model", None)
BATCH = PartitionSpec("data", None, None, None)


def make_mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)


def loss(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: Any = None
) -> jax.Array:
    output, lse = jax_flash.attention(
        query, key, value, is_causal=True, return_residual=True, implementation=implementation
    )
    return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(jnp.sin(lse))


def sharded_loss(specs: tuple[PartitionSpec, ...], check: bool, implementation: Any = None) -> Any:
    mesh = make_mesh(AxisType.Auto)

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check)
    def run(*operands: jax.Array) -> jax.Array:
        return jax.lax.psum(loss(*operands, implementation=implementation), ("data", "model"))

    return run


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_sharded_heads(
    kernels: bool, check: bool, request: pytest.FixtureRequest, make_operands: Operands
) -> None:
    if kernels:
        request.getfixturevalue("all_kernels")
        operands = make_operands((2,), queries=5, keys=5)
    else:
        operands = make_operands((2,), queries=5, keys=5, dims=(16, 16), dtype=jnp.float32)
    run = sharded_loss((BATCH_AND_HEADS,) * 3, check)
    actual = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*operands.values())
    expected = jax.value_and_grad(loss, (0, 1, 2))(*operands.values())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=3e-5, atol=3e-5
        ),
        actual,
        expected,
    )


def test_keys_shared_by_the_devices(make_operands: Operands) -> None:
    """With one key head, the devices that share it sum its gradient."""
    operands = make_operands(
        (2,), queries=5, keys=5, heads=(4, 1), dims=(16, 16), dtype=jnp.float32
    )
    run = sharded_loss((BATCH_AND_HEADS, BATCH, BATCH), check=True)
    actual = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*operands.values())
    expected = jax.value_and_grad(loss, (0, 1, 2))(*operands.values())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), actual, expected
    )


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_each_device_calls_kernels_on_its_part(
    implementation: str | None, check: bool, make_operands: Operands
) -> None:
    operands = make_operands((4,), queries=5, keys=6)
    run = sharded_loss((BATCH_AND_HEADS,) * 3, check, implementation)
    gradient = jax.jit(jax.grad(run, (0, 1, 2)))
    text = gradient.trace(*operands.values()).lower(lowering_platforms=("cuda",)).as_text()
    types = re.findall(r"custom_call @jax_flash.*? : \(tensor<([^>]*)>, tensor<([^>]*)>", text)
    # Forward, the two query heads of a device's key head are packed.
    assert types == [(f"2x{query}x64xbf16", "2x6x1x64xbf16") for query in ("10x1", "5x2")]


@pytest.mark.usefixtures("all_kernels")
def test_a_result_that_varies_may_not_be_called_replicated(make_operands: Operands) -> None:
    mesh = make_mesh(AxisType.Auto)
    run = jax.shard_map(
        partial(jax_flash.attention, implementation="cuda"),
        mesh=mesh,
        in_specs=(BATCH_AND_HEADS,) * 3,
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(run).trace(*make_operands().values())


@pytest.mark.usefixtures("all_kernels")
def test_explicitly_sharded_operands_give_explicitly_sharded_results(
    make_operands: Operands,
) -> None:
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        operands = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, BATCH_AND_HEADS)
            )
            for x in make_operands((2,)).values()
        ]
        call = partial(jax_flash.attention, return_residual=True, implementation="cuda")
        output, lse = jax.jit(call).trace(*operands).out_info
        assert output.sharding.spec == BATCH_AND_HEADS
        assert lse.sharding.spec == PartitionSpec("data", None, "model")
        gradient = jax.grad(partial(loss, implementation="cuda"), (0, 1, 2))
        gradients = jax.jit(gradient).trace(*operands).out_info
        assert [g.sharding.spec for g in gradients] == [BATCH_AND_HEADS] * 3
