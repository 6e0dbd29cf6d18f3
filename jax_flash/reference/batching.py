"""How attention is batched by `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def batch_as_leading_dimension(
    function: Callable[..., tuple[jax.Array, ...]], may_be_one: Collection[int] = ()
) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes `jax.vmap` add a leading dimension to every argument and result.

    The mapped axis stays an axis of its own: folding it into another by a reshape would make XLA
    gather sharded arrays. What is not mapped is broadcast.

    Args:
        function: takes arrays with any number of leading dimensions, and returns a tuple of such.
        may_be_one: positions of arguments that are not broadcast: where they are not mapped, they
            get a dimension of size 1.

    Returns:
        The function with that batching rule, also for nested vmaps.
    """
    batched = custom_vmap(function)

    @batched.def_vmap
    def _(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, Any]:
        stacked = [
            operand
            if is_batched
            else jnp.broadcast_to(
                operand, (1 if position in may_be_one else axis_size, *operand.shape)
            )
            for position, (operand, is_batched) in enumerate(zip(operands, in_batched, strict=True))
        ]
        results = batched(*stacked)
        return results, tuple(True for _ in results)

    return batched


def batch_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns its arguments, all of them mapped under a `jax.vmap` that maps any of them.

    Results of a `jax.custom_vjp` function need this: where only some of them are mapped, the
    cotangent of the others, already summed over the mapped axis, is given to every index of the
    axis, and gradients of shared operands come out too large (seen in jax 0.10.2 and 0.11.2).
    Attention has such results: with only value mapped, the log-sum-exp does not vary.
    """
    return batch_as_leading_dimension(lambda *arrays: arrays)(*arrays)
