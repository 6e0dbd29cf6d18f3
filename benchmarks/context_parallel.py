"""Times one attention layer on several GPUs: data, head and context parallelism beside one GPU.

    python -m benchmarks.context_parallel
    python -m benchmarks.context_parallel --plot benchmarks/results/DATE_DEVICE_context_parallel.csv

Every placement does the same work: a batch of as many sequences as there are GPUs, forward and
backward. Placements take turns, so that all meet the same clocks.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import jax_flash
from benchmarks.environment import describe_environment, slug
from jax_flash import context_parallel

RESULTS = Path(__file__).parent / "results"
AXIS = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The layer, and how long to measure.

    Attributes:
        length: T and S.
        query_heads: N.
        key_heads: K.
        head_dim: D and Dv.
        dtype: of query, key and value.
        deterministic: gradients with the same bits on every run.
        rounds: turns of each placement.
        calls: queued one after the other in a turn.
    """

    length: int = 32768
    query_heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    deterministic: bool = False
    rounds: int = 7
    calls: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the results.

    Attributes:
        placement: which arrays' axis is spread over the GPUs.
        devices: how many GPUs.
        batch: sequences of the whole call.
        length: T and S.
        deterministic: whether gradients had to be reproducible.
        milliseconds: forward and backward, median of the rounds.
        fastest_milliseconds: of the fastest round.
        speedup: over one GPU, of the medians.
        same_bits: whether a second run gave the same bits, gradients too.
        output_differs: elements of the output that are not bit for bit those of one GPU.
        worst_gradient: of dQ, dK, dV, the norm of the difference to one GPU's over its norm.
    """

    placement: str
    devices: int
    batch: int
    length: int
    deterministic: bool
    milliseconds: float
    fastest_milliseconds: float
    speedup: float
    same_bits: bool
    output_differs: int
    worst_gradient: float


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the arrays [B, T, heads, D] are spread, and what then computes attention.

    Attributes:
        spec: of all of them.
        attention: takes query, key and value.
        is_zigzag: whether the sequence is in zigzag order.
        devices: how many GPUs, or None for all.
    """

    spec: PartitionSpec
    attention: Attention
    is_zigzag: bool = False
    devices: int | None = None


def placements(size: Size) -> dict[str, Placement]:
    """Returns all that is compared, by name; the first is what the others are compared with."""
    options: dict[str, Any] = {"is_causal": True, "deterministic_bwd": size.deterministic}

    def whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax_flash.attention(query, key, value, **options)

    def context(mode: str) -> Attention:
        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return context_parallel.attention(
                query, key, value, axis_name=AXIS, mode=mode, order="zigzag", **options
            )

        return attention

    sequence = PartitionSpec(None, AXIS)
    return {
        "one GPU": Placement(spec=PartitionSpec(), attention=whole, devices=1),
        "data": Placement(spec=PartitionSpec(AXIS), attention=whole),
        "heads": Placement(spec=PartitionSpec(None, None, AXIS), attention=whole),
    } | {
        f"context, {mode}": Placement(spec=sequence, attention=context(mode), is_zigzag=True)
        for mode in context_parallel.MODES
    }


Call = Callable[[], tuple[jax.Array, tuple[jax.Array, ...]]]


def prepare(size: Size, placement: Placement, devices: list[Any]) -> Call:
    """Puts the operands in place and compiles; the call returns output and gradients."""
    batch = len(devices)
    used = devices[: placement.devices]
    mesh = jax.make_mesh((len(used),), (AXIS,), axis_types=(AxisType.Explicit,), devices=used)
    sharding = NamedSharding(mesh, placement.spec)
    heads = (size.query_heads, size.key_heads, size.key_heads, size.query_heads)
    operands = []
    for seed, count in enumerate(heads):
        shape = (batch, size.length, count, size.head_dim)
        array = jax.random.normal(jax.random.key(seed), shape, jnp.dtype(size.dtype))
        if placement.is_zigzag:
            array = context_parallel.to_zigzag(array, len(used), axis=1)
        operands.append(jax.device_put(array, sharding))

    @jax.jit
    def run(
        query: jax.Array, key: jax.Array, value: jax.Array, d_output: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        output, pull_back = jax.vjp(placement.attention, query, key, value)
        return output, pull_back(d_output)

    with jax.set_mesh(mesh):
        program = run.lower(*operands).compile()
    return lambda: program(*operands)


def measure(size: Size, devices: list[Any]) -> list[Row]:
    """Times every placement on the devices.

    Returns:
        A row for each.
    """
    compared = placements(size)
    calls = {
        name: prepare(size, placement, devices)
        for name, placement in tqdm(compared.items(), desc="compiling")
    }
    facts: dict[str, dict[str, Any]] = {}
    expected: list[np.ndarray] = []
    for name, call in calls.items():
        first = _on_host(call())
        pairs = zip(first, _on_host(call()), strict=True)
        same_bits = all(a.tobytes() == b.tobytes() for a, b in pairs)
        if compared[name].is_zigzag:
            backwards = np.argsort(context_parallel.zigzag_order(size.length, len(devices)))
            first = [array[:, backwards] for array in first]
        expected = expected or first
        facts[name] = {"same_bits": same_bits, **_differences(first, expected)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(size.rounds), desc="rounds"):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(size.calls - 1):
                call()
            jax.block_until_ready(call())
            seconds[name].append((time.perf_counter() - start) / size.calls)
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    alone = medians[next(iter(calls))]
    return [
        Row(
            placement=name,
            devices=compared[name].devices or len(devices),
            batch=len(devices),
            length=size.length,
            deterministic=size.deterministic,
            milliseconds=1000 * medians[name],
            fastest_milliseconds=1000 * min(seconds[name]),
            speedup=alone / medians[name],
            **facts[name],
        )
        for name in calls
    ]


def _on_host(results: tuple[jax.Array, tuple[jax.Array, ...]]) -> list[np.ndarray]:
    return [np.asarray(array) for array in jax.tree.leaves(results)]


def _differences(actual: list[np.ndarray], expected: list[np.ndarray]) -> dict[str, Any]:
    output, *gradients = zip(actual, expected, strict=True)
    errors = []
    for left, right in gradients:
        wanted = right.astype(np.float32)
        errors.append(np.linalg.norm(left.astype(np.float32) - wanted) / np.linalg.norm(wanted))
    return {
        "output_differs": int(np.count_nonzero(output[0] != output[1])),
        "worst_gradient": float(max(errors)),
    }


def write_csv(rows: list[Row], path: Path) -> None:
    """Writes one line for each row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            numbers = {
                name: f"{value:.4g}" if isinstance(value, float) else value
                for name, value in asdict(row).items()
            }
            writer.writerow(numbers)


def plot(path: Path) -> Path:
    """Draws the speedups that a CSV file holds; returns the picture's path."""
    from matplotlib.figure import Figure

    with path.open() as file:
        rows = list(csv.DictReader(file))
    rows, devices = rows[1:], int(rows[1]["devices"])
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["placement"] for row in rows], [float(row["speedup"]) for row in rows])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(devices, color="grey", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(
        xlabel=f"{devices} GPUs' speed over one GPU's, forward and backward",
        title=f"T = {rows[0]['length']}, batch {rows[0]['batch']}",
        xlim=(0, 1.15 * devices),
    )
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    return picture


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel",
        description="Times attention on all GPUs of this machine.",
    )
    parser.add_argument("--length", type=int, default=Size().length, help="T and S")
    parser.add_argument("--rounds", type=int, default=Size().rounds)
    parser.add_argument("--deterministic", action="store_true", help="reproducible gradients")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw these results")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options = parse_options()
    if options.plot:
        print(f"wrote {plot(options.plot)}")
        return 0
    devices = jax.devices()
    if devices[0].platform != "gpu" or len(devices) < 2:
        print(
            f"JAX's devices are {devices}, but this compares several GPUs with one: run it where "
            "jax.devices() lists at least two",
            file=sys.stderr,
        )
        return 2
    size = Size(length=options.length, rounds=options.rounds, deterministic=options.deterministic)
    rows = measure(size, devices)
    options.output.mkdir(parents=True, exist_ok=True)
    suffix = "_deterministic" if options.deterministic else ""
    name = f"{datetime.now(UTC):%Y-%m-%d}_{slug(devices[0].device_kind)}_x{len(devices)}"
    path = options.output / f"{name}_context_parallel{suffix}.csv"
    write_csv(rows, path)
    path.with_suffix(".json").write_text(json.dumps(describe_environment(), indent=1) + "\n")
    print(path.read_text())
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
