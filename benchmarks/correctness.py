"""The gate before any timing: every implementation must be right on small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks.implementations import IMPLEMENTATIONS, Attention
from jax_flash.reference.chunked import chunked_attention
from jax_flash.reference.semantics import Semantics
from jax_flash.testing import (
    Case,
    assert_close_to_oracle,
    float64_oracle,
    make_inputs,
    results_and_gradients,
)

OUR_FACTOR = 1.2
OTHERS_FACTOR = 3.0
"""How much larger than the ideal algorithm's the error of cuDNN may be: it has its own contract,
and only a wrong result must stop the timing."""


def small_problems(cases: Iterable[Case]) -> list[Case]:
    """Returns one short case for each kernel that the given ones use."""
    kinds = {(case.head_dim, case.is_causal, case.dtype) for case in cases}
    return [
        Case(
            name=f"gate-{'causal' if is_causal else 'full'}-head-dim-{head_dim}-{dtype}",
            tags=frozenset({"full"}),
            queries=320,
            keys=320,
            heads=4,
            key_heads=2,
            head_dim=head_dim,
            value_dim=head_dim,
            dtype=dtype,
            is_causal=is_causal,
        )
        for head_dim, is_causal, dtype in sorted(kinds)
    ]


def check_all(cases: Iterable[Case], names: Iterable[str]) -> None:
    """Checks the named implementations on `small_problems(cases)`.

    Raises:
        AssertionError: one of them is not right; it says which, where and by how much.
    """
    names = list(names)
    for case in small_problems(cases):
        inputs = make_inputs(case)
        inputs = replace(inputs, d_lse=jnp.zeros_like(inputs.d_lse))  # not a result of cuDNN
        oracle = float64_oracle(inputs)
        ideal = results_and_gradients(chunked_attention, inputs)
        del oracle["lse"], ideal["lse"]
        for name in names:
            results = results_and_gradients(_without_lse(IMPLEMENTATIONS[name](case)), inputs)
            del results["lse"]
            try:
                assert_close_to_oracle(
                    results,
                    oracle=oracle,
                    ideal=ideal,
                    factor=OTHERS_FACTOR if name == "cuDNN" else OUR_FACTOR,
                )
            except AssertionError as error:
                raise AssertionError(f"{name} is wrong on {case.name}:\n{error}") from None


def _without_lse(
    attention: Attention,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def with_zeros(
        query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> tuple[jax.Array, jax.Array]:
        del semantics  # the implementation has been told already
        return attention(query, key, value), jnp.zeros(query.shape[:-1], jnp.float32)

    return with_zeros
