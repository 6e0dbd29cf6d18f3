"""Times several implementations of one problem in one loop, so that all meet the same clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.implementations import BACKWARD_ONLY, IMPLEMENTATIONS
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
        direction: "forward" or "backward".
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


def operands(case: Case) -> tuple[jax.Array, ...]:
    """Returns query, key, value and the output's cotangent: normal numbers."""
    rows, keys = (case.batch, case.queries, case.heads), (case.batch, case.keys, case.key_heads)
    shapes = (
        (*rows, case.head_dim),
        (*keys, case.head_dim),
        (*keys, case.value_dim),
        (*rows, case.value_dim),
    )
    seeds = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(seed, shape, jnp.dtype(case.dtype))
        for seed, shape in zip(seeds, shapes, strict=True)
    )


def time_case(case: Case, names: list[str], effort: Effort) -> list[Timing]:
    """Times the forward and then the backward pass of the named implementations."""
    *inputs, d_output = operands(case)
    attentions = {name: IMPLEMENTATIONS[name](case) for name in names}
    forward = {
        name: _call(jax.jit(attention), *inputs)
        for name, attention in attentions.items()
        if name not in BACKWARD_ONLY
    }
    timings = _time_in_turns("forward", forward, effort)
    backward = {
        name: _backward_call(attention, inputs, d_output) for name, attention in attentions.items()
    }
    return timings + _time_in_turns("backward", backward, effort)


Call = Callable[[], Any]


def _call(function: Callable[..., Any], *arguments: Any) -> Call:
    return lambda: function(*arguments)


def _backward_call(attention: Callable[..., Any], inputs: Any, d_output: jax.Array) -> Call:
    """The backward pass alone: what the forward pass keeps is computed here, once."""
    _, pull_back = jax.jit(lambda *arrays: jax.vjp(attention, *arrays))(*inputs)
    return _call(jax.jit(lambda pull_back, d_output: pull_back(d_output)), pull_back, d_output)


def _time_in_turns(direction: str, calls: Mapping[str, Call], effort: Effort) -> list[Timing]:
    same_bits = {name: _has_same_bits(call) for name, call in calls.items()}
    once = {name: _seconds(call, 1) for name, call in calls.items()}
    counts = {name: max(1, round(effort.loop_seconds / seconds)) for name, seconds in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(effort.rounds):
        for name, call in calls.items():
            if round_number < 3 or once[name] < SLOW_CALL_SECONDS:
                seconds[name].append(_seconds(call, counts[name]))
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


def _seconds(call: Call, count: int) -> float:
    """Seconds a call, of `count` calls queued one after the other."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / count


def _has_same_bits(call: Call) -> bool:
    """Compiles and warms up, and compares the results of three calls bit for bit."""
    first = call()
    return all(bool(_equal(first, call())) for _ in range(2))


@jax.jit
def _equal(left: Any, right: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return jnp.stack([jnp.all(a.view(jnp.uint16) == b.view(jnp.uint16)) for a, b in pairs]).all()
