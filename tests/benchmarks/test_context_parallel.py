"""The comparison of several GPUs with one runs, here on simulated devices, and is right."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import jax

from benchmarks import context_parallel

SMALL = context_parallel.Size(
    length=256,
    query_heads=4,
    key_heads=2,
    head_dim=16,
    dtype="bfloat16",
    deterministic=True,
    rounds=1,
    calls=1,
)


def test_every_placement_is_measured_and_agrees_with_one_device(tmp_path: Path) -> None:
    rows = context_parallel.measure(SMALL, jax.devices("cpu")[:2])
    assert [row.placement for row in rows] == [
        "one GPU",
        "data",
        "heads",
        "context, all_gather",
        "context, ring",
        "context, all_to_all",
    ]
    assert [row.devices for row in rows] == [1, 2, 2, 2, 2, 2]
    assert rows[0].speedup == 1
    for row in rows:
        assert row.same_bits
        assert row.worst_gradient < 4e-3
        assert row.fastest_milliseconds > 0
        # Only the ring rounds partial results.
        assert (row.output_differs > 0) == (row.placement == "context, ring")

    path = tmp_path / "rows.csv"
    context_parallel.write_csv(rows, path)
    with path.open() as file:
        assert [line["placement"] for line in csv.DictReader(file)][:2] == ["one GPU", "data"]
    assert context_parallel.plot(path).read_bytes().startswith(b"\x89PNG")


def test_it_is_refused_without_several_gpus() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "benchmarks.context_parallel"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 2
    assert "this compares several GPUs with one" in outcome.stderr
