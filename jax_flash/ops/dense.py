"""Dense biases and masks as the kernels take them: never made larger than they were given."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash.spec.buffers import DENSE_FEATURES, OPTIONAL_OPERANDS

DENSE_NAMES = tuple(OPTIONAL_OPERANDS[feature].name for feature in DENSE_FEATURES)
"""Names of the operands with a value for each query and key."""


def dense_operands(named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns bias and mask with leading dimensions that kernels can step over.

    Args:
      named: query [..., T, N, D], and of bias and mask those that the call has, [..., N, T, S],
        where any dimension may be 1.

    Returns:
      Those that it has. Heads, queries and keys stay as they are. Leading dimensions that are all
      of query's, or all 1, stay, too; a mixture of both is broadcast to all of query's.
    """
    leading = named["query"].shape[:-3]
    return {name: _with_whole_batch(named[name], leading) for name in DENSE_NAMES if name in named}


def bias_gradient_shape(
    shape: tuple[int, ...], leading: tuple[int, ...], mapped: int
) -> tuple[int, ...]:
    """Returns the shape of a bias's gradient: that of the bias, with what `jax.vmap` maps in full.

    What is mapped is summed over by who mapped it, if at all.

    Args:
      shape: [..., N, T, S], where any dimension may be 1.
      leading: leading dimensions of query.
      mapped: how many of them, the first, vmap has added.
    """
    return (*leading[:mapped], *shape[mapped:])


def sum_to_shape(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums a gradient over the dimensions that are 1 in `shape`."""
    pairs = enumerate(zip(gradient.shape, shape, strict=True))
    axes = tuple(axis for axis, (size, wanted) in pairs if wanted == 1 and size != 1)
    return jnp.sum(gradient, axis=axes, keepdims=True) if axes else gradient


def _with_whole_batch(array: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    if all(size == 1 for size in array.shape[:-3]):
        return array
    return jnp.broadcast_to(array, (*leading, *array.shape[-3:]))
