"""Inside a caller's own shard_map, under vmap, scan and checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_flash
from jax_flash import context_parallel

from .single_device import make_arrays, make_mesh, normal

ROWS = PartitionSpec("data", "context")
each_mode = pytest.mark.parametrize("mode", context_parallel.MODES)
each_check = pytest.mark.parametrize("check", [True, False])


def loss_of(output: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(output))


def single_loss(arrays: dict[str, Any]) -> jax.Array:
    return loss_of(jax_flash.attention(**arrays, is_causal=True))


def specs_of(arrays: dict[str, Any]) -> dict[str, PartitionSpec]:
    return {name: PartitionSpec() if name == "sinks" else ROWS for name in arrays}


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), actual, expected
    )


@each_check
@each_mode
def test_gradient_of_a_callers_shard_map(mode: str, check: bool) -> None:
    arrays: dict[str, Any] = make_arrays() | {"sinks": normal(5, 4)}

    @partial(
        jax.shard_map,
        mesh=make_mesh(),
        in_specs=(specs_of(arrays),),
        out_specs=PartitionSpec(),
        check_vma=check,
    )
    def loss(parts: dict[str, Any]) -> jax.Array:
        output = context_parallel.attention(**parts, axis_name="context", mode=mode, is_causal=True)
        return jax.lax.psum(loss_of(output), ("data", "context"))

    actual = jax.jit(jax.value_and_grad(loss))(arrays)
    assert_close(actual, jax.value_and_grad(single_loss)(arrays))


@each_mode
def test_gradient_inside_a_callers_shard_map(mode: str) -> None:
    """JAX sums the gradient of what devices share: here of the sinks, over both axes."""
    arrays: dict[str, Any] = make_arrays() | {"sinks": normal(5, 4)}

    @partial(
        jax.shard_map,
        mesh=make_mesh(),
        in_specs=(specs_of(arrays),),
        out_specs=specs_of(arrays),
    )
    def gradient(parts: dict[str, Any]) -> dict[str, Any]:
        def loss(parts: dict[str, Any]) -> jax.Array:
            output = context_parallel.attention(
                **parts, axis_name="context", mode=mode, is_causal=True
            )
            return loss_of(output)

        return jax.grad(loss)(parts)

    assert_close(jax.jit(gradient)(arrays), jax.grad(single_loss)(arrays))


@each_mode
def test_vmap_over_heads_that_share_keys(mode: str) -> None:
    """Equinox's way to write heads; the shared key and value have the sum of the gradients."""
    query = normal(1, 3, 32, 4, 8)
    key, value = normal(2, 32, 4, 8), normal(3, 32, 4, 8)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context_parallel.attention(
            query, key, value, axis_name="context", mode=mode, mesh=make_mesh(), is_causal=True
        )

    def loss(*arrays: jax.Array) -> jax.Array:
        return loss_of(jax.vmap(attend, (0, None, None))(*arrays))

    def expected_loss(query: jax.Array, *shared: jax.Array) -> jax.Array:
        key, value = (jnp.broadcast_to(array, query.shape) for array in shared)
        return loss_of(jax_flash.attention(query, key, value, is_causal=True))

    actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(query, key, value)
    assert_close(actual, jax.value_and_grad(expected_loss, (0, 1, 2))(query, key, value))


@pytest.fixture(params=[False, True], ids=["remat", "remat3"])
def remat3(request: pytest.FixtureRequest) -> Iterator[bool]:
    """JAX's checkpointing as it is, and as it will be."""
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("mode", ["all_gather", "ring"])
def test_checkpointed_layers_that_save_the_residuals_do_not_attend_again(
    mode: str, remat3: bool
) -> None:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        attended = context_parallel.attention(x, x, x, axis_name="context", mode=mode)
        return x + attended, None

    def collectives(policy: Any) -> int:
        """Counts them before XLA, which may find that two are the same."""
        checkpointed = jax.checkpoint(layer, policy=policy)

        @partial(jax.shard_map, mesh=make_mesh(), in_specs=ROWS, out_specs=ROWS)
        def gradient(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: loss_of(jax.lax.scan(checkpointed, x, length=2)[0]))(x)

        text = jax.jit(gradient).lower(normal(1, 2, 32, 4, 8)).as_text()
        return len(re.findall(r"stablehlo\.(?:all_gather|collective_permute)", text))

    policies = jax.checkpoint_policies
    saved = collectives(policies.save_only_these_names("flash_out", "flash_lse"))
    assert saved == collectives(policies.everything_saveable)
    if not remat3:  # There, jax 0.10.2 saves what this policy says it should not.
        assert saved < collectives(policies.nothing_saveable)


@each_mode
def test_second_derivatives_are_refused(mode: str) -> None:
    arrays = make_arrays(batch=1)

    def loss(query: jax.Array) -> jax.Array:
        output = context_parallel.attention(
            query,
            arrays["key"],
            arrays["value"],
            axis_name="context",
            mode=mode,
            mesh=make_mesh(),
        )
        return loss_of(output)

    def slope(query: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(loss)(query))

    with pytest.raises(NotImplementedError, match="there is no second derivative"):
        jax.eval_shape(jax.grad(slope), arrays["query"])
