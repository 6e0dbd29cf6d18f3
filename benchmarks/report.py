"""What people look at of the results: a plot, a table, and how we compare with the others.

python -m benchmarks.report benchmarks/results/DATE_GPU.csv     # PNG beside it, the rest printed
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.comparison import comparison
from benchmarks.problems import DIRECTIONS
from benchmarks.rows import Row, read_csv


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
        size = f"{row.head_dim}" + f" ({row.value_dim})" * (row.value_dim != row.head_dim)
        facts = (size, row.mask, row.batch, row.length, f"{row.heads}/{row.key_heads}")
        cells = by_problem.setdefault(tuple(map(str, facts)), {})
        cells[row.direction, row.implementation] = row
    for facts, cells in by_problem.items():
        speeds = [f"{cells[key].tflops:.0f}" if key in cells else "" for key in columns]
        lines.append(f"| {' | '.join([*facts, *speeds])} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draws TFLOP/s over the length: a panel for each direction, head size and mask."""
    from matplotlib.figure import Figure  # not needed to measure, and not on every machine

    plain = [row for row in rows if row.heads == row.key_heads and row.direction in DIRECTIONS[:2]]
    kinds = sorted(
        {(row.head_dim, row.value_dim, row.mask) for row in plain},
        key=lambda kind: (*kind[:2], kind[2] != "full"),
    )
    figure = Figure(figsize=(4 * len(kinds), 7), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
    names = list(dict.fromkeys(row.implementation for row in plain))
    for line, direction in enumerate(DIRECTIONS[:2]):
        for panel, kind in zip(panels[line], kinds, strict=True):
            head_dim, value_dim, mask = kind
            chosen = [
                row
                for row in plain
                if (row.direction, row.head_dim, row.value_dim, row.mask) == (direction, *kind)
            ]
            _draw_bars(panel, chosen, names)
            size = f"{head_dim}" if value_dim == head_dim else f"{head_dim}, Dv = {value_dim}"
            panel.set_title(f"{direction}, D = {size}, {mask}")
            panel.grid(axis="y", alpha=0.3)
        panels[line][0].set_ylabel("TFLOP/s")
    for panel in panels[-1]:
        panel.set_xlabel("T = S (16384 tokens in all)")
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_bars(panel: Any, rows: list[Row], names: list[str]) -> None:
    """Draws bars side by side at each length, in the colours of all names."""
    lengths = sorted({row.length for row in rows})
    present = [name for name in names if any(row.implementation == name for row in rows)]
    width = 0.8 / len(present)
    for index, name in enumerate(present):
        speeds = {row.length: row.tflops for row in rows if row.implementation == name}
        places = [lengths.index(length) + index * width for length in speeds]
        colour = f"C{names.index(name)}"
        panel.bar(places, list(speeds.values()), width, label=name, color=colour)
    panel.set_xticks([i + 0.4 - width / 2 for i in range(len(lengths))], map(str, lengths))


def main() -> None:
    """Plots and prints the results in a CSV file."""
    if len(sys.argv) != 2:
        raise SystemExit(f"{sys.argv[0]}: give one CSV file that benchmarks.run wrote")
    path = Path(sys.argv[1])
    rows = read_csv(path)
    plot(rows, path.with_suffix(".png"), path.stem.replace("_", ", "))
    print(table(rows))
    print(comparison(rows))


if __name__ == "__main__":
    main()
