"""Whether attention takes time in proportion to the pairs of query and key that a mask leaves.

    python -m benchmarks.visible_area [--output DIRECTORY]

Every mask is timed in turns with the full one of the same shapes, forward and backward. A mask
whose hidden tiles cost nothing has the full mask's rate of visible pairs; the target is at least
85% of it. Writes DATE_GPU_visible_area.csv, .json (hardware and versions) and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_flash
from benchmarks.environment import describe_environment, slug
from benchmarks.programs import compile_programs, make_operands
from benchmarks.timing import Effort, Timing, time_in_turns
from jax_flash.testing import Case

RESULTS = Path(__file__).parent / "results"
EFFORT = Effort(rounds=5, loop_seconds=0.05)
TARGET = 0.85
FULL = "full"
MODES = {"jax_flash": False, "jax_flash deterministic": True}
"""By name: whether the backward pass is the reproducible one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask of a square of T queries and keys.

    Attributes:
        name: in the results.
        is_causal: as in `jax_flash.attention`.
        window: likewise, its `local_window_size`.
        documents: lengths of the sequences packed into the one, or empty.
    """

    name: str
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: tuple[int, ...] = ()

    def visible_pairs(self, length: int) -> int:
        """Pairs of a query and a key that it may attend to, in one head."""
        total = 0
        for own in self.documents or (length,):
            query = np.arange(own)
            left, right = self.window
            first = np.zeros_like(query) if left is None else np.maximum(query - left, 0)
            last = np.full_like(query, own - 1) if right is None else query + right
            last = np.minimum(last, query if self.is_causal else own - 1)
            total += int((last - first + 1).sum())
        return total

    def segment_ids(self) -> tuple[jax.Array, ...]:
        """The ids of the documents' tokens, [1, T], if there are documents."""
        if not self.documents:
            return ()
        ids = np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents)
        return (jnp.asarray(ids)[None],)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV."""

    mask: str
    length: int
    heads: int
    head_dim: int
    dtype: str
    implementation: str
    direction: str
    visible_pairs: int
    """Of one head."""
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    pairs_per_second: float
    """Over all heads, at the median."""
    relative_to_full: float
    """pairs_per_second divided by that of the full mask of the same length."""


def uneven(length: int, count: int) -> tuple[int, ...]:
    """Returns lengths of `count` documents that differ widely and make up `length` tokens."""
    ends = np.sort(np.random.default_rng(0).choice(np.arange(1, length), count - 1, replace=False))
    return tuple(int(own) for own in np.diff([0, *ends, length]))


def masks(length: int) -> list[Mask]:
    """Returns what is timed at a length; the first is the full mask."""
    both = [Mask(name=FULL), Mask(name="causal", is_causal=True)]
    even_documents, documents = (length // 16,) * 16, uneven(length, 16)
    return both + {
        16384: [
            Mask(name="16 documents of equal length", documents=even_documents),
            Mask(name="16 documents", documents=documents),
            Mask(name="16 documents, causal", documents=documents, is_causal=True),
        ],
        32768: [Mask(name="window of 1024", window=(1024, 0))],
    }.get(length, [])


def attend(mask: Mask, *operands: jax.Array, **options: Any) -> jax.Array:
    """The attention call of a mask, of query, key, value and segment ids if it has documents."""
    query, key, value, *ids = operands
    if ids:
        options |= {"query_segment_ids": ids[0], "key_value_segment_ids": ids[0]}
    return jax_flash.attention(
        query,
        key,
        value,
        is_causal=mask.is_causal,
        local_window_size=mask.window,
        **options,
    )


def measure(
    length: int, choices: Sequence[Mask], effort: Effort, implementation: str = "cuda"
) -> Iterator[Row]:
    """Times masks of one length in turns; the first one must be the full mask."""
    case = Case(
        name="visible-area",
        tags=frozenset({"bench"}),
        batch=1,
        queries=length,
        keys=length,
        heads=16,
        key_heads=16,
        head_dim=128,
        value_dim=128,
    )
    operands = make_operands(case)
    calls: dict[str, dict[tuple[str, str], Any]] = {}
    for (mode, deterministic), mask in ((m, c) for m in MODES.items() for c in choices):
        options = {"deterministic_bwd": deterministic, "implementation": implementation}
        programs = compile_programs(
            case,
            partial(attend, mask, **options),
            extras=mask.segment_ids(),
            with_forward=not deterministic,
        )
        for direction, call in programs.calls(operands).items():
            calls.setdefault(direction, {})[mode, mask.name] = call
    by_name = {mask.name: mask for mask in choices}
    for direction, chosen in calls.items():
        keys = {" ".join(key): key for key in chosen}
        timings = time_in_turns(direction, {k: chosen[keys[k]] for k in keys}, effort)
        medians = {keys[timing.implementation]: timing.median for timing in timings}
        for timing in timings:
            mode, name = keys[timing.implementation]
            full = case.queries * case.keys / medians[mode, FULL]
            yield row_of(case, by_name[name], mode, timing, full)


def row_of(case: Case, mask: Mask, mode: str, timing: Timing, full_rate: float) -> Row:
    """Returns the row of one timing; the rate is in pairs of one head a second."""
    pairs = mask.visible_pairs(case.queries)
    rate = pairs / timing.median
    return Row(
        mask=mask.name,
        length=case.queries,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        implementation=mode,
        direction=timing.direction,
        visible_pairs=pairs,
        median_ms=round(timing.median * 1e3, 5),
        fastest_ms=round(min(timing.seconds) * 1e3, 5),
        slowest_ms=round(max(timing.seconds) * 1e3, 5),
        pairs_per_second=round(rate * case.heads),
        relative_to_full=round(rate / full_rate, 4),
    )


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws the rate of each mask relative to the full one, a group of bars for each."""
    from matplotlib.figure import Figure  # not needed to measure, and not on every machine

    kinds = list(dict.fromkeys((row.direction, row.implementation) for row in rows))
    places = list(dict.fromkeys((row.length, row.mask) for row in rows if row.mask != FULL))
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(kinds)
    for index, kind in enumerate(kinds):
        rates = {
            (row.length, row.mask): row.relative_to_full
            for row in rows
            if (row.direction, row.implementation) == kind
        }
        positions = [number + index * width for number in range(len(places))]
        axes.bar(positions, [rates[place] for place in places], width, label=", ".join(kind))
    axes.axhline(TARGET, color="black", linestyle="--", label=f"target, {TARGET}")
    words = [f"{mask}\nof {length}" for length, mask in places]
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(places))], words, fontsize=8)
    axes.set(ylabel="visible pairs a second, relative to the full mask", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.visible_area",
        description="Times masks beside the full one, on this machine's GPU.",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"JAX's first device is {device.device_kind}; this needs a GPU", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d}_{slug(device.device_kind)}_visible_area"
    path = options.output / f"{stem}.csv"
    path.with_suffix(".json").write_text(json.dumps(describe_environment(), indent=1) + "\n")
    rows: list[Row] = []
    for length in tqdm((8192, 16384, 32768), desc="lengths"):
        rows += measure(length, masks(length), EFFORT)
        write_csv(rows, path)
    for row in rows:
        below = " BELOW THE TARGET" * (row.relative_to_full < TARGET)
        print(
            f"{row.direction:9}{row.implementation:25}{row.length:6} {row.mask:30}"
            f"{row.median_ms:9.3f} ms {row.relative_to_full:6.3f}{below}"
        )
    try:
        plot(rows, path.with_suffix(".png"), stem.replace("_", ", "))
    except ImportError as error:
        print(f"no plot ({error})")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
