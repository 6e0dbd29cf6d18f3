"""How far results of two implementations are apart, and the CSV file that says so."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import ml_dtypes
import numpy as np

REPORT_VARIABLE = "JAX_FLASH_REPORT"
"""Environment variable with the name of the CSV file; without it, nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two arrays of the same kind.

    A step is the distance between neighbouring numbers of a type at the magnitude of the largest
    number of the same row: what one rounding to that type may cost after a sum over the row.
    """

    equal_bits: float
    """Share of the values that have the same bits."""
    largest: float
    """Largest absolute difference of two finite values."""
    largest_steps: float
    """Largest difference in steps; infinite where only one of two values is finite."""


def same_bits(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns which values of two arrays of one type have the same bits."""
    assert first.dtype == second.dtype and first.shape == second.shape
    unsigned = f"u{first.dtype.itemsize}"
    return np.ascontiguousarray(first).view(unsigned) == np.ascontiguousarray(second).view(unsigned)


def difference(
    first: np.ndarray, second: np.ndarray, *, step_of: np.dtype, row_axes: tuple[int, ...] = (-1,)
) -> Difference:
    """Compares two arrays.

    Args:
      first: any float type.
      second: like `first`; its magnitudes decide the steps.
      step_of: the type whose steps are counted; a float32 sum of products of rounded numbers
        differs by steps of the type that they were rounded to.
      row_axes: axes that a row extends over; none for values that stand alone.
    """
    got, want = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(want)
    distance = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    magnitude = np.abs(np.where(finite, want, 0))
    if row_axes:
        magnitude = magnitude.max(axis=row_axes, keepdims=True)
    information = ml_dtypes.finfo(step_of)
    magnitude = np.maximum(magnitude, float(information.tiny))
    step = 2.0 ** np.floor(np.log2(magnitude)) * float(information.eps)
    equal = same_bits(first, second)
    steps = np.where(finite, distance / step, np.where(equal, 0, np.inf))
    return Difference(
        equal_bits=float(equal.mean()),
        largest=float(distance.max()),
        largest_steps=float(steps.max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV: one output of one kernel, on the GPU and on the emulator."""

    kernel: str
    output: str
    queries: int
    keys: int
    heads: int
    key_heads: int
    features: str
    """What the call has beyond its mask."""
    step: str
    """Type whose steps `largest_steps` counts."""
    values: int
    equal_bits: float
    largest: float
    largest_steps: float


def write_row(row: Row) -> None:
    """Appends a row to the report, with a header where it is the first."""
    name = os.environ.get(REPORT_VARIABLE)
    if not name:
        return
    path = Path(name)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))
