"""The orders in which a sequence is spread over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_flash import context_parallel


def test_zigzag_order_of_four_devices() -> None:
    order = context_parallel.zigzag_order(16, 4)
    assert order.dtype == np.int32
    assert order.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_zigzag_gives_all_devices_the_same_causal_work(shards: int) -> None:
    order = context_parallel.zigzag_order(12 * shards, shards)
    assert sorted(order) == list(range(12 * shards))
    pairs = (order + 1).reshape(shards, -1).sum(axis=1)
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_to_zigzag_and_back(axis: int) -> None:
    array = jnp.arange(24 * 24 * 24).reshape(24, 24, 24)
    moved = context_parallel.to_zigzag(array, 3, axis=axis)
    order = context_parallel.zigzag_order(24, 3)
    np.testing.assert_array_equal(moved, np.take(np.asarray(array), order, axis))
    np.testing.assert_array_equal(context_parallel.from_zigzag(moved, 3, axis=axis), array)


@pytest.mark.parametrize("order", context_parallel.ORDERS)
def test_local_positions(order: str) -> None:
    mesh = jax.make_mesh((4,), ("context",), devices=jax.devices("cpu")[:4])

    @partial(jax.shard_map, mesh=mesh, in_specs=(), out_specs=PartitionSpec("context"))
    def positions() -> jax.Array:
        return context_parallel.local_positions(6, axis_name="context", order=order)

    expected = np.arange(24) if order == "contiguous" else context_parallel.zigzag_order(24, 4)
    np.testing.assert_array_equal(jax.jit(positions)(), expected)


@pytest.mark.parametrize(
    ("length", "shards", "error", "message"),
    [
        (20, 4, ValueError, r"length is 20 and shards is 4; .* multiple of 2 \* shards = 8"),
        (8, 0, ValueError, "shards is 0; .* at least 1"),
        (8.0, 2, TypeError, r"length is 8.0 \(float\); it must be an integer"),
        (8, True, TypeError, r"shards is True \(bool\)"),
    ],
)
def test_zigzag_order_refuses(
    length: Any, shards: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        context_parallel.zigzag_order(length, shards)


def test_local_positions_refuses_an_odd_length() -> None:
    mesh = jax.make_mesh((4,), ("context",), devices=jax.devices("cpu")[:4])
    positions = jax.shard_map(
        lambda: context_parallel.local_positions(5, axis_name="context", order="zigzag"),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec("context"),
    )
    with pytest.raises(ValueError, match=r"local_length is 5; .* even\. Pad .* multiple of 8"):
        positions()
