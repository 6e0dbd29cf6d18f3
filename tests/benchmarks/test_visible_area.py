"""The benchmark of masks: what it counts and what it writes, on a CPU."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import visible_area
from benchmarks.timing import Effort
from benchmarks.visible_area import FULL, MODES, Mask, Row, masks, measure, plot, uneven, write_csv

DOCUMENTS = (5, 20, 7)


def dense(mask: Mask, length: int) -> np.ndarray:
    """The mask pair by pair, by the words of `jax_flash.attention`."""
    query, key = np.arange(length)[:, None], np.arange(length)
    visible = np.ones((length, length), bool)
    if mask.is_causal:
        visible &= key <= query
    left, right = mask.window
    if left is not None:
        visible &= key >= query - left
    if right is not None:
        visible &= key <= query + right
    if mask.documents:
        ids = np.repeat(np.arange(len(mask.documents)), mask.documents)
        visible &= ids[:, None] == ids
    return visible


@pytest.mark.parametrize(
    "mask",
    [
        Mask(name="full"),
        Mask(name="causal", is_causal=True),
        Mask(name="window", window=(6, 0)),
        Mask(name="wide window", window=(40, 3)),
        Mask(name="right side", window=(None, 2)),
        Mask(name="documents", documents=DOCUMENTS),
        Mask(name="causal documents", documents=DOCUMENTS, is_causal=True),
        Mask(name="all", documents=DOCUMENTS, is_causal=True, window=(3, 1)),
    ],
    ids=lambda mask: mask.name,
)
def test_visible_pairs_are_counted(mask: Mask):
    assert mask.visible_pairs(32) == dense(mask, 32).sum()


def test_the_masks_are_those_of_the_targets():
    names = {length: [mask.name for mask in masks(length)] for length in (8192, 16384, 32768)}
    assert all(own[:2] == [FULL, "causal"] for own in names.values())
    (window,) = (mask for mask in masks(32768) if mask.window != (None, None))
    assert window.window == (1024, 0)
    packed = [mask for mask in masks(16384) if mask.documents]
    assert len(packed) == 3
    assert all(len(mask.documents) == 16 for mask in packed)
    assert all(sum(mask.documents) == 16384 for mask in packed)


def test_uneven_documents_have_no_empty_one():
    lengths = uneven(16384, 16)
    assert min(lengths) > 0
    assert max(lengths) > 2 * 1024


def test_rates_plot_and_csv(tmp_path: Path):
    choices = [
        Mask(name=FULL),
        Mask(name="causal", is_causal=True),
        Mask(name="documents", documents=DOCUMENTS),
    ]
    rows = list(measure(32, choices, Effort(rounds=3, loop_seconds=0.001), "xla"))
    kinds = {(row.direction, row.implementation) for row in rows}
    assert kinds == {("forward", "jax_flash"), *(("backward", mode) for mode in MODES)}
    assert len(rows) == len(kinds) * len(choices)
    for row in rows:
        assert row.fastest_ms <= row.median_ms <= row.slowest_ms
        rate = row.visible_pairs * row.heads / (row.median_ms / 1e3)
        assert row.pairs_per_second == pytest.approx(rate, rel=1e-2)
        if row.mask == FULL:
            assert row.relative_to_full == 1
        full = next(
            other
            for other in rows
            if (other.mask, other.direction, other.implementation)
            == (FULL, row.direction, row.implementation)
        )
        relative = row.pairs_per_second / full.pairs_per_second
        assert row.relative_to_full == pytest.approx(relative, rel=1e-2)

    path = tmp_path / "rows.csv"
    write_csv(rows, path)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["mask"] for line in lines] == [row.mask for row in rows]
    assert list(lines[0]) == list(Row.__dataclass_fields__)
    # Another length has other masks than this one.
    rows += [replace(row, length=64) for row in rows if row.mask != "causal"]
    plot(rows, path.with_suffix(".png"), "title")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["visible_area"])
    cpus = visible_area.jax.devices("cpu")
    monkeypatch.setattr(visible_area.jax, "devices", lambda: cpus)
    assert visible_area.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
