"""What a table of results says: our speed over that of the fastest of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from benchmarks.problems import BACKWARD, DIRECTIONS, FORWARD, MATRIX_PRODUCT
from benchmarks.rows import Row

OURS, DETERMINISTIC = "jax_flash", "jax_flash deterministic"
NOT_PEERS = frozenset({OURS, DETERMINISTIC, "chunked", MATRIX_PRODUCT})

Speeds = dict[str, float]
"""TFLOP/s by implementation."""


def comparison(rows: Iterable[Row]) -> str:
    """Returns lines of geometric means and smallest ratios, for people."""
    return "\n".join(_lines(_by_problem(rows)))


def _by_problem(rows: Iterable[Row]) -> dict[tuple[str, str], Speeds]:
    """Speeds by direction and problem."""
    found: dict[tuple[str, str], Speeds] = {}
    for row in rows:
        found.setdefault((row.direction, row.problem), {})[row.implementation] = row.tflops
    return found


def _lines(speeds: dict[tuple[str, str], Speeds]) -> Iterator[str]:
    for direction in DIRECTIONS:
        of_direction = {problem: own for (way, problem), own in speeds.items() if way == direction}
        yield from _line(
            f"{direction}: ours / the fastest of the others",
            {
                problem: own[OURS] / max(own[name] for name in own.keys() - NOT_PEERS)
                for problem, own in of_direction.items()
                if OURS in own and own.keys() - NOT_PEERS
            },
        )
        for name in ("cuDNN", "FA3", "FA4"):
            yield from _line(f"{direction}: ours / {name}", _ratios(of_direction, OURS, name))
        if direction == FORWARD:
            ratios = _ratios(of_direction, OURS, MATRIX_PRODUCT)
            yield from _line(f"{direction}: ours / {MATRIX_PRODUCT}", ratios)
        if direction == BACKWARD:
            for name in (OURS, "FA4"):
                ratios = _ratios(of_direction, DETERMINISTIC, name)
                yield from _line(f"{direction}: ours, deterministic / {name}", ratios)


def _ratios(speeds: dict[str, Speeds], above: str, below: str) -> dict[str, float]:
    return {
        problem: own[above] / own[below]
        for problem, own in speeds.items()
        if above in own and below in own
    }


def _line(words: str, ratios: dict[str, float]) -> Iterator[str]:
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        lowest = min(ratios, key=ratios.__getitem__)
        yield (
            f"{words}: {mean:.3f} in the geometric mean of {len(ratios)}, "
            f"at least {ratios[lowest]:.3f} ({lowest})"
        )
