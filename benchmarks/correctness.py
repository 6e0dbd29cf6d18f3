"""The gate before any timing: every implementation must be right on small problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
"""How much larger than the ideal algorithm's the error of the others may be: they have their own
contracts, and only a wrong result must stop the timing."""

# XLA would time every matrix product of the oracle, which takes longer than the problems do.
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}


class Kind(NamedTuple):
    """What problems have in common that are computed by the same kernels.

    The ratio of heads is part of it because FlashAttention-4 compiles kernels for each.
    """

    head_dim: int
    value_dim: int
    is_causal: bool
    dtype: str
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An implementation that could not compute problems of one kind, and why."""

    implementation: str
    kind: Kind
    reason: str


def kind_of(case: Case) -> Kind:
    """Returns the kind of a problem."""
    return Kind(
        case.head_dim,
        case.value_dim,
        case.is_causal,
        case.dtype,
        case.heads // case.key_heads,
    )


def small_problems(cases: Iterable[Case]) -> list[Case]:
    """Returns one short case for each kind of the given ones."""
    return [
        Case(
            name=f"gate-{'causal' if kind.is_causal else 'full'}-head-dim-{kind.head_dim}-"
            f"{kind.value_dim}-{kind.group}-{kind.dtype}",
            tags=frozenset({"full"}),
            queries=320,
            keys=320,
            heads=2 * kind.group,
            key_heads=2,
            head_dim=kind.head_dim,
            value_dim=kind.value_dim,
            dtype=kind.dtype,
            is_causal=kind.is_causal,
        )
        for kind in sorted({kind_of(case) for case in cases})
    ]


def check_all(cases: Iterable[Case], names: Iterable[str]) -> list[Failure]:
    """Checks the named implementations on the `small_problems` of the cases that they cover.

    Several at once, as most of the time is that of compilers.

    Returns:
        What could not be computed at all; it must not be timed.

    Raises:
        AssertionError: one of them is not right; it says which, where and by how much.
    """
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        checks = [pool.submit(_check, case, names) for case in small_problems(cases)]
    return [failure for check in checks for failure in check.result()]


def _check(case: Case, names: list[str]) -> list[Failure]:
    inputs = make_inputs(case)
    inputs = replace(inputs, d_lse=jnp.zeros_like(inputs.d_lse))  # not a result of the others
    oracle = float64_oracle(inputs, compiler_options=_COMPILER_OPTIONS)
    ideal = results_and_gradients(chunked_attention, inputs, compiler_options=_COMPILER_OPTIONS)
    failures = []
    for name in names:
        implementation = IMPLEMENTATIONS[name]
        if not implementation.covers(case):
            continue
        try:
            results = results_and_gradients(_without_lse(implementation.make(case)), inputs)
        except Exception as error:  # each package has its own
            reason = f"{type(error).__name__}: {error}"
            failures.append(Failure(implementation=name, kind=kind_of(case), reason=reason))
            continue
        try:
            assert_close_to_oracle(
                _without("lse", results),
                oracle=_without("lse", oracle),
                ideal=_without("lse", ideal),
                factor=OUR_FACTOR if implementation.is_ours else OTHERS_FACTOR,
            )
        except AssertionError as error:
            raise AssertionError(f"{name} is wrong on {case.name}:\n{error}") from None
    return failures


def _without(name: str, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: array for key, array in results.items() if key != name}


def _without_lse(
    attention: Attention,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def with_zeros(
        query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> tuple[jax.Array, jax.Array]:
        del semantics  # the implementation has been told already
        return attention(query, key, value), jnp.zeros(query.shape[:-1], jnp.float32)

    return with_zeros
