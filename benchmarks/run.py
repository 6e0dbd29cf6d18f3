"""Times attention, forward and backward, on the GPU that is there.

    python -m benchmarks.run [--quick] [--implementations NAME ...] [--output DIRECTORY]

First every implementation must be right on small problems, and everything is compiled; then each
problem is timed with all implementations in turns. Writes DATE_GPU.csv, .json (hardware and
versions) and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.comparison import comparison
from benchmarks.correctness import check_all, kind_of
from benchmarks.environment import describe_environment, query_gpu, slug
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.problems import is_beside_matrix_product, problems
from benchmarks.programs import Programs, compile_programs, matrix_product_call
from benchmarks.report import plot, table
from benchmarks.rows import Row, row_of, write_csv
from benchmarks.timing import Effort, time_case
from jax_flash.testing import Case

RESULTS = Path(__file__).parent / "results"
FULL = Effort(rounds=10, loop_seconds=0.04)
QUICK = Effort(rounds=3, loop_seconds=0.02)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    installed = [name for name, choice in IMPLEMENTATIONS.items() if choice.is_installed]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Times attention on this machine's GPU."
    )
    parser.add_argument("--quick", action="store_true", help="fewer problems, shorter loops")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=installed,
        help="default: all that are installed",
    )
    options = parser.parse_args()
    missing = [name for name in options.implementations if name not in installed]
    if missing:
        packages = ", ".join(f"{name}: {IMPLEMENTATIONS[name].package}" for name in missing)
        parser.error(f"these implementations need packages that are not installed: {packages}")
    return options


def measure(names: Sequence[str], *, quick: bool, failures: list[str]) -> Iterator[list[Row]]:
    """Checks the named implementations, then times them; gives the rows of one problem at a time.

    Args:
        names: of the implementations.
        quick: fewer problems, shorter loops.
        failures: what could not be computed, and is left out, is added here.

    Raises:
        AssertionError: an implementation is wrong; nothing has been timed.
    """
    cases = problems(quick=quick)
    print("compiling, and checking that every implementation is right", flush=True)
    with compiling(cases, names) as pending:
        failed = check_all(cases, names)
        failures += [f"{each.implementation}, {each.kind}: {each.reason}" for each in failed]
        matrix_product = matrix_product_call()
    excluded = {(each.implementation, each.kind) for each in failed}
    compiled = {}
    for (case, name), future in pending.items():
        if (error := future.exception()) is not None:
            failures.append(f"{name}, {case.name}: {type(error).__name__}: {error}")
        elif (name, kind_of(case)) not in excluded:
            compiled[case, name] = future.result()
    for case in tqdm(cases, desc="problems"):
        timings = time_case(
            case,
            {name: compiled[case, name] for name in names if (case, name) in compiled},
            QUICK if quick else FULL,
            matrix_product=matrix_product if is_beside_matrix_product(case) else None,
        )
        clock = query_gpu("clocks.sm").get("clocks.sm", "").removesuffix(" MHz")
        yield [row_of(case, timing, clock) for timing in timings]


@contextmanager
def compiling(
    cases: Sequence[Case], names: Sequence[str]
) -> Iterator[dict[tuple[Case, str], Future[Programs]]]:
    """Starts to compile every program, and waits for all at the end.

    None is timed before: compilers would take the CPU from the loops. Each implementation has
    threads of its own, because FlashAttention-4 compiles one kernel at a time and would leave
    threads that others could use waiting.
    """

    def compile_one(case: Case, name: str) -> Programs:
        choice = IMPLEMENTATIONS[name]
        return compile_programs(case, choice.make(case), with_forward=choice.has_own_forward)

    with ExitStack() as stack:
        threads = min(8, os.cpu_count() or 1)
        pools = {name: stack.enter_context(ThreadPoolExecutor(threads)) for name in names}
        pending = {
            (case, name): pool.submit(compile_one, case, name)
            for case in cases
            for name, pool in pools.items()
            if IMPLEMENTATIONS[name].covers(case)
        }
        try:
            yield pending
        except BaseException:
            for future in pending.values():
                future.cancel()
            raise


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
    failures: list[str] = []
    names = options.implementations
    try:
        for rows_of_problem in measure(names, quick=options.quick, failures=failures):
            rows += rows_of_problem
            write_csv(rows, path)  # what is measured so far outlives an interruption
    except AssertionError as error:
        print(f"nothing was timed, because a result is wrong:\n{error}", file=sys.stderr)
        return 1
    print(table(rows))
    print(comparison(rows))
    try:
        plot(rows, path.with_suffix(".png"), path.stem.replace("_", ", "))
    except ImportError as error:
        print(f"no plot ({error}): run `python -m benchmarks.report {path}` where matplotlib is")
    print(f"wrote {path}")
    for failure in failures:
        print(f"left out: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
