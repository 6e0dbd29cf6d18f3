"""Every feature on the kernels against the float64 oracle, with NaN in all padding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from jax_flash.reference.chunked import chunked_attention
from jax_flash.testing import (
    CASES,
    Case,
    assert_close_to_oracle,
    float64_oracle,
    make_inputs,
    poison_padding,
    public_attention,
    results_and_gradients,
)

from .test_accuracy import COMPILER_OPTIONS

WORDS = ("feature-", "window-", "padded-", "packed-", "decode-", "gemma", "gpt-", "everything")


def _cases() -> Iterator[Case]:
    for case in CASES:
        if not case.name.startswith(WORDS):
            continue
        yield case
        # Several tiles, the other dtype, other head dimensions.
        yield replace(
            case,
            name=f"{case.name}-large",
            queries=case.queries if case.queries < 10 else 700,
            keys=900,
            # Many, as the gradient of the sinks has one value a head: few would be luck.
            heads=24,
            key_heads=8,
            head_dim=120,
            value_dim=128,
            dtype="float16",
        )


COMPARED = {case.name: case for case in _cases()}
HEAD_DIMS = [(8, 8), (40, 40), (64, 96), (96, 64), (128, 8)]
FEATURES = [name for name in COMPARED if name.startswith("feature-") and "-large" not in name]
WIDE = [(192, 128), (136, 136), (256, 256), (64, 200)]


def compare(case: Case, *, deterministic_bwd: bool) -> None:
    """Asserts that results and gradients are as close to the oracle as the ideal algorithm's."""
    inputs = poison_padding(make_inputs(case))
    attention = public_attention(implementation="cuda", deterministic_bwd=deterministic_bwd)
    assert_close_to_oracle(
        results_and_gradients(attention, inputs),
        oracle=float64_oracle(inputs, compiler_options=COMPILER_OPTIONS),
        ideal=results_and_gradients(chunked_attention, inputs, compiler_options=COMPILER_OPTIONS),
    )


@pytest.fixture(scope="module")
def comparisons() -> Iterator[dict[str, Future[None]]]:
    """The comparisons of all cases, begun: their time is that of XLA's compiler."""
    pool = ThreadPoolExecutor(min(6, os.cpu_count() or 1))
    yield {
        name: pool.submit(compare, case, deterministic_bwd=place % 2 == 0)
        for place, (name, case) in enumerate(COMPARED.items())
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", COMPARED)
def test_feature(name: str, comparisons: dict[str, Future[None]]) -> None:
    comparisons[name].result()


@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_head_dimensions(head_dim: int, value_dim: int) -> None:
    case = replace(COMPARED["padded-causal"], head_dim=head_dim, value_dim=value_dim)
    compare(case, deterministic_bwd=True)


@pytest.mark.parametrize("name", ["causal-129x1000", "everything"])
@pytest.mark.parametrize(("head_dim", "value_dim"), WIDE)
def test_large_head_dimensions(head_dim: int, value_dim: int, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    case = replace(case, head_dim=head_dim, value_dim=value_dim)
    compare(case, deterministic_bwd=head_dim == 192)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (256, 256)])
def test_feature_of_large_head_dimensions(head_dim: int, value_dim: int, name: str) -> None:
    compare(
        replace(COMPARED[name], head_dim=head_dim, value_dim=value_dim), deterministic_bwd=False
    )
