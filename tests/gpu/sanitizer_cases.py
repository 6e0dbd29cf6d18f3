"""Runs every kernel once on a small problem, for tools that watch a process.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py [NAME]

With NAME, only the kernels of calls whose name contains it. Ragged lengths and grouped heads, so
that the guarded edges of every tile are taken. Exits with 1 if a result is not finite.

In some runs (14 of 40, when 15 of them share a GPU; others of the same case are clean), and in all
where key tiles are handed out (bfloat16_d128_causal in 3 of 3), racecheck reports races, all of two
kinds: the bulk copy of a tile's log-sum-exp or delta (UBLKCP) and the loads (LDS) that read them;
and, where a warpgroup passes P to the other, its stores (STS) and those loads. Between each pair
there is an mbarrier, which the tool has not followed in such a run: false positives. That the
barriers are needed, and suffice, is what the mutants of tests/emulator show.
The tool itself ends with a segmentation fault in some runs of the ragged and general kernels (of
bfloat16_d128_general in 3 of 3); run such a case again.
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

RAGGED: dict[str, Any] = {
    "query_seq_lengths": np.array([150, 200]),
    "key_value_seq_lengths": np.array([100, 137]),
    "query_segment_ids": np.repeat([[0, 1, 2, -1], [3, 1, 1, 0]], 50, axis=1),
    "key_value_segment_ids": np.repeat([[0, 1, -1], [2, 1, 1]], 46, axis=1)[:, :137],
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (70, 20)},
    "ragged": RAGGED,
    "general": RAGGED
    | {
        "logits_soft_cap": 5.0,
        "bias": np.random.default_rng(1).standard_normal((4, *LENGTHS), np.float32),
        "mask": np.random.default_rng(2).random((2, 1, *LENGTHS)) < 0.9,
    },
}
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
LONG = (260, 1030)
"""Too many keys for the kernel of few queries, where there is one beside another."""
HAVE_SHORT_KERNELS = ((64, "full"), (64, "causal"), (64, "window"), (128, "full"))


def operands(
    head_dim: int, value_head_dim: int, dtype: str, lengths: tuple[int, int]
) -> list[jax.Array]:
    random = np.random.default_rng(0)
    queries, keys = lengths
    shapes = ((2, queries, 4, head_dim), (2, keys, 2, head_dim), (2, keys, 2, value_head_dim))
    return [jnp.asarray(random.standard_normal(shape).astype(jnp.dtype(dtype))) for shape in shapes]


def main() -> int:
    """Returns the exit status."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    covered: set[str] = set()
    failures = 0
    for dtype, (head_dim, value_head_dim), (mask, mask_options), lengths, deterministic in product(
        ("bfloat16", "float16"), HEAD_DIMS, MASKS.items(), (LENGTHS, LONG), (False, True)
    ):
        words = (dtype, f"d{head_dim}", mask, *(("long",) if lengths == LONG else ()))
        name = "_".join(words + (("deterministic",) if deterministic else ()))
        if wanted not in name or (lengths == LONG and (head_dim, mask) not in HAVE_SHORT_KERNELS):
            continue
        options = mask_options | {
            "deterministic_bwd": deterministic,
            "implementation": "cuda",
        }
        arrays = operands(head_dim, value_head_dim, dtype, lengths)
        differentiated = {name: jnp.asarray(options[name]) for name in options if name == "bias"}

        def attention(
            differentiated: dict[str, jax.Array],
            *arrays: jax.Array,
            options: dict[str, Any] = options,
        ) -> jax.Array:
            return jax_flash.attention(*arrays, **options | differentiated)

        output, pull_back = jax.vjp(attention, differentiated, *arrays)
        results = jax.tree.leaves((output, pull_back(output)))
        finite = all(np.isfinite(np.asarray(array, np.float32)).all() for array in results)
        failures += not finite
        explanation = jax_flash.explain(*arrays, **options)
        covered |= {kernel.name for kernel in (*explanation.forward, *explanation.backward)}
        print(f"{name}: {'finite' if finite else 'NOT FINITE'}", flush=True)
    built = {variant.name for variant in variants_to_build()}
    print(f"{len(covered)} of {len(built)} kernels ran")
    return 1 if failures or (not wanted and covered != built) else 0


if __name__ == "__main__":
    sys.exit(main())
