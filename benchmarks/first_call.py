"""How long a fresh process takes from importing to the first finished attention call.

    python -m benchmarks.first_call [--output DIRECTORY]

Each implementation runs in a process of its own, without any compilation cache, several times. The
time that importing jax and starting its backend take is measured in the same process and reported
apart, as every implementation pays it; so does a process that multiplies instead of attending.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
IMPLEMENTATIONS = ("jax_flash", "cuDNN", "multiplication")
SHAPE = (2, 2048, 16, 128)
STEPS = (
    "import_jax",
    "start_backend",
    "import_library",
    "lower",
    "compile",
    "first_run",
    "second_run",
    "first_gradient",
)
"""What is timed in a process, in seconds, one after the other. `lower` is tracing to XLA's program;
`first_run` includes what an implementation does once, such as loading a cubin, and `second_run` is
the program alone; `first_gradient` is all of them for the gradient."""


def measure_here(name: str) -> dict[str, float]:
    """Times the steps in this process, which must not have imported jax."""
    times = [time.perf_counter()]
    import jax
    import jax.numpy as jnp

    times.append(time.perf_counter())
    operand = jnp.ones(SHAPE, jnp.bfloat16).block_until_ready()
    times.append(time.perf_counter())
    attention = _attention(name)
    times.append(time.perf_counter())
    lowered = jax.jit(attention).lower(operand)
    times.append(time.perf_counter())
    program = lowered.compile()
    times.append(time.perf_counter())
    for _ in range(2):
        program(operand).block_until_ready()
        times.append(time.perf_counter())
    jax.jit(jax.grad(lambda x: attention(x).astype(jnp.float32).sum()))(operand).block_until_ready()
    times.append(time.perf_counter())
    steps = dict(zip(STEPS, (end - start for start, end in pairwise(times)), strict=True))
    first_call = steps["lower"] + steps["compile"] + steps["first_run"]
    before = steps["import_jax"] + steps["start_backend"] + steps["import_library"]
    return steps | {"first_call": first_call, "total": before + first_call}


def _attention(name: str) -> Callable[[Any], Any]:
    """Imports an implementation."""
    import jax

    match name:
        case "jax_flash":
            import jax_flash

            return lambda x: jax_flash.attention(x, x, x, is_causal=True, implementation="cuda")
        case "cuDNN":
            attention = jax.nn.dot_product_attention
            return lambda x: attention(x, x, x, is_causal=True, implementation="cudnn")
        case _:
            return lambda x: x * x


def measure_in_new_process(name: str) -> dict[str, float]:
    """Times the steps in a fresh process."""
    environment = {
        key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"
    }
    outcome = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", "--here", name],
        cwd=Path(__file__).parents[1],
        env=environment | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        raise SystemExit(f"{name} failed:\n{outcome.stderr}")
    return json.loads(outcome.stdout.splitlines()[-1])


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call", description="Times the first attention call."
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each implementation")
    parser.add_argument("--here", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.here)))
        return
    rows = []
    for repeat in range(options.repeats):
        for name in IMPLEMENTATIONS:
            steps = measure_in_new_process(name)
            rows.append({"implementation": name, "repeat": repeat, **steps})
            print(name, {step: round(seconds, 3) for step, seconds in steps.items()}, flush=True)
    # Only now, as it imports jax and takes the GPU's memory.
    from benchmarks.environment import describe_environment, slug

    environment = describe_environment()
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d}_{slug(environment['device'])}_first_call"
    path = options.output / f"{stem}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".json").write_text(json.dumps(environment, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
