"""How axes are cut, and which tiles a call visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.reference.semantics import Semantics, align_leading_dimensions, may_attend
from jax_flash.reference.tiling import Tiling, key_tiles_in_reach


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23])
def test_tiles_own_every_position_once_and_in_order(length):
    tiling = Tiling.of(length, 8)
    owned = []
    for index in range(tiling.count):
        positions, is_owned = tiling.positions(index), tiling.owned(index)
        owned += np.asarray(positions if is_owned is None else positions[is_owned]).tolist()
    assert owned == list(range(length))
    assert tiling.width == min(length, 8)


@pytest.mark.parametrize("length", [5, 16, 23])
def test_what_is_written_is_read(length):
    tiling = Tiling.of(length, 8)
    array = jnp.arange(2 * length).reshape(2, length)
    copy = tiling.loop(
        lambda i, copy: tiling.write(copy, tiling.read(array, i, 1), i, 1), jnp.zeros_like(array)
    )
    np.testing.assert_array_equal(copy, array)
    one = jnp.ones((2, 1))
    assert tiling.read(one, 0, 1) is one, "an axis of one entry serves all positions"


RECORDS = {
    "causal": Semantics(scale=1.0, is_causal=True),
    "causal-offset": Semantics(scale=1.0, is_causal=True, query_offset=jnp.array([5, -20, 3])),
    "window": Semantics(scale=1.0, window=(9, 4)),
    "window-offset": Semantics(scale=1.0, window=(9, 4), query_offset=jnp.array([40, 0, -3])),
    "window-far": Semantics(scale=1.0, window=(2, 2), query_offset=jnp.array([900, 800, 900])),
    "window-largest": Semantics(scale=1.0, window=(2**31 - 1, 2**31 - 1)),
    "largest-offset": Semantics(scale=1.0, window=(3, 2**31 - 1), query_offset=jnp.array(-(2**30))),
    "lengths": Semantics(
        scale=1.0, query_lengths=jnp.array([3, 9, 0]), key_lengths=jnp.array([0, 19, 4])
    ),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(("length_q", "length_k"), [(37, 61), (61, 37), (8, 64)])
def test_no_tile_with_a_pair_is_left_out_and_few_without(name, length_q, length_k):
    semantics = align_leading_dimensions(RECORDS[name], 1)
    queries, keys = Tiling.of(length_q, 8), Tiling.of(length_k, 8)
    allowed = may_attend(semantics, jnp.arange(length_q), jnp.arange(length_k))
    everywhere = np.broadcast_to(np.asarray(allowed), (3, 1, length_q, length_k))
    allowed = np.asarray(everywhere.any(axis=(0, 1)))
    reach = jax.jit(lambda i: key_tiles_in_reach(semantics, queries, i, keys))
    for i in range(queries.count):
        rows = allowed[np.asarray(queries.positions(i))]
        columns = np.flatnonzero(rows.any(axis=0))
        lower, upper = (int(bound) for bound in reach(i))
        if columns.size:
            assert lower <= columns[0] // 8 and columns[-1] // 8 < upper
        if columns.size and name in ("causal", "window", "window-largest"):
            # Where all batch elements are alike, nothing is visited in vain at the ends.
            assert (lower, upper) == (columns[0] // 8, columns[-1] // 8 + 1)
        if not columns.size and name in ("lengths", "window-far", "largest-offset"):
            assert lower >= upper


def test_causal_visits_half_of_the_tiles():
    tiling = Tiling.of(16 * 8, 8)
    semantics = Semantics(scale=1.0, is_causal=True)
    visited = [key_tiles_in_reach(semantics, tiling, i, tiling) for i in range(16)]
    assert sum(int(upper) - int(lower) for lower, upper in visited) == 16 * 17 // 2
