"""Packed query heads on the GPU: the bits of heads that share no keys, and of longer sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import attention

CALLS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"is_causal": True, "query_offset": 900},
    "window": {"is_causal": True, "query_offset": 777, "local_window_size": (300, 0)},
    "offsets": {"is_causal": True, "query_offset": np.asarray([5, 993, 2000], np.int32)},
    "lengths": {
        "query_seq_lengths": np.asarray([1, 0, 64], np.int32),
        "key_value_seq_lengths": np.asarray([1000, 1, 513], np.int32),
    },
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (20, 4)])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_bits_of_heads_alone(
    dtype: Any, head_dims: tuple[int, int], heads: tuple[int, int], call: str
) -> None:
    """With keys of its own for each head nothing is packed, and every row has the same bits."""
    for queries in (1, 3, 17, 64):
        query, key, value = _operands(dtype, head_dims, heads, queries)
        group = heads[0] // heads[1]

        @jax.jit
        def run(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attention(*operands, implementation="cuda", return_residual=True, **CALLS[call])

        packed = run(query, key, value)
        alone = run(query, jnp.repeat(key, group, -2), jnp.repeat(value, group, -2))
        for got, want in zip(packed, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("queries", [1, 7, 64])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_the_bits_of_a_whole_sequence(head_dims: tuple[int, int], queries: int) -> None:
    """A decoding step has the bits of the pass over the sequence that it ends."""
    query, key, value = _operands(jnp.bfloat16, head_dims, (16, 4), 1000)
    whole = attention(query, key, value, is_causal=True, implementation="cuda")
    step = attention(
        query[:, -queries:],
        key,
        value,
        is_causal=True,
        query_offset=1000 - queries,
        implementation="cuda",
    )
    np.testing.assert_array_equal(np.asarray(step), np.asarray(whole[:, -queries:]))


def _operands(
    dtype: Any, head_dims: tuple[int, int], heads: tuple[int, int], queries: int
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(queries), 3)
    shapes = (
        (3, queries, heads[0], head_dims[0]),
        (3, 1000, heads[1], head_dims[0]),
        (3, 1000, heads[1], head_dims[1]),
    )
    return tuple(
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )
