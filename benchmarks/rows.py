"""Rows of results, and the CSV files that keep them."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.problems import flops
from benchmarks.timing import Timing
from jax_flash.testing import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV: a problem, an implementation, a direction and its timing."""

    problem: str
    head_dim: int
    value_dim: int
    mask: str
    batch: int
    length: int
    heads: int
    key_heads: int
    dtype: str
    implementation: str
    direction: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    rounds: int
    calls_per_round: int
    tflops: float
    """10**12 floating-point operations a second at the median, by the papers' count."""
    same_bits: bool
    sm_clock_mhz: str
    """Read after the loops of the problem; empty if unknown."""


def row_of(case: Case, timing: Timing, sm_clock_mhz: str) -> Row:
    """Returns the row of one timing."""
    work = flops(case, timing.implementation, timing.direction)
    return Row(
        problem=case.name,
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        mask="causal" if case.is_causal else "full",
        batch=case.batch,
        length=case.queries,
        heads=case.heads,
        key_heads=case.key_heads,
        dtype=case.dtype,
        implementation=timing.implementation,
        direction=timing.direction,
        median_ms=round(timing.median * 1e3, 5),
        fastest_ms=round(min(timing.seconds) * 1e3, 5),
        slowest_ms=round(max(timing.seconds) * 1e3, 5),
        rounds=len(timing.seconds),
        calls_per_round=timing.calls,
        tflops=round(work / timing.median / 1e12, 2),
        same_bits=timing.same_bits,
        sm_clock_mhz=sm_clock_mhz,
    )


def write_csv(rows: list[Row], path: Path) -> None:
    """Writes the rows."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_csv(path: Path) -> list[Row]:
    """Reads what `write_csv` wrote."""
    convert = {"int": int, "float": float, "str": str, "bool": lambda text: text == "True"}

    def row_in(line: dict[str, str]) -> Row:
        # Results from before value dimensions differed do not have that column.
        line = {"value_dim": line["head_dim"]} | line
        return Row(
            **{field.name: convert[str(field.type)](line[field.name]) for field in fields(Row)}
        )

    with path.open(newline="") as file:
        return [row_in(line) for line in csv.DictReader(file)]
