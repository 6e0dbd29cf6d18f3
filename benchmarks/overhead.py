"""What a call costs beside its kernels, and how fast short sequences are.

    python -m benchmarks.overhead [--output DIRECTORY]

Times compiled programs of one tiny attention call and of many in a row, ours beside cuDNN's and
beside a multiplication, which costs what any program does; and of short sequences, and of few
queries of many keys, several calls in a row, so that the GPU and not Python is what takes time.
Writes DATE_GPU_overhead.csv and .json.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import describe_environment, slug
from benchmarks.implementations import IMPLEMENTATIONS, Attention
from benchmarks.programs import Call, make_operands
from benchmarks.timing import seconds_of
from jax_flash.testing import Case

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is timed, and how much of it.

    Attributes:
        case: the attention call.
        attentions: calls of it that a program has, one after the other.
        rounds: turns of each program.
        calls: of the program in each turn.
        with_gradients: whether forward and backward together are timed, too.
    """

    case: Case
    attentions: int
    rounds: int
    calls: int
    with_gradients: bool = True


TINY = Case(
    name="tiny",
    tags=frozenset({"bench"}),
    batch=1,
    queries=128,
    keys=128,
    heads=1,
    key_heads=1,
    head_dim=64,
    value_dim=64,
    is_causal=True,
)
SUBJECTS = [
    *(Subject(case=TINY, attentions=count, rounds=9, calls=160) for count in (1, 32)),
    *(
        Subject(
            case=replace(
                TINY,
                name=f"short-{'causal' if is_causal else 'full'}-{length}-head-dim-{head_dim}",
                batch=32,
                queries=length,
                keys=length,
                heads=16,
                key_heads=16,
                head_dim=head_dim,
                value_dim=head_dim,
                is_causal=is_causal,
            ),
            attentions=8,
            rounds=5,
            calls=32,
        )
        for head_dim in (64, 128)
        for is_causal in (False, True)
        for length in (128, 256, 512)
    ),
    *(
        Subject(
            case=replace(
                TINY,
                name=f"few-queries-{length}-of-8192-keys",
                batch=32,
                queries=length,
                keys=8192,
                heads=32,
                key_heads=8,
                head_dim=128,
                value_dim=128,
                is_causal=False,
            ),
            attentions=4,
            rounds=5,
            calls=16,
            with_gradients=False,  # cuDNN has none for a single query
        )
        for length in (1, 16, 64)
    ),
]
NAMES = ("jax_flash", "jax_flash deterministic", "cuDNN")
MULTIPLICATION = "multiplication"
QUEUED = 16
"""Calls that are started before waiting for them; PJRT lets 32 be in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV: a program's costs, medians over rounds, in microseconds."""

    problem: str
    implementation: str
    direction: str
    attentions_per_program: int
    start_us: float
    """Until a call of the program returns to Python, its work still under way."""
    start_us_per_attention: float
    run_us: float
    """From one call to the next, when many are queued: the slower of the host and the GPU."""
    run_us_per_attention: float
    rounds: int


def programs(attention: Attention, count: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields programs of `count` attention calls, each of the one before it, by direction."""

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        for _ in range(count):
            query = attention(query, key, value)
        return query

    def both(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        output, pull_back = jax.vjp(forward, query, key, value)
        return output, pull_back(output)

    yield "forward", jax.jit(forward)
    yield "forward and backward", jax.jit(both)


def attention_of(name: str, case: Case) -> Attention:
    """Returns what is timed under a name."""
    return multiplication if name == MULTIPLICATION else IMPLEMENTATIONS[name].make(case)


def measure(subject: Subject, names: Sequence[str]) -> Iterator[Row]:
    """Times the programs of a subject, those of one direction in turns."""
    operands = make_operands(subject.case)[:3]
    by_direction: dict[str, dict[str, Call]] = {}
    for name in names:
        attention = attention_of(name, subject.case)
        for direction, program in programs(attention, subject.attentions):
            if direction != "forward" and not subject.with_gradients:
                continue
            # Called as users do, through `jit`.
            by_direction.setdefault(direction, {})[name] = partial(program, *operands)
    # Compiles, and warms up. Not in several threads: on an H200 XLA once failed to record a CUDA
    # graph while other programs ran for the first time ("capturing stream has unjoined work").
    for chosen in by_direction.values():
        for call in chosen.values():
            seconds_of(call, 3)
    for direction, chosen in by_direction.items():
        starts, runs = {name: [] for name in chosen}, {name: [] for name in chosen}
        for _ in range(subject.rounds):
            for name, call in chosen.items():
                starts[name].append(_seconds_to_start(call, subject.calls))
                runs[name].append(seconds_of(call, subject.calls))
        for name in chosen:
            yield _row(subject, name, direction, (starts[name], runs[name]))


def _seconds_to_start(call: Call, count: int) -> float:
    """Seconds until a call returns, with the GPU never far behind."""
    total = 0.0
    for _ in range(max(1, count // QUEUED)):
        start = time.perf_counter()
        results = [call() for _ in range(QUEUED)]
        total += time.perf_counter() - start
        jax.block_until_ready(results)
    return total / max(1, count // QUEUED) / QUEUED


def _row(
    subject: Subject, name: str, direction: str, seconds: tuple[list[float], list[float]]
) -> Row:
    start, run = (float(np.median(own)) * 1e6 for own in seconds)
    return Row(
        problem=subject.case.name,
        implementation=name,
        direction=direction,
        attentions_per_program=subject.attentions,
        start_us=round(start, 2),
        start_us_per_attention=round(start / subject.attentions, 2),
        run_us=round(run, 2),
        run_us_per_attention=round(run / subject.attentions, 2),
        rounds=subject.rounds,
    )


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def multiplication(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """What is no attention, but depends on all operands and has gradients."""
    return query * key * jnp.cos(value)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description="Times what a call costs by itself."
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"JAX's first device is {device.device_kind}; this needs a GPU", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d}_{slug(device.device_kind)}_overhead"
    path = options.output / f"{stem}.csv"
    rows = []
    for subject in SUBJECTS:
        names = [*NAMES, MULTIPLICATION] if subject.case is TINY else NAMES
        for row in measure(subject, names):
            rows.append(row)
            print(
                f"{row.problem:30}{row.implementation:25}{row.direction:21}"
                f"{row.attentions_per_program:3} a program: starts in {row.start_us:8.1f} us, "
                f"{row.run_us_per_attention:8.2f} us an attention",
                flush=True,
            )
    write_csv(rows, path)
    path.with_suffix(".json").write_text(json.dumps(describe_environment(), indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
