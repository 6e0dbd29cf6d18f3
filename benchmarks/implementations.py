"""The implementations that are timed against each other, behind one signature."""

from __future__ import annotations

from collections.abc import Callable

import jax

import jax_flash
from jax_flash.testing import Case

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(query, key, value) -> output."""


def ours(case: Case) -> Attention:
    """The kernels, with the faster backward."""
    return lambda query, key, value: jax_flash.attention(
        query, key, value, is_causal=case.is_causal, implementation="cuda"
    )


def ours_deterministic(case: Case) -> Attention:
    """The kernels, with gradients of the same bits on every run."""
    return lambda query, key, value: jax_flash.attention(
        query,
        key,
        value,
        is_causal=case.is_causal,
        deterministic_bwd=True,
        implementation="cuda",
    )


def cudnn(case: Case) -> Attention:
    """NVIDIA's library, through JAX."""
    return lambda query, key, value: jax.nn.dot_product_attention(
        query, key, value, is_causal=case.is_causal, implementation="cudnn"
    )


def chunked(case: Case) -> Attention:
    """Our plain JAX in linear memory."""
    return lambda query, key, value: jax_flash.attention(
        query, key, value, is_causal=case.is_causal, implementation="xla"
    )


IMPLEMENTATIONS: dict[str, Callable[[Case], Attention]] = {
    "jax_flash": ours,
    "jax_flash deterministic": ours_deterministic,
    "cuDNN": cudnn,
    "chunked": chunked,
}

BACKWARD_ONLY = frozenset({"jax_flash deterministic"})
"""Implementations whose forward is another's."""
