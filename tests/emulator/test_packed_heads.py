"""Packed query heads against the same heads each with keys of its own, which are never packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import attention, explain
from jax_flash.ops.registration import Registration

CASES = {
    "one query, all keys": ((2, 1, 6, 2, 150), {}),
    "one query after the keys": ((2, 1, 4, 1, 150), {"is_causal": True, "query_offset": 149}),
    "a chunk": ((1, 5, 6, 2, 140), {"is_causal": True, "query_offset": 131}),
    "a chunk of a window": (
        (1, 9, 8, 2, 300),
        {"is_causal": True, "query_offset": 280, "local_window_size": (100, 0)},
    ),
    "offsets of each sequence": (
        (2, 3, 6, 1, 200),
        {"is_causal": True, "query_offset": np.asarray([7, 190], np.int32)},
    ),
    "lengths": (
        (2, 4, 4, 2, 160),
        {
            "query_seq_lengths": np.asarray([3, 900], np.int32),
            "key_value_seq_lengths": np.asarray([130, 0], np.int32),
        },
    ),
    "lengths and offsets": (
        (2, 7, 10, 2, 160),
        {
            "is_causal": True,
            "query_offset": np.asarray([120, 3], np.int32),
            "query_seq_lengths": np.asarray([7, 2], np.int32),
            "key_value_seq_lengths": np.asarray([127, 90], np.int32),
        },
    ),
    "two tiles of rows": ((1, 40, 10, 2, 130), {"is_causal": True, "query_offset": 90}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_packed_heads_are_the_rows_of_heads_alone(
    case: str, emulated: Registration
) -> None:
    """Every output and log-sum-exp has the bits that it has where no heads share keys."""
    (batch, queries, heads, key_heads, keys), arguments = CASES[case]
    query, key, value = _operands(batch, queries, heads, key_heads, keys)

    def run(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(*operands, implementation="emulate", return_residual=True, **arguments)

    group = heads // key_heads
    alone = run(query, jnp.repeat(key, group, -2), jnp.repeat(value, group, -2))
    for got, want in zip(run(query, key, value), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert "packed" in str(explain(query, key, value, implementation="emulate", **arguments))


def _operands(
    batch: int, queries: int, heads: int, key_heads: int, keys: int
) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    shapes = ((queries, heads), (keys, key_heads), (keys, key_heads))
    return tuple(
        jnp.asarray(random.normal(size=(batch, *shape, 64)), jnp.bfloat16) for shape in shapes
    )
