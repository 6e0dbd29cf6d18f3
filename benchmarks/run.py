"""Times attention, forward and backward, on the GPU that is there.

    python -m benchmarks.run [--quick] [--output DIRECTORY]

First every implementation must be right on small problems; then each problem is timed with all
implementations in turns. Writes DATE_GPU.csv, .json (hardware and versions) and .png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.correctness import check_all
from benchmarks.environment import describe_environment, query_gpu, slug
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.problems import problems
from benchmarks.report import Row, plot, row_of, table, write_csv
from benchmarks.timing import Effort, time_case

RESULTS = Path(__file__).parent / "results"
FULL = Effort(rounds=5, loop_seconds=0.05)
QUICK = Effort(rounds=3, loop_seconds=0.02)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Times attention on this machine's GPU."
    )
    parser.add_argument("--quick", action="store_true", help="fewer problems, shorter loops")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS),
        help="default: all",
    )
    return parser.parse_args()


def measure(names: list[str], *, quick: bool) -> Iterator[list[Row]]:
    """Checks the named implementations, then times them; gives the rows of one problem at a time.

    Raises:
        AssertionError: an implementation is wrong; nothing has been timed.
    """
    cases = problems(quick=quick)
    print("checking that every implementation is right")
    check_all(cases, names)
    for case in tqdm(cases, desc="problems"):
        timings = time_case(case, names, QUICK if quick else FULL)
        clock = query_gpu("clocks.sm").get("clocks.sm", "").removesuffix(" MHz")
        yield [row_of(case, timing, clock) for timing in timings]


def main() -> int:
    """Returns the exit status."""
    options = parse_options()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"JAX's first device is {device.device_kind}, but timings are of a CUDA GPU: run this "
            "where jax.devices() lists one",
            file=sys.stderr,
        )
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.now(UTC):%Y-%m-%d}_{slug(device.device_kind)}"
    path = options.output / (f"{name}_quick.csv" if options.quick else f"{name}.csv")
    path.with_suffix(".json").write_text(json.dumps(describe_environment(), indent=1) + "\n")
    rows: list[Row] = []
    try:
        for rows_of_problem in measure(options.implementations, quick=options.quick):
            rows += rows_of_problem
            write_csv(rows, path)  # what is measured so far outlives an interruption
    except AssertionError as error:
        print(f"nothing was timed, because a result is wrong:\n{error}", file=sys.stderr)
        return 1
    print(table(rows))
    try:
        plot(rows, path.with_suffix(".png"), path.stem.replace("_", ", "))
    except ImportError as error:
        print(f"no plot ({error}): run `python -m benchmarks.report {path}` where matplotlib is")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
