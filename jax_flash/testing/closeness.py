"""Comparisons that say where and by how much two sets of results differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

# Below this error, relative to the largest value, two float32 computations that both are right
# differ by chance (order of sums, approximations of exp).
DEFAULT_FLOOR = 16 * float(np.finfo(np.float32).eps)

MAX_NORM_ALLOWANCE = 5 / 3
"""How much larger the factor is for the largest error than for the root mean square.

The largest of thousands of roundings is luck: an entry that both algorithms compute to well within
a rounding step of each other can fall on either side of the point between two numbers. On an H200
kernels reached 1.67 times the ideal's largest error where the mean square errors agreed within 2%
(benchmarks/results/2026-11-29_nvidia-h200_accuracy.csv). With the default factor of 1.2 it
may be twice the ideal's, as in FlashAttention's own tests.
"""

FEW_VALUES = 64
FEW_VALUES_FACTOR = 10.0
"""The factor for arrays of at most FEW_VALUES values, such as the gradient of the sinks.

Each is one sum over many rows, so its error is one draw of a random number whose spread is the
same for both algorithms: the ratio of two draws says next to nothing. A wrong formula errs by
thousands of times the ideal's error.
"""


def assert_close_to_oracle(
    actual: Mapping[str, ArrayLike],
    *,
    oracle: Mapping[str, ArrayLike],
    ideal: Mapping[str, ArrayLike],
    factor: float = 1.2,
    floor: float = DEFAULT_FLOOR,
) -> None:
    """Asserts that results err at most `factor` times as much as the ideal algorithm's.

    For each array, the root mean square of the errors to the oracle must be at most
    factor * (the ideal's) + floor * (the oracle's largest magnitude); so must the largest error,
    with the factor multiplied by MAX_NORM_ALLOWANCE. Arrays of few values have a factor of
    FEW_VALUES_FACTOR.
    Where the oracle is infinite (log-sum-exp of an empty row), the result must be the same.

    Args:
        actual: results by name, as `results_and_gradients` returns them.
        oracle: the same names: float64 results, from `float64_oracle`.
        ideal: the same names: results of `chunked_attention` on the inputs of `actual`.
        factor: how much larger the error may be.
        floor: see above; relative, dimensionless.

    Raises:
        AssertionError: with one paragraph for each array that fails: both norms, their ratio to
            the ideal's, and the worst entry's index and values.
        ValueError: if the three do not have the same names and shapes.
    """
    if not actual.keys() == oracle.keys() == ideal.keys():
        raise ValueError(
            f"names differ: actual {sorted(actual)}, oracle {sorted(oracle)}, ideal "
            f"{sorted(ideal)}. Make all three from the same inputs."
        )
    complaints = [
        complaint
        for name in oracle
        if (complaint := _compare(name, actual[name], oracle[name], ideal[name], (factor, floor)))
    ]
    if complaints:
        raise AssertionError("\n".join(complaints))


def _compare(
    name: str,
    actual_like: ArrayLike,
    oracle_like: ArrayLike,
    ideal_like: ArrayLike,
    limits: tuple[float, float],
) -> str | None:
    actual, oracle, ideal = (
        np.asarray(x).astype(np.float64) for x in (actual_like, oracle_like, ideal_like)
    )
    if not actual.shape == oracle.shape == ideal.shape:
        raise ValueError(
            f"{name}: shapes are {actual.shape} (actual), {oracle.shape} (oracle), {ideal.shape} "
            "(ideal). Make all three from the same inputs."
        )
    if oracle.size == 0:
        return None
    error, ideal_error = _error(actual, oracle), _error(ideal, oracle)
    worst = np.unravel_index(np.argmax(error), error.shape)
    factor, floor = limits
    if oracle.size <= FEW_VALUES:
        factor = max(factor, FEW_VALUES_FACTOR)
    finite = np.abs(oracle[np.isfinite(oracle)])
    slack = floor * float(finite.max(initial=0))
    report = []
    failed = False
    norms = {"max": (np.max, MAX_NORM_ALLOWANCE), "rms": (_root_mean_square, 1.0)}
    for norm, (of, allowance) in norms.items():
        size, ideal_size = float(of(error)), float(of(ideal_error))
        limit = allowance * factor * ideal_size + slack
        failed |= not size <= limit
        ratio = size / ideal_size if ideal_size else np.inf if size else 1.0
        report.append(
            f"{norm} error {size:.3e}, ideal's {ideal_size:.3e} (ratio {ratio:.3g}), "
            f"limit {limit:.3e}"
        )
    if not failed:
        return None
    index = tuple(int(i) for i in worst)
    return (
        f"{name} {oracle.shape}: {'; '.join(report)}; worst at {index}: "
        f"actual {actual[worst]:.9g}, oracle {oracle[worst]:.9g}, ideal {ideal[worst]:.9g}; "
        f"{np.isnan(actual).sum()} NaN"
    )


def _root_mean_square(values: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(np.square(values)))


def _error(values: np.ndarray, oracle: np.ndarray) -> np.ndarray:
    """Absolute error; 0 where both are the same infinity, and inf where it is not a number."""
    same = values == oracle
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(values - oracle))
    return np.where(np.isnan(error), np.inf, error)


def assert_bitwise_equal(
    actual: Mapping[str, ArrayLike], expected: Mapping[str, ArrayLike]
) -> None:
    """Asserts that two sets of results have the same bits (so -0 differs from 0).

    Args:
        actual: results by name.
        expected: the same names.

    Raises:
        AssertionError: naming, for each array that differs, how many entries do, and the index,
            values and bits of the first; or the dtypes or shapes, where these differ.
        ValueError: if the names differ.
    """
    if actual.keys() != expected.keys():
        raise ValueError(f"names differ: actual {sorted(actual)}, expected {sorted(expected)}.")
    complaints = []
    for name in expected:
        left, right = np.asarray(actual[name]), np.asarray(expected[name])
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            complaints.append(
                f"{name}: {left.dtype} {left.shape}, expected {right.dtype} {right.shape}"
            )
            continue
        bits = np.dtype(f"u{left.dtype.itemsize}")
        left_bits, right_bits = (np.ascontiguousarray(x).view(bits) for x in (left, right))
        differs = left_bits != right_bits
        if differs.any():
            first = np.unravel_index(np.argmax(differs), differs.shape)
            complaints.append(
                f"{name}: {differs.sum()} of {differs.size} entries differ, first at "
                f"{tuple(int(i) for i in first)}: {left[first]!s} (0x{left_bits[first]:x}), "
                f"expected {right[first]!s} (0x{right_bits[first]:x})"
            )
    if complaints:
        raise AssertionError("\n".join(complaints))
