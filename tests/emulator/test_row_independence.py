"""A few of the random calls of tests/gpu/test_row_independence.py, on emulated kernels."""

from __future__ import annotations

import pytest

from jax_flash.testing.bit_properties import GRADIENT_PROPERTIES, PROPERTIES, check
from jax_flash.testing.random_calls import ARRAY_FEATURES, DENSE_FEATURES, Sizes, random_call

SIZES = Sizes(
    queries=(40, 70),
    keys=(50, 140),
    batch=2,
    heads=((2, 1), (3, 3)),
    head_dims=((64, 64), (40, 24)),
    chunks=(1, 9, 33),
    padding=(3, 64),
    repeats=3,
    array_features=ARRAY_FEATURES + DENSE_FEATURES,
)
# Seeds so that masks differ: two properties with each kind of `random_call`.
SEEDS = {name: 3 * place + 3 for place, name in enumerate(PROPERTIES)}
GRADIENT_SEEDS = {
    name: 5 * place + 2
    for place, name in enumerate(PROPERTIES)
    if name in GRADIENT_PROPERTIES and name != "with_other_rows"
}


@pytest.mark.parametrize("name", SEEDS)
def test_results(name: str, kernel_directory: object) -> None:
    seed = SEEDS[name]
    check(name, random_call(seed, SIZES), SIZES, seed, implementation="emulate")


@pytest.mark.parametrize("name", GRADIENT_SEEDS)
def test_gradients(name: str, kernel_directory: object) -> None:
    seed = GRADIENT_SEEDS[name]
    call = random_call(seed, SIZES)
    check(name, call, SIZES, seed, implementation="emulate", gradients=True)
