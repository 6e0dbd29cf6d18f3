"""The comparisons accept what they should, and say what is wrong with the rest."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.testing import assert_bitwise_equal, assert_close_to_oracle

ORACLE = np.linspace(-2, 2, 240).reshape(2, 3, 40)
IDEAL = (ORACLE + 1e-3 * np.cos(np.arange(240)).reshape(2, 3, 40)).astype(np.float32)


def _check(actual: Any, oracle: Any = ORACLE, ideal: Any = IDEAL, **limits: float) -> None:
    assert_close_to_oracle(
        {"output": actual}, oracle={"output": oracle}, ideal={"output": ideal}, **limits
    )


def test_errors_like_the_ideal_one_pass():
    _check(IDEAL)
    _check(ORACLE - 1.19 * (IDEAL - ORACLE))
    _check(ORACLE.astype(np.float32))


def test_one_bad_entry_fails_in_the_maximum_norm_and_is_named():
    actual = IDEAL.copy()
    actual[1, 2, 0] = ORACLE[1, 2, 0] + 2.1e-3
    with pytest.raises(AssertionError) as failure:
        _check(actual)
    message = str(failure.value)
    assert "worst at (1, 2, 0)" in message
    assert re.search(r"max error 2\.100e-03, ideal's 1\.000e-03 \(ratio 2\.1\)", message)
    _check(actual, factor=1.3)


def test_many_slightly_bad_entries_fail_in_the_mean():
    actual = ORACLE + 1.1 * np.abs(IDEAL - ORACLE).max()
    with pytest.raises(AssertionError, match=r"rms error 1\.100e-03"):
        _check(actual)


def test_an_array_of_few_values_is_only_compared_in_magnitude():
    few, ideal = ORACLE[0, 0, :10], IDEAL[0, 0, :10]
    _check(few + 5 * (ideal - few), oracle=few, ideal=ideal)
    with pytest.raises(AssertionError):
        _check(few + 11 * (ideal - few), oracle=few, ideal=ideal)


def test_floor_is_relative_to_the_largest_magnitude():
    exact = ORACLE.copy()
    off = ORACLE + 1.5e-6
    _check(off, ideal=exact)
    with pytest.raises(AssertionError, match="ratio inf"):
        _check(off, ideal=exact, floor=0.0)
    with pytest.raises(AssertionError):
        _check(off / 10 + 2e-6, oracle=ORACLE / 10, ideal=exact / 10)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_not_finite_where_the_oracle_is_finite_fails(wrong):
    actual = IDEAL.copy()
    actual[0, 1, 1] = wrong
    with pytest.raises(AssertionError, match=r"worst at \(0, 1, 1\)"):
        _check(actual)


def test_empty_rows_must_be_minus_infinity_in_both():
    oracle, ideal = ORACLE.copy(), IDEAL.copy()
    oracle[0, 0, 0] = ideal[0, 0, 0] = -np.inf
    _check(ideal.copy(), oracle, ideal)
    for wrong in (-1e30, np.nan, np.inf):
        actual = ideal.copy()
        actual[0, 0, 0] = wrong
        with pytest.raises(AssertionError, match="oracle -inf"):
            _check(actual, oracle, ideal)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="names differ"):
        assert_close_to_oracle({"lse": ORACLE}, oracle={"output": ORACLE}, ideal={"output": IDEAL})
    with pytest.raises(ValueError, match="shapes are"):
        _check(IDEAL[0])
    with pytest.raises(ValueError, match="names differ"):
        assert_bitwise_equal({"lse": ORACLE}, {"output": ORACLE})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_bitwise_equality_names_the_first_difference(dtype):
    dtype = jnp.dtype(dtype)
    expected = ORACLE.astype(dtype)
    assert_bitwise_equal({"d_key": expected.copy()}, {"d_key": expected})
    actual = expected.copy()
    actual.view(f"u{dtype.itemsize}")[1, 0, 2:] ^= 1
    with pytest.raises(AssertionError, match=r"d_key: 38 of 240 .* first at \(1, 0, 2\): .*0x"):
        assert_bitwise_equal({"d_key": actual}, {"d_key": expected})


def test_bitwise_equality_tells_zeros_and_dtypes_apart_and_accepts_nan():
    zero, nan = np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    assert_bitwise_equal({"x": nan}, {"x": nan.copy()})
    with pytest.raises(AssertionError, match=r"2 of 2 entries"):
        assert_bitwise_equal({"x": -zero}, {"x": zero})
    with pytest.raises(AssertionError, match=r"x: float32 \(2,\), expected float64 \(2,\)"):
        assert_bitwise_equal({"x": zero}, {"x": zero.astype(np.float64)})
