"""The records of tiles that kernels with segments go by, against all pairs of positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.ops.segments import segment_operands
from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS
from jax_flash.spec.launch_plan import Operation, forward_operation
from jax_flash.spec.problem import Feature
from jax_flash.spec.variant import DType


@pytest.fixture(params=[(64, 64), (256, 256)], ids=["D=64", "D=256"])
def operation(request: pytest.FixtureRequest) -> Operation:
    """The forward operation of a call with segments."""
    return forward_operation(
        Arch.SM90A, DType.BF16, request.param, BOTH_BOUNDS, frozenset({Feature.SEGMENT_IDS})
    )


def ids_of(kind: str, random: np.random.Generator, length: int) -> np.ndarray:
    """Segment ids ``[2, length]``: documents in order with padding at the end, or in any order."""
    if kind == "documents":
        ends = np.sort(random.integers(0, length, (2, 5)), axis=1)
        ids = (np.arange(length) >= ends[..., None]).sum(axis=1)
        return np.where(ids == 5, -1, ids)
    return np.repeat(random.integers(-1, 3, (2, length // 40 + 1)), 40, axis=1)[:, :length]


@pytest.mark.parametrize("kind", ["documents", "any order"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (700, 1000), (1031, 519)])
def test_records(operation: Operation, kind: str, queries: int, keys: int) -> None:
    random = np.random.default_rng(queries)
    query_ids, key_ids = (ids_of(kind, random, length) for length in (queries, keys))
    lengths = jnp.asarray([queries, max(queries - 70, 0)])
    operands = segment_operands(
        operation,
        {
            "query_segment_ids": jnp.asarray(query_ids, jnp.int32),
            "key_segment_ids": jnp.asarray(key_ids, jnp.int32),
            "query_lengths": lengths,
        },
    )
    query_ids = np.where(np.arange(queries) < np.asarray(lengths)[:, None], query_ids, -1)
    for batch in range(2):
        meet = (query_ids[batch][:, None] == key_ids[batch]) & (query_ids[batch][:, None] >= 0)
        tiles_of_queries = check_ids(operands["query_tile_ids"][batch], query_ids[batch])
        tiles_of_keys = check_ids(operands["key_tile_ids"][batch], key_ids[batch])
        for records, pairs, own, others in (
            (operands["query_tile_segments"], meet, tiles_of_queries, tiles_of_keys),
            (operands["key_tile_segments"], meet.T, tiles_of_keys, tiles_of_queries),
        ):
            for tile, (begin, end, same_begin, same_end, padded) in enumerate(records[batch]):
                assert padded == (own[tile][1] is None)
                for other in range(len(others)):
                    block = pairs[slice(*own[tile][0]), slice(*others[other][0])]
                    assert begin <= other < end or not block.any(), "a pair would be left out"
                    same = own[tile][1] is not None and own[tile][1] == others[other][1] != "many"
                    if same_begin <= other < same_end:
                        assert same, "a tile of several segments would not be compared"
                    elif kind == "documents":
                        assert not same, "a tile of one segment would be compared"


def check_ids(tiles: jax.Array, ids: np.ndarray) -> list[tuple[tuple[int, int], object]]:
    """Checks ids by tile; returns each tile's positions and its one id, None if any is padding."""
    size = tiles.shape[1]
    result: list[tuple[tuple[int, int], object]] = []
    for tile, values in enumerate(np.asarray(tiles)):
        own = ids[tile * size : (tile + 1) * size]
        assert np.array_equal(np.maximum(values[: len(own)], -1), own) or (own < 0).any()
        assert np.array_equal(values[: len(own)] < 0, own < 0)
        assert (values[len(own) :] == values[len(own) - 1]).all()
        one = "many" if len(set(own.tolist())) > 1 else int(own[0])
        result.append(((tile * size, tile * size + len(own)), None if (own < 0).any() else one))
    return result
