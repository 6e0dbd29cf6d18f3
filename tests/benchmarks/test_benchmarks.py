"""The benchmark's own arithmetic and its gate, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import correctness, first_call, run
from benchmarks.comparison import comparison
from benchmarks.implementations import IMPLEMENTATIONS, Attention
from benchmarks.problems import (
    BOTH,
    DIRECTIONS,
    LAYER,
    MATRIX_PRODUCT,
    flops,
    forward_flops,
    is_beside_matrix_product,
    problems,
)
from benchmarks.programs import compile_programs, make_operands
from benchmarks.report import plot, table
from benchmarks.rows import Row, read_csv, row_of, write_csv
from benchmarks.timing import Effort, Timing, order_of_round, time_case, time_in_turns
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


def test_the_matrix_product_has_its_own_count():
    assert flops(SMALL, MATRIX_PRODUCT, "forward") == 2 * 8192**3
    assert flops(SMALL, "chunked", BOTH) == 3.5 * forward_flops(SMALL)


def test_the_problems_are_those_of_the_papers_and_quick_ones_are_some_of_them():
    everything = problems()
    assert len({case.name for case in everything}) == len(everything) == 40
    head_dims = {(case.head_dim, case.value_dim) for case in everything}
    assert head_dims == {(64, 64), (128, 128), (192, 128), (256, 256)}
    assert all(case.batch * case.queries == 16384 for case in everything)
    quick = problems(quick=True)
    assert 0 < len(quick) < 20
    assert all(case in everything for case in quick)
    assert sum(map(is_beside_matrix_product, everything)) == 3


@pytest.fixture
def rows() -> list[Row]:
    layer = replace(SMALL, name=LAYER)
    programs = {"chunked": compile_programs(layer, IMPLEMENTATIONS["chunked"].make(layer))}
    timings = time_case(layer, programs, Effort(rounds=3, loop_seconds=0.001))
    return [row_of(layer, timing, "") for timing in timings]


def test_all_directions_are_timed(rows: list[Row]):
    assert tuple(row.direction for row in rows) == DIRECTIONS
    for row in rows:
        assert row.rounds == 3
        assert 0 < row.fastest_ms <= row.median_ms <= row.slowest_ms
        assert row.same_bits


def test_the_matrix_product_is_timed_in_turns_with_the_forward_pass():
    chunked = IMPLEMENTATIONS["chunked"].make(SMALL)
    programs = {
        "without forward": compile_programs(SMALL, chunked, with_forward=False),
        "with": compile_programs(SMALL, chunked),
    }
    product = jax.jit(lambda: jnp.ones((8, 8), jnp.bfloat16))
    effort = Effort(rounds=3, loop_seconds=0.001)
    timings = time_case(SMALL, programs, effort, matrix_product=product)
    assert [(timing.direction, timing.implementation) for timing in timings] == [
        ("forward", "with"),
        ("forward", MATRIX_PRODUCT),
        ("backward", "without forward"),
        ("backward", "with"),
    ]


def test_different_bits_are_noticed():
    numbers = iter(range(100))
    calls = {"x": lambda: jnp.float32(next(numbers))}
    (timing,) = time_in_turns("forward", calls, Effort(rounds=3, loop_seconds=0.0))
    assert not timing.same_bits


def test_every_implementation_is_timed_in_the_order_of_the_round():
    order: list[str] = []

    def recorded(name: str) -> Callable[[], jax.Array]:
        return lambda: order.append(name) or jnp.zeros(1)

    calls = {name: recorded(name) for name in "abc"}
    timings = time_in_turns("forward", calls, Effort(rounds=3, loop_seconds=0.0))
    assert [timing.implementation for timing in timings] == list("abc")
    assert order[-9:] == [name for turn in range(3) for name in order_of_round("abc", turn)]


@pytest.mark.parametrize("count", range(1, 7))
def test_each_implementation_follows_each_other_equally_often(count: int):
    names = "abcdef"[:count]
    rounds = [order_of_round(names, number) for number in range(2 * count)]
    assert all(sorted(order) == list(names) for order in rounds)
    for place in range(count):
        assert Counter(order[place] for order in rounds) == dict.fromkeys(names, 2)
    neighbours = Counter(pair for order in rounds for pair in pairwise(order))
    assert neighbours == dict.fromkeys(permutations(names, 2), 2)


def test_no_implementation_at_all_has_no_order():
    assert order_of_round((), 0) == ()


def test_programs_compute_attention_and_its_gradients():
    attention = IMPLEMENTATIONS["chunked"].make(SMALL)
    layer = replace(SMALL, name=LAYER)
    operands = make_operands(layer)
    calls = compile_programs(layer, attention).calls(operands)
    output, pull_back = jax.vjp(attention, *operands[:3])
    expected = {
        "forward": output,
        "backward": pull_back(operands[3]),
        BOTH: (output, pull_back(operands[3])),
    }
    assert calls.keys() == expected.keys()
    for direction, call in calls.items():
        pairs = zip(jax.tree.leaves(call()), jax.tree.leaves(expected[direction]), strict=True)
        for actual, wanted in pairs:
            np.testing.assert_allclose(
                np.asarray(actual, np.float32), np.asarray(wanted, np.float32), rtol=0.02, atol=0.02
            )


def test_results_of_before_value_dimensions_differed_can_be_read():
    path = Path(run.RESULTS) / "2026-11-29_nvidia-h200.csv"
    assert {(row.head_dim, row.value_dim) for row in read_csv(path)} == {(64, 64), (128, 128)}


def test_the_comparison_is_with_the_fastest_of_the_others():
    def row(problem: str, implementation: str, tflops: float, direction: str = "forward") -> Row:
        timing = replace(TIMING, implementation=implementation, direction=direction)
        return replace(row_of(SMALL, timing, ""), problem=problem, tflops=tflops)

    rows = [
        row("a", "jax_flash", 800.0),
        row("a", "cuDNN", 400.0),
        row("a", "FA4", 200.0),
        row("a", MATRIX_PRODUCT, 1000.0),
        row("b", "jax_flash", 200.0),
        row("b", "FA4", 400.0),
        row("c", "FA4", 1.0),
        row("a", "jax_flash", 100.0, "backward"),
        row("a", "jax_flash deterministic", 97.0, "backward"),
    ]
    lines = comparison(rows).splitlines()
    assert lines == [
        "forward: ours / the fastest of the others: 1.000 in the geometric mean of 2, at least "
        "0.500 (b)",
        "forward: ours / cuDNN: 2.000 in the geometric mean of 1, at least 2.000 (a)",
        "forward: ours / FA4: 1.414 in the geometric mean of 2, at least 0.500 (b)",
        f"forward: ours / {MATRIX_PRODUCT}: 0.800 in the geometric mean of 1, at least 0.800 (a)",
        "backward: ours, deterministic / jax_flash: 0.970 in the geometric mean of 1, at least "
        "0.970 (a)",
    ]


def test_csv_table_and_plot(rows: list[Row], tmp_path: Path):
    others = [replace(row, implementation="other", key_heads=2) for row in rows]
    rows = [*rows, *others, *(replace(row, head_dim=192) for row in others)]
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
    assert lines[4].startswith("| 192 (64) | causal | 1 | 40 | 2/2 |  | ")


def test_the_gate_passes_what_is_right():
    assert correctness.check_all([SMALL], ["chunked"]) == []


def replace_chunked(monkeypatch: pytest.MonkeyPatch, attention: Attention) -> None:
    chunked = replace(IMPLEMENTATIONS["chunked"], make=lambda case: attention)
    monkeypatch.setitem(IMPLEMENTATIONS, "chunked", chunked)


def test_nothing_is_timed_if_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch):
    right = IMPLEMENTATIONS["chunked"].make(SMALL)
    replace_chunked(monkeypatch, lambda *operands: right(*operands) * jnp.bfloat16(1.02))
    monkeypatch.setattr(run, "time_case", lambda *arguments: pytest.fail("it was timed"))
    monkeypatch.setattr(run, "problems", lambda quick: [replace(SMALL, is_causal=True)])
    with pytest.raises(AssertionError, match=r"(?s)chunked is wrong on gate-.*output "):
        list(run.measure(["chunked"], quick=True, failures=[]))


def test_what_cannot_be_computed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch):
    def refuse(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        raise NotImplementedError("no such kernel")

    replace_chunked(monkeypatch, refuse)
    monkeypatch.setattr(run, "problems", lambda quick: [SMALL])
    monkeypatch.setattr(run, "matrix_product_call", lambda: None)
    failures: list[str] = []
    assert list(run.measure(["chunked"], quick=True, failures=failures)) == [[]]
    in_the_gate, when_compiled = failures
    assert in_the_gate.startswith("chunked, Kind(head_dim=64")
    assert in_the_gate.endswith("NotImplementedError: no such kernel")
    assert when_compiled == "chunked, small-causal: NotImplementedError: no such kernel"


def test_implementations_that_are_not_installed_are_refused_by_name(monkeypatch, capsys):
    absent = replace(IMPLEMENTATIONS["FA4"], package="a_package_that_nobody_has")
    monkeypatch.setitem(IMPLEMENTATIONS, "FA4", absent)
    monkeypatch.setattr("sys.argv", ["run"])
    assert "FA4" not in run.parse_options().implementations
    monkeypatch.setattr("sys.argv", ["run", "--implementations", "FA4"])
    with pytest.raises(SystemExit):
        run.parse_options()
    assert "FA4: a_package_that_nobody_has" in capsys.readouterr().err


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
