"""The benchmark of what calls cost by themselves, on a CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import overhead
from benchmarks.overhead import (
    MULTIPLICATION,
    SUBJECTS,
    TINY,
    Subject,
    measure,
    multiplication,
    programs,
    write_csv,
)
from benchmarks.programs import make_operands


def test_programs_hold_as_many_calls_as_they_say():
    query, key, value = make_operands(TINY)[:3]
    by_direction = dict(programs(multiplication, 2))
    twice = multiplication(multiplication(query, key, value), key, value)
    np.testing.assert_allclose(
        np.asarray(by_direction["forward"](query, key, value), np.float32),
        np.asarray(twice, np.float32),
        rtol=0.05,
        atol=0.05,
    )
    output, gradients = by_direction["forward and backward"](query, key, value)
    assert output.shape == query.shape
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]
    assert all(bool(jnp.any(gradient != 0)) for gradient in gradients)


def test_the_subjects_are_those_of_the_targets():
    few = [subject.case for subject in SUBJECTS if subject.case.keys > 512]
    assert [(case.queries, case.heads, case.key_heads) for case in few] == [
        (length, 32, 8) for length in (1, 16, 64)
    ]
    cases = [subject.case for subject in SUBJECTS if subject.case is not TINY]
    short = [case for case in cases if case not in few]
    assert len({case.name for case in short}) == len(short) == 12
    assert {(case.batch, case.heads) for case in short} == {(32, 16)}
    assert {case.queries for case in short} == {128, 256, 512}
    assert {case.head_dim for case in short} == {64, 128}
    assert {subject.attentions for subject in SUBJECTS if subject.case is TINY} == {1, 32}


def test_gradients_can_be_left_out():
    subject = Subject(case=TINY, attentions=1, rounds=1, calls=1, with_gradients=False)
    assert [row.direction for row in measure(subject, ["chunked"])] == ["forward"]


@pytest.mark.parametrize("count", [1, 2])
def test_every_program_has_a_row(count: int, tmp_path: Path):
    subject = Subject(case=TINY, attentions=count, rounds=2, calls=2)
    rows = list(measure(subject, ["chunked", MULTIPLICATION]))
    kinds = {(row.implementation, row.direction) for row in rows}
    assert len(rows) == len(kinds) == 2 * 2
    assert {row.attentions_per_program for row in rows} == {count}
    assert {row.problem for row in rows} == {"tiny"}
    for row in rows:
        assert row.rounds == 2
        assert row.start_us > 0
        assert row.run_us > 0
        per_attention = row.run_us / row.attentions_per_program
        assert row.run_us_per_attention == pytest.approx(per_attention, abs=0.01)
    write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        assert [line["implementation"] for line in csv.DictReader(file)] == [
            row.implementation for row in rows
        ]


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["overhead"])
    cpus = jax.devices("cpu")
    monkeypatch.setattr(overhead.jax, "devices", lambda: cpus)
    assert overhead.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
