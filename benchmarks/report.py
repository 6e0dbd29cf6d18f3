"""Rows of results as CSV, and what people look at: a plot and a table.

python -m benchmarks.report benchmarks/results/DATE_GPU.csv     # PNG beside it, table printed
"""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.problems import BACKWARD_FLOPS_RATIO, forward_flops
from benchmarks.timing import Timing
from jax_flash.testing import Case

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV: a problem, an implementation, a direction and its timing."""

    problem: str
    head_dim: int
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
    ratio = BACKWARD_FLOPS_RATIO if timing.direction == "backward" else 1
    return Row(
        problem=case.name,
        head_dim=case.head_dim,
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
        tflops=round(ratio * forward_flops(case) / timing.median / 1e12, 2),
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
    with path.open(newline="") as file:
        return [
            Row(**{field.name: convert[str(field.type)](line[field.name]) for field in fields(Row)})
            for line in csv.DictReader(file)
        ]


def table(rows: list[Row]) -> str:
    """Returns the TFLOP/s of every problem and implementation as a Markdown table."""
    columns = list(
        dict.fromkeys(
            (row.direction, row.implementation)
            for direction in DIRECTIONS
            for row in rows
            if row.direction == direction
        )
    )
    titles = ["D", "mask", "B", "T", "N/K", *(f"{way}: {name}" for way, name in columns)]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    by_problem: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        facts = (row.head_dim, row.mask, row.batch, row.length, f"{row.heads}/{row.key_heads}")
        cells = by_problem.setdefault(tuple(map(str, facts)), {})
        cells[row.direction, row.implementation] = row
    for facts, cells in by_problem.items():
        speeds = [f"{cells[key].tflops:.0f}" if key in cells else "" for key in columns]
        lines.append(f"| {' | '.join([*facts, *speeds])} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draws TFLOP/s over the length: a panel for each direction, head size and mask."""
    from matplotlib.figure import Figure  # not needed to measure, and not on every machine

    plain = [row for row in rows if row.heads == row.key_heads]
    kinds = sorted(
        {(row.head_dim, row.mask) for row in plain}, key=lambda k: (k[0], k[1] != "full")
    )
    figure = Figure(figsize=(4 * len(kinds), 7), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
    backward = [row for row in plain if row.direction == "backward"]
    names = list(dict.fromkeys(row.implementation for row in backward))
    for line, direction in enumerate(DIRECTIONS):
        for panel, (head_dim, mask) in zip(panels[line], kinds, strict=True):
            chosen = [
                row
                for row in plain
                if (row.direction, row.head_dim, row.mask) == (direction, head_dim, mask)
            ]
            lengths = sorted({row.length for row in chosen})
            width = 0.8 / len(names)
            for index, name in enumerate(names):
                speeds = {row.length: row.tflops for row in chosen if row.implementation == name}
                places = [lengths.index(length) + index * width for length in speeds]
                panel.bar(places, list(speeds.values()), width, label=name, color=f"C{index}")
            panel.set_xticks([i + 0.4 - width / 2 for i in range(len(lengths))], map(str, lengths))
            panel.set_title(f"{direction}, D = {head_dim}, {mask}")
            panel.grid(axis="y", alpha=0.3)
        panels[line][0].set_ylabel("TFLOP/s")
    for panel in panels[-1]:
        panel.set_xlabel("T = S (16384 tokens in all)")
    figure.legend(*panels[-1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Plots and prints the results in a CSV file."""
    if len(sys.argv) != 2:
        raise SystemExit(f"{sys.argv[0]}: give one CSV file that benchmarks.run wrote")
    path = Path(sys.argv[1])
    rows = read_csv(path)
    plot(rows, path.with_suffix(".png"), path.stem.replace("_", ", "))
    print(table(rows))


if __name__ == "__main__":
    main()
