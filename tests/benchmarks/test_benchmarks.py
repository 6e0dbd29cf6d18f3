"""The benchmark's own arithmetic and its gate, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import correctness, first_call, run
from benchmarks.implementations import IMPLEMENTATIONS, chunked
from benchmarks.problems import forward_flops, problems
from benchmarks.report import Row, plot, read_csv, row_of, table, write_csv
from benchmarks.timing import Effort, Timing, time_case
from jax_flash.testing import Case

SMALL = Case(
    name="small-causal",
    tags=frozenset({"bench"}),
    batch=1,
    queries=40,
    keys=40,
    heads=2,
    key_heads=1,
    head_dim=64,
    value_dim=64,
    is_causal=True,
)
TIMING = Timing(
    implementation="chunked",
    direction="backward",
    seconds=(0.004, 0.002, 0.009),
    calls=7,
    same_bits=True,
)


def test_flops_are_counted_as_in_the_papers():
    # 4 B N T S D, halved when causal.
    assert forward_flops(replace(SMALL, is_causal=False)) == 4 * 1 * 2 * 40 * 40 * 64
    assert forward_flops(SMALL) == 2 * 1 * 2 * 40 * 40 * 64


def test_a_row_is_at_the_median_with_the_backward_pass_counted_two_and_a_half_times():
    row = row_of(SMALL, TIMING, "1980")
    assert (row.fastest_ms, row.median_ms, row.slowest_ms) == (2.0, 4.0, 9.0)
    big = replace(SMALL, queries=4096, keys=4096, heads=16, key_heads=16)
    expected = 2.5 * 2 * 16 * 4096**2 * 64 / 0.004 / 1e12
    assert row_of(big, TIMING, "").tflops == pytest.approx(expected, abs=0.01)


def test_the_problems_are_those_of_the_papers_and_quick_ones_are_some_of_them():
    everything = problems()
    assert len(everything) == 26
    assert {case.head_dim for case in everything} == {64, 128}
    assert all(case.batch * case.queries == 16384 for case in everything)
    quick = problems(quick=True)
    assert 0 < len(quick) < 10
    assert all(case in everything for case in quick)


@pytest.fixture
def rows() -> list[Row]:
    names = ["chunked"]
    timings = time_case(SMALL, names, Effort(rounds=3, loop_seconds=0.001))
    return [row_of(SMALL, timing, "") for timing in timings]


def test_both_directions_are_timed(rows: list[Row]):
    assert [row.direction for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row.rounds == 3
        assert 0 < row.fastest_ms <= row.median_ms <= row.slowest_ms
        assert row.same_bits


def test_csv_table_and_plot(rows: list[Row], tmp_path: Path):
    rows = [*rows, *(replace(row, implementation="other", key_heads=2) for row in rows)]
    path = tmp_path / "rows.csv"
    write_csv(rows, path)
    assert read_csv(path) == rows
    plot(rows, path.with_suffix(".png"), "title")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    lines = table(rows).splitlines()
    start = "| D | mask | B | T | N/K | forward: chunked | forward: other | backward: chunked | "
    assert lines[0].startswith(start)
    assert lines[2].startswith("| 64 | causal | 1 | 40 | 2/1 | ")
    assert lines[3].startswith("| 64 | causal | 1 | 40 | 2/2 |  | ")


def test_the_gate_passes_what_is_right():
    correctness.check_all([SMALL], ["chunked"])


def test_nothing_is_timed_if_a_result_is_wrong(monkeypatch):
    def wrong(case: Case):
        right = chunked(case)
        return lambda query, key, value: right(query, key, value) * jnp.bfloat16(1.02)

    monkeypatch.setitem(IMPLEMENTATIONS, "chunked", wrong)
    monkeypatch.setattr(run, "time_case", lambda *arguments: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match=r"(?s)chunked is wrong on gate-.*output "):
        list(run.measure(["chunked"], quick=True))


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run"])
    cpus = jax.devices("cpu")
    monkeypatch.setattr(run.jax, "devices", lambda: cpus)
    assert run.main() == 2
    assert "CUDA GPU" in capsys.readouterr().err


def test_the_first_call_is_measured_in_a_process_without_jax():
    code = "import sys, benchmarks.first_call; sys.exit('jax' in sys.modules)"
    root = Path(first_call.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
