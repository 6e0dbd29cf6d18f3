"""How long a fresh process takes from importing to the first finished attention call.

    python -m benchmarks.first_call [--output DIRECTORY]

Each implementation runs in a process of its own, without any compilation cache, several times. The
time that importing jax and starting its backend take is measured in the same process and reported
apart, as every implementation pays it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
IMPLEMENTATIONS = ("jax_flash", "cuDNN")
SHAPE = (2, 2048, 16, 128)
STEPS = ("import_jax", "start_backend", "import_library", "first_call", "first_gradient", "total")
"""What is timed in a process, in seconds. The total is from the start of the script, before jax is
imported, to the end of the first call; the gradient comes after it. `first_call` includes tracing,
XLA's compilation and, for our kernels, loading the cubin."""


def measure_here(name: str) -> dict[str, float]:
    """Times the steps in this process, which must not have imported jax."""
    times = [time.perf_counter()]
    import jax
    import jax.numpy as jnp

    times.append(time.perf_counter())
    operand = jnp.ones(SHAPE, jnp.bfloat16).block_until_ready()
    times.append(time.perf_counter())
    if name == "jax_flash":
        import jax_flash

        def attention(x: jax.Array) -> jax.Array:
            return jax_flash.attention(x, x, x, is_causal=True, implementation="cuda")

    else:

        def attention(x: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    times.append(time.perf_counter())
    jax.jit(attention)(operand).block_until_ready()
    times.append(time.perf_counter())
    jax.jit(jax.grad(lambda x: attention(x).astype(jnp.float32).sum()))(operand).block_until_ready()
    times.append(time.perf_counter())
    steps = [end - start for start, end in pairwise(times)]
    return dict(zip(STEPS, [*steps, times[4] - times[0]], strict=True))


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
