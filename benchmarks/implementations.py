"""The implementations that are timed against each other, behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax

import jax_flash
from jax_flash.testing import Case

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(query, key, value) -> output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        make: returns its function for a case.
        covers: whether it computes a case at all.
        has_own_forward: False where only its backward pass differs from another's.
        package: module that has to be installed for it, beside ours and JAX.
        is_ours: whether this repository is responsible for its results.
    """

    make: Callable[[Case], Attention]
    covers: Callable[[Case], bool] = lambda case: True
    has_own_forward: bool = True
    package: str | None = None
    is_ours: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether its package is there; importing that may take a GPU, so it is only looked for."""
        return self.package is None or find_spec(self.package) is not None


def _ours(case: Case, **options: Any) -> Attention:
    return lambda query, key, value: jax_flash.attention(
        query, key, value, is_causal=case.is_causal, **options
    )


def _cudnn(case: Case) -> Attention:
    return lambda query, key, value: jax.nn.dot_product_attention(
        query, key, value, is_causal=case.is_causal, implementation="cudnn"
    )


def _flash_attention_3(case: Case) -> Attention:
    function = import_module("flash_attn3_jax").flash_mha
    return lambda query, key, value: function(query, key, value, is_causal=case.is_causal)


def _flash_attention_4(case: Case) -> Attention:
    function = import_module("fa4_jax").flash_attn
    return lambda query, key, value: function(query, key, value, causal=case.is_causal)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "jax_flash": Implementation(make=partial(_ours, implementation="cuda"), is_ours=True),
    "jax_flash deterministic": Implementation(
        make=partial(_ours, implementation="cuda", deterministic_bwd=True),
        has_own_forward=False,
        is_ours=True,
    ),
    "cuDNN": Implementation(make=_cudnn, covers=lambda case: case.head_dim == case.value_dim),
    "FA3": Implementation(
        make=_flash_attention_3,
        covers=lambda case: case.head_dim == case.value_dim == 128,
        package="flash_attn3_jax",
    ),
    "FA4": Implementation(make=_flash_attention_4, package="fa4_jax"),
    "chunked": Implementation(make=partial(_ours, implementation="xla"), is_ours=True),
}
"""By the name in results: our kernels, with the faster and with the reproducible backward pass;
NVIDIA's library, through JAX; FlashAttention-3 and -4 (https://pypi.org/project/flash-attn3-jax,
https://pypi.org/project/fa4-jax); our plain JAX in linear memory."""
