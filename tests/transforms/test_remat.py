"""How often kernels run under jax.checkpoint, counted at the handler and in the compiled text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_flash

from .programs import (
    BATCH_AND_HEADS,
    JAX_VERSION,
    expect_close,
    make_mesh,
    normal,
    put,
    text_of,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

LAYERS = 3
NAMES = ("flash_out", "flash_lse")

policies = jax.checkpoint_policies


# JAX's current remat, and the one that is to follow it.
REMATS = pytest.mark.parametrize("remat", ["remat", "remat3"], indirect=True)
# In jax 0.10 that does not work with any shard_map, which Explicit axes become.
MESHES = [("remat", AxisType.Auto), ("remat", AxisType.Explicit), ("remat3", AxisType.Auto)]
if JAX_VERSION >= (0, 11):
    MESHES.append(("remat3", AxisType.Explicit))


@pytest.fixture
def remat(request: pytest.FixtureRequest) -> Iterator[str]:
    """Uses one of JAX's ways to do remat."""
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", request.param == "remat3")
    yield request.param
    jax.config.update("jax_remat3", before)


def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
    attended = jax_flash.attention(x * weight, x, x, is_causal=True, implementation="cuda")
    return x + jnp.sin(attended)


def model(policy: Any = None, *, remat: bool = True, unrolled: bool = False) -> Callable[..., Any]:
    """Returns the gradient of some layers."""
    one = jax.checkpoint(layer, policy=policy) if remat else layer

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        if unrolled:
            for index in range(LAYERS):
                x = one(x, weights[index])
        else:
            x, _ = jax.lax.scan(lambda x, weight: (one(x, weight), None), x, weights)
        return jnp.sum(x, dtype=jnp.float32)

    return jax.value_and_grad(loss)


def operands() -> tuple[jax.Array, jax.Array]:
    return normal(0, 4, 8, 4, 16), normal(1, LAYERS)


ONCE = {
    "saved": policies.save_only_these_names(*NAMES),
    "everything": policies.everything_saveable,
}
TWICE = {
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "the output alone": policies.save_only_these_names("flash_out"),
    "the log-sum-exp alone": policies.save_only_these_names("flash_lse"),
}
OFFLOADED = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(NAMES),
    offload_src="device",
    offload_dst="pinned_host",
)


@REMATS
@pytest.mark.usefixtures("remat")
@pytest.mark.parametrize("case", [*ONCE, *TWICE])
def test_launches_of_scanned_layers(case: str, cpu_kernels: Any) -> None:
    gradient = jax.jit(model((ONCE | TWICE)[case]))
    forward_runs = 1 if case in ONCE else 2
    assert cpu_kernels.calls_of(gradient, *operands()) == (forward_runs * LAYERS, LAYERS)
    text = text_of(gradient.lower(*operands()).compile())
    # The two loops hold a call of the backward pass between them, and the forward pass in one or
    # both.
    assert text.count('custom_call_target="jax_flash_forward_v1"') == forward_runs
    assert text.count('custom_call_target="jax_flash_backward_v1"') == 1
    expect_close(gradient(*operands()), jax.jit(model(remat=False))(*operands()))


@REMATS
@pytest.mark.usefixtures("remat")
def test_launches_of_unrolled_layers(cpu_kernels: Any) -> None:
    gradient = jax.jit(model(ONCE["saved"], unrolled=True))
    assert cpu_kernels.calls_of(gradient, *operands()) == (LAYERS, LAYERS)


def test_names_beside_another_policy(cpu_kernels: Any) -> None:
    policy = policies.save_from_both_policies(policies.dots_saveable, ONCE["saved"])
    gradient = jax.jit(model(policy))
    assert cpu_kernels.calls_of(gradient, *operands()) == (LAYERS, LAYERS)


def test_launches_without_checkpoint(cpu_kernels: Any) -> None:
    for unrolled in (True, False):
        gradient = jax.jit(model(remat=False, unrolled=unrolled))
        assert cpu_kernels.calls_of(gradient, *operands()) == (LAYERS, LAYERS)


def test_offloaded_residuals(cpu_kernels: Any) -> None:
    gradient = jax.jit(model(OFFLOADED))
    assert cpu_kernels.calls_of(gradient, *operands()) == (LAYERS, LAYERS)
    text = str(jax.make_jaxpr(gradient)(*operands()))
    assert text.count("devices=(MemorySpace.Host,)") == len(NAMES)
    expect_close(gradient(*operands()), jax.jit(model(remat=False))(*operands()))


@pytest.mark.usefixtures("remat")
@pytest.mark.parametrize(("remat", "axis_type"), MESHES, indirect=["remat"], ids=str)
def test_launches_on_a_mesh(axis_type: AxisType, cpu_kernels: Any) -> None:
    x, weights = operands()
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        (sharded,) = put(mesh, [x], [BATCH_AND_HEADS])
        gradient = jax.jit(model(ONCE["saved"]))
        assert cpu_kernels.calls_of(gradient, sharded, weights) == (8 * LAYERS, 8 * LAYERS)
        expect_close(gradient(sharded, weights)[1], jax.jit(model(remat=False))(x, weights)[1])


def test_checkpoint_under_vmap(cpu_kernels: Any) -> None:
    x, weights = operands()
    gradient = jax.jit(jax.vmap(model(ONCE["saved"]), in_axes=(0, None)))
    assert cpu_kernels.calls_of(gradient, x, weights) == (LAYERS, LAYERS)
