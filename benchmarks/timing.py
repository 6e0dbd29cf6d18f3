"""Times several programs for one problem in one loop, so that all meet the same clocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problems import DIRECTIONS, FORWARD, MATRIX_PRODUCT
from benchmarks.programs import Call, Programs, make_operands
from jax_flash.testing import Case

SLOW_CALL_SECONDS = 0.1
"""A call that takes longer is timed alone, and in fewer rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: timed loops of each implementation, in turns; at least 3.
        loop_seconds: duration of one loop.
    """

    rounds: int
    loop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One implementation of one direction of one problem.

    Attributes:
        implementation: its name.
        direction: of `problems.DIRECTIONS`.
        seconds: of one call, in each round.
        calls: of each round.
        same_bits: whether repeated calls gave the same bits.
    """

    implementation: str
    direction: str
    seconds: tuple[float, ...]
    calls: int
    same_bits: bool

    @property
    def median(self) -> float:
        """Seconds of a call, the median of the rounds."""
        return float(np.median(self.seconds))


def time_case(
    case: Case,
    programs: Mapping[str, Programs],
    effort: Effort,
    *,
    matrix_product: Call | None = None,
) -> list[Timing]:
    """Times every direction of a problem, the implementations of each in turns.

    Args:
        case: the problem.
        programs: of each implementation, by name.
        effort: how long to measure.
        matrix_product: timed in turns with the forward pass, if given.
    """
    operands = make_operands(case)
    calls = {name: program.calls(operands) for name, program in programs.items()}
    timings = []
    for direction in DIRECTIONS:
        chosen = {name: own[direction] for name, own in calls.items() if direction in own}
        if direction == FORWARD and matrix_product is not None:
            chosen[MATRIX_PRODUCT] = matrix_product
        timings += time_in_turns(direction, chosen, effort)
    return timings


def time_in_turns(direction: str, calls: Mapping[str, Call], effort: Effort) -> list[Timing]:
    """Times the calls, loop by loop in turns; the names are those of implementations."""
    same_bits = {name: _has_same_bits(call) for name, call in calls.items()}
    once = {name: seconds_of(call, 1) for name, call in calls.items()}
    counts = {name: max(1, round(effort.loop_seconds / seconds)) for name, seconds in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(effort.rounds):
        for name in order_of_round(tuple(calls), round_number):
            if round_number < 3 or once[name] < SLOW_CALL_SECONDS:
                seconds[name].append(seconds_of(calls[name], counts[name]))
    return [
        Timing(
            implementation=name,
            direction=direction,
            seconds=tuple(seconds[name]),
            calls=counts[name],
            same_bits=same_bits[name],
        )
        for name in calls
    ]


def order_of_round(names: Sequence[str], round_number: int) -> tuple[str, ...]:
    """Returns the names in the order of a round.

    The GPU's clocks depend on what ran before, so over twice as many rounds as there are names each
    follows each other one equally often, and has every place equally often (a Williams design).
    """
    count = len(names)
    # 0, 1, n - 1, 2, n - 2, ...: neighbours differ by each number once, if n is even.
    places = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    if round_number // max(count, 1) % 2:
        places.reverse()
    return tuple(names[(place + round_number) % count] for place in places)


def seconds_of(call: Call, count: int) -> float:
    """Seconds a call, of `count` calls queued one after the other."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / count


def _has_same_bits(call: Call) -> bool:
    """Warms up, and compares the results of three calls bit for bit."""
    first = _flat(call())
    return all(bool(_equal(first, _flat(call()))) for _ in range(2))


def _flat(results: Any) -> list[jax.Array]:
    """Without shapes, so that results of one size share the program that compares them."""
    return [array.ravel() for array in jax.tree.leaves(results)]


@jax.jit
def _equal(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return jnp.all(a.view(bits) == b.view(bits))

    return jnp.stack([same_bits(a, b) for a, b in zip(left, right, strict=True)]).all()
