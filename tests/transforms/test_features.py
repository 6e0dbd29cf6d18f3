"""Features on the kernels that run on the CPU, whose handler has masks of its own.

What other tests here say of transformations holds for these features, too, only if the handler does
not ignore them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from .conftest import CpuKernels

QUERIES, KEYS = 70, 90
IDS = {
    "query_segment_ids": np.repeat([[0, 1, 2, -1, 2], [1, 1, 3, 3, 0]], 14, axis=1),
    "key_value_segment_ids": np.repeat([[0, 1, 2], [1, 3, -1]], 30, axis=1),
}
LENGTHS = {
    "query_seq_lengths": np.array([70, 31]),
    "key_value_seq_lengths": np.array([55, 90]),
}
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True, "query_offset": 20},
    "window": {"local_window_size": (9, 4)},
    "lengths": LENGTHS,
    "causal, lengths": LENGTHS | {"is_causal": True, "query_offset": 20},
    "window, lengths": LENGTHS | {"local_window_size": (9, None)},
    "segments": IDS,
    "causal, segments": IDS | {"is_causal": True},
    "causal, soft cap": {"is_causal": True, "logits_soft_cap": 2.0},
    "offsets": {"is_causal": True, "query_offset": np.array([3, 20])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("queries", [5, QUERIES])
def test_results_and_gradients_are_those_of_plain_jax(
    case: str, queries: int, cpu_kernels: CpuKernels
) -> None:
    """With few queries the heads of a group are packed; with segments they are not."""
    options = {
        name: value[:, :queries] if name == "query_segment_ids" else value
        for name, value in CASES[case].items()
    }
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, queries, 4, 16), (2, KEYS, 2, 16), (2, KEYS, 2, 16), (2, queries, 4, 16))
    *operands, cotangent = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )

    def run(implementation: str, *operands: jax.Array) -> Any:
        output, pull_back = jax.vjp(
            lambda *arrays: jax_flash.attention(*arrays, implementation=implementation, **options),
            *operands,
        )
        return output, pull_back(cotangent)

    assert cpu_kernels.calls_of(run, "cuda", *operands) == (1, 1)
    for got, want in zip(
        jax.tree.leaves(run("cuda", *operands)),
        jax.tree.leaves(run("xla", *operands)),
        strict=True,
    ):
        want = np.asarray(want, np.float32)
        allowed = 2.0**-6 * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=allowed)
