"""Rounding that numpy does not offer: directed modes, fused operations, narrow formats."""

import numpy as np

_SIGN_BITS = {2: np.uint16(0x8000), 4: np.uint32(0x80000000), 8: np.uint64(1 << 63)}


def _bits(value: np.ndarray) -> np.ndarray:
    return value.view(f"u{value.dtype.itemsize}")


def without_subnormals(value: np.ndarray) -> np.ndarray:
    """Returns the values with subnormals replaced by zeros of the same sign (``.ftz``)."""
    if value.dtype == np.float64:
        return value
    wide = value.astype(np.float32) if value.dtype.itemsize == 2 else value
    tiny = 2.0**-14 if value.dtype == np.float16 else 2.0**-126
    small = (np.abs(wide) < tiny) & (wide != 0)
    if not small.any():
        return value
    sign = _SIGN_BITS[value.dtype.itemsize]
    return np.where(small, _bits(value) & sign, _bits(value)).view(value.dtype)


def round_to_odd(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Rounds the exact sum ``high + low`` to float64 so that a second rounding is still right.

    Where the sum is not exact, the result has an odd last bit (Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd").
    """
    bits = high.view(np.int64)
    # `high` is rounded to nearest: step to the neighbour toward the error where that is needed.
    even = (bits & 1) == 0
    inexact = (low != 0) & np.isfinite(high) & np.isfinite(low)
    toward = np.nextafter(high, np.where(low > 0, np.inf, -np.inf))
    return np.where(inexact & even, toward, high)


def exact_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``(s, e)`` with ``s = fl(a + b)`` and ``s + e = a + b`` exactly (Knuth's two-sum)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)) + (b - back)


def round_to(value: np.ndarray, dtype: np.dtype, rounding: str) -> np.ndarray:
    """Rounds float64 values to a narrower dtype: ``rn``, ``rz``, ``rm`` (down), ``rp`` (up)."""
    if dtype.itemsize < 4 and dtype != np.float16 and value.dtype == np.float64:
        value = _odd_float32(value)
    nearest = value.astype(dtype)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    finite = np.isfinite(value)
    if rounding == "rz":
        wrong = finite & (np.abs(back) > np.abs(value))
        step_up = value < 0
    elif rounding == "rm":
        wrong, step_up = finite & (back > value), np.zeros(value.shape, bool)
    else:
        wrong, step_up = finite & (back < value), np.ones(value.shape, bool)
    return np.where(wrong, _neighbour(nearest, step_up), nearest)


def _odd_float32(value: np.ndarray) -> np.ndarray:
    """Rounds float64 to odd float32: ml_dtypes converts through float32, which rounds twice."""
    nearest = value.astype(np.float32)
    difference = value - nearest.astype(np.float64)
    inexact = np.isfinite(value) & (difference != 0)
    even = (nearest.view(np.int32) & 1) == 0
    return np.where(inexact & even, _neighbour(nearest, difference > 0), nearest)


def _neighbour(value: np.ndarray, step_up: np.ndarray) -> np.ndarray:
    """Returns the next representable number above or below, of any float format."""
    bits = _bits(value).astype(np.int64)
    sign = int(_SIGN_BITS[value.dtype.itemsize])
    # On the line of signed magnitudes, consecutive numbers differ by one.
    line = np.where(bits & sign, -(bits & (sign - 1)), bits)
    line = line + np.where(step_up, 1, -1)
    magnitude = np.where(line < 0, sign | -line, line)
    return magnitude.astype(f"u{value.dtype.itemsize}").view(value.dtype)


def fused_multiply_add(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, *, element: np.dtype, rounding: str = "rn"
) -> np.ndarray:
    """Returns ``a * b + c`` rounded once to ``element`` (float32 or narrower)."""
    product = a.astype(np.float64) * b.astype(np.float64)
    high, low = exact_sum(product, c.astype(np.float64))
    return round_to(round_to_odd(high, low), element, rounding)


def _extremum(a: np.ndarray, b: np.ndarray, propagate_nan: bool, *, largest: bool) -> np.ndarray:
    if propagate_nan:
        value = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        value = np.fmax(a, b) if largest else np.fmin(a, b)
    if not value.all():  # -0 is less than +0, which numpy does not order
        bits_a, bits_b = _bits(np.ascontiguousarray(a)), _bits(np.ascontiguousarray(b))
        zeros = bits_a & bits_b if largest else bits_a | bits_b
        both = (a == 0) & (b == 0)
        value = np.where(both, zeros, _bits(value)).view(a.dtype)
    return value


def maximum(a: np.ndarray, b: np.ndarray, propagate_nan: bool) -> np.ndarray:
    """Returns the larger; a NaN wins or loses as asked; +0 is larger than -0."""
    return _extremum(a, b, propagate_nan, largest=True)


def minimum(a: np.ndarray, b: np.ndarray, propagate_nan: bool) -> np.ndarray:
    """Returns the smaller; a NaN wins or loses as asked; -0 is smaller than +0."""
    return _extremum(a, b, propagate_nan, largest=False)
