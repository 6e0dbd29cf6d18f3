"""Bits of a row depend on nothing but the row's own inputs: random calls, every feature.

`JAX_FLASH_TEST_CALLS=1000` makes more calls than the default number; each is checked for every
property (docs/numerics.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pytest

from jax_flash.testing.bit_properties import GRADIENT_PROPERTIES, PROPERTIES, check
from jax_flash.testing.random_calls import (
    ARRAY_FEATURES,
    DENSE_FEATURES,
    RandomCall,
    Sizes,
    random_call,
)

CALLS = int(os.environ.get("JAX_FLASH_TEST_CALLS", "64"))
"""Times eight properties: 512 cases."""
CALLS_WITH_GRADIENTS = CALLS // 4

HEAD_DIMS = ((64, 64), (128, 128), (40, 56), (104, 72), (192, 128), (256, 256), (64, 200))

SIZES = Sizes(
    queries=(70, 300),
    keys=(70, 520),
    batch=3,
    heads=((4, 4), (6, 2), (5, 1)),
    head_dims=HEAD_DIMS,
    chunks=(1, 37, 64),
    padding=(5, 200),
    # More blocks than the 132 multiprocessors of an H200 have room for.
    repeats=24,
    array_features=ARRAY_FEATURES + DENSE_FEATURES,
)

FORWARD_CASES = [(name, seed) for seed in range(CALLS) for name in PROPERTIES]
GRADIENT_CASES = [
    (name, seed) for seed in range(CALLS_WITH_GRADIENTS) for name in GRADIENT_PROPERTIES
]


@lru_cache(maxsize=64)
def call_of(seed: int, gradients: bool) -> RandomCall:
    # Other calls than those without gradients.
    return random_call(seed + 10_000 * gradients, SIZES)


def check_case(name: str, seed: int, gradients: bool) -> None:
    call = call_of(seed, gradients)
    check(name, call, SIZES, seed, implementation="cuda", gradients=gradients)


@pytest.fixture(scope="module")
def checks(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, int, bool], Future[None]]]:
    """The selected checks, begun: most of their time is that of compiling programs."""
    ours: list[Any] = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    chosen = [(*item.callspec.params["case"], item.function is test_gradients) for item in ours]
    pool = ThreadPoolExecutor(min(12, os.cpu_count() or 1))
    yield {
        (name, seed, gradients): pool.submit(check_case, name, seed, gradients)
        for name, seed, gradients in chosen
    }
    pool.shutdown(cancel_futures=True)


def _id(case: tuple[str, int]) -> str:
    return f"{case[1]}-{case[0]}"


@pytest.mark.parametrize("case", FORWARD_CASES, ids=_id)
def test_results(case: tuple[str, int], checks: dict[Any, Future[None]]) -> None:
    checks[*case, False].result()


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=_id)
def test_gradients(case: tuple[str, int], checks: dict[Any, Future[None]]) -> None:
    checks[*case, True].result()
