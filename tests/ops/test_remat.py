"""How often the kernels run under jax.checkpoint: counted in the program lowered for CUDA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash

pytestmark = pytest.mark.usefixtures("all_kernels")

LAYERS = 3
NAMES = ("flash_out", "flash_lse")


def layer(x: jax.Array, implementation: str | None) -> jax.Array:
    y = jax_flash.attention(x, x[:, :, :2], x[:, :, :2], implementation=implementation)
    return x + jnp.sin(y)


def model(policy: Any, implementation: str | None, unrolled: bool) -> Callable[..., jax.Array]:
    remat = jax.checkpoint(lambda x: layer(x, implementation), policy=policy)

    def run(x: jax.Array) -> jax.Array:
        if unrolled:
            for _ in range(LAYERS):
                x = remat(x)
        else:
            x, _ = jax.lax.scan(lambda x, _: (remat(x), None), x, None, length=LAYERS)
        return jnp.sum(x, dtype=jnp.float32)

    return run


def count(function: Callable[..., Any]) -> tuple[int, int]:
    """Returns how many forward and backward calls the program of the gradient has."""
    x = jnp.zeros((2, 9, 4, 64), jnp.bfloat16)
    lowered = jax.jit(jax.value_and_grad(function)).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    return text.count("@jax_flash_forward_v1"), text.count("@jax_flash_backward_v1")


POLICIES = {
    "both names": (jax.checkpoint_policies.save_only_these_names(*NAMES), 1),
    "the output alone": (jax.checkpoint_policies.save_only_these_names("flash_out"), 2),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "dots": (jax.checkpoint_policies.dots_saveable, 2),
}


@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.parametrize("case", POLICIES)
def test_forward_calls_of_a_scanned_layer(case: str, implementation: str | None) -> None:
    policy, forward = POLICIES[case]
    # The body of each of the two loops appears once in the program.
    assert count(model(policy, implementation, unrolled=False)) == (forward, 1)


@pytest.mark.parametrize("case", POLICIES)
def test_forward_calls_of_unrolled_layers(case: str) -> None:
    policy, forward = POLICIES[case]
    forward_calls, backward_calls = count(model(policy, None, unrolled=True))
    assert backward_calls == LAYERS
    assert forward_calls == forward * LAYERS


def test_without_checkpoint_the_forward_pass_runs_once() -> None:
    def run(x: jax.Array) -> jax.Array:
        return jnp.sum(layer(x, None), dtype=jnp.float32)

    assert count(run) == (1, 1)


@pytest.mark.parametrize("names", [NAMES, ()])
def test_plain_jax_has_the_same_names(names: tuple[str, ...]) -> None:
    """The chunked forward pass, too, is saved or run again as the policy says."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    x = jnp.zeros((2, 300, 4, 64), jnp.bfloat16)
    gradient = jax.grad(model(policy, "xla", unrolled=False))
    loops = str(jax.make_jaxpr(gradient)(x)).count("exp ")
    saved = str(jax.make_jaxpr(jax.grad(model(None, "xla", unrolled=False)))(x)).count("exp ")
    assert loops == saved if not names else loops < saved
