"""The measure of how far results are apart, on numbers whose distance is known."""

from __future__ import annotations

import csv
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from .comparison import REPORT_VARIABLE, Row, difference, same_bits, write_row

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_steps_are_those_of_the_largest_number_of_the_row():
    """A bfloat16 has 8 bits: at 3.0 its neighbours are 2^-6 away, at 0.25 they are 2^-9 away."""
    want = np.array([[3.0, 0.25], [0.25, 0.125]], BF16)
    got = want.copy()
    got[0, 1] += 2.0**-8
    got[1, 1] += 2.0**-8
    found = difference(got, want, step_of=BF16)
    assert found.equal_bits == 0.5 and found.largest == 2.0**-8
    assert found.largest_steps == 2.0  # 2^-8 over 2^-9, of the second row
    alone = difference(got[:1], want[:1], step_of=BF16, row_axes=())
    assert alone.largest_steps == 2.0
    assert difference(got[:1], want[:1], step_of=BF16).largest_steps == 0.25
    wide = difference(got.astype(np.float32), want.astype(np.float32), step_of=np.dtype(np.float32))
    assert wide.largest_steps == 2.0 * 2**16


def test_signed_zeros_and_infinities():
    want = np.array([0.0, -np.inf, 1.0], np.float32)
    got = np.array([-0.0, -np.inf, 1.0], np.float32)
    assert same_bits(got, want).tolist() == [False, True, True]
    found = difference(got, want, step_of=want.dtype)
    assert found.largest_steps == 0 and found.equal_bits == pytest.approx(2 / 3)
    got[1] = 5
    assert difference(got, want, step_of=want.dtype).largest_steps == np.inf


def test_rows_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = Row(
        kernel="sm_90a/forward",
        output="lse",
        queries=1,
        keys=2,
        heads=3,
        key_heads=1,
        features="",
        step="float32",
        values=3,
        equal_bits=1.0,
        largest=0.0,
        largest_steps=0.0,
    )
    monkeypatch.delenv(REPORT_VARIABLE, raising=False)
    write_row(row)
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path / "report.csv"))
    write_row(row)
    write_row(row)
    with (tmp_path / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2
    assert lines[0]["kernel"] == "sm_90a/forward" and lines[0]["largest_steps"] == "0.0"
