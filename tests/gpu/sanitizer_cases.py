"""Runs every kernel once on a small problem, for tools that watch a process.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py [NAME]

With NAME, only the kernels of calls whose name contains it. Ragged lengths and grouped heads, so
that the guarded edges of every tile are taken. Exits with 1 if a result is not finite.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash.spec.support import variants_to_build

LENGTHS = (200, 137)  # queries and keys: two tiles of each, the last one partly filled

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (70, 20)},
}


def operands(head_dim: int, dtype: str) -> list[jax.Array]:
    random = np.random.default_rng(0)
    queries, keys = LENGTHS
    shapes = ((2, queries, 4, head_dim), (2, keys, 2, head_dim), (2, keys, 2, head_dim))
    return [jnp.asarray(random.standard_normal(shape).astype(jnp.dtype(dtype))) for shape in shapes]


def main() -> int:
    """Returns the exit status."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    covered: set[str] = set()
    failures = 0
    for dtype, head_dim, (mask, mask_options), deterministic in product(
        ("bfloat16", "float16"), (64, 128), MASKS.items(), (False, True)
    ):
        words = (dtype, f"d{head_dim}", mask)
        name = "_".join(words + (("deterministic",) if deterministic else ()))
        if wanted not in name:
            continue
        options = mask_options | {
            "deterministic_bwd": deterministic,
            "implementation": "cuda",
        }
        arrays = operands(head_dim, dtype)
        output, pull_back = jax.vjp(
            lambda *arrays, options=options: jax_flash.attention(*arrays, **options), *arrays
        )
        finite = all(
            np.isfinite(np.asarray(array, np.float32)).all()
            for array in (output, *pull_back(output))
        )
        failures += not finite
        explanation = jax_flash.explain(*arrays, **options)
        covered |= {kernel.name for kernel in (*explanation.forward, *explanation.backward)}
        print(f"{name}: {'finite' if finite else 'NOT FINITE'}", flush=True)
    built = {variant.name for variant in variants_to_build()}
    print(f"{len(covered)} of {len(built)} kernels ran")
    return 1 if failures or (not wanted and covered != built) else 0


if __name__ == "__main__":
    sys.exit(main())
