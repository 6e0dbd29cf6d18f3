"""Which calls pack their query heads, and where each row goes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import symbolic_shape

from jax_flash.ops.packed_heads import MOST_QUERIES, can_pack_heads, pack_heads, unpack_heads
from jax_flash.spec.problem import AttentionProblem, Feature


def test_packing_and_unpacking_invert_each_other() -> None:
    """A query that is returned as the output comes back in its place."""
    query = jnp.arange(2 * 3 * 6 * 8).reshape(2, 3, 6, 8)
    packed = pack_heads({"query": query, "key": jnp.zeros((2, 5, 2, 8))})["query"]
    assert packed.shape == (2, 9, 2, 8)
    # Query 1 of head 5, the third of key head 1.
    np.testing.assert_array_equal(packed[1, 1 * 3 + 2, 1], query[1, 1, 5])
    unpacked = unpack_heads({"output": packed, "lse": packed[..., 0]}, 3)
    np.testing.assert_array_equal(unpacked["output"], query)
    np.testing.assert_array_equal(unpacked["lse"], query[..., 0])


def test_lengths_count_rows_and_do_not_overflow() -> None:
    """Any int32 may be given as a length; kernels take less than 0 for 0 and too much for all."""
    operands = {"query": jnp.zeros((4, 5, 6, 8)), "key": jnp.zeros((4, 7, 2, 8))}
    lengths = jnp.asarray([3, -(2**31), 2**31 - 1, 5], jnp.int32)
    packed = pack_heads({**operands, "query_lengths": lengths})
    np.testing.assert_array_equal(packed["query_lengths"], [9, 0, 15, 15])


@pytest.mark.parametrize(
    "changes",
    [
        {"query_length": MOST_QUERIES + 1},
        {"key_heads": 8},
        {"query_length": symbolic_shape("t")[0]},
        {"features": frozenset({Feature.SINKS})},
        {"features": frozenset({Feature.BIAS})},
        {"features": frozenset({Feature.SEGMENT_IDS})},
    ],
)
def test_what_is_not_packed(changes: dict) -> None:
    """Many queries, ungrouped heads and what differs between heads."""
    facts = {
        "dtype": "bfloat16",
        "query_length": MOST_QUERIES,
        "key_length": 512,
        "query_heads": 8,
        "key_heads": 2,
        "head_dim": 64,
        "value_head_dim": 64,
    }
    assert can_pack_heads(AttentionProblem(**facts))
    assert not can_pack_heads(AttentionProblem(**facts | changes))
