"""Results and gradients equal the single-device call's, in every mode, for every argument."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash import context_parallel

from .single_device import (
    MODES_AND_ORDERS,
    Problem,
    assert_close,
    make_arrays,
    make_mesh,
    normal,
    results_and_gradients,
)

each_mode = pytest.mark.parametrize(("mode", "order"), MODES_AND_ORDERS)


def causal() -> Problem:
    return Problem(arrays=make_arrays(), options={"is_causal": True})


def full_with_one_key_head() -> Problem:
    return Problem(arrays=make_arrays(heads=(4, 1)))


def other_lengths_and_offsets() -> Problem:
    """Other keys than queries, an offset for each sequence, some rows without any key."""
    options = {
        "local_window_size": (9, 5),
        "query_offset": jnp.array([20, -7], jnp.int32),
        "query_seq_lengths": jnp.array([32, 21], jnp.int32),
        "key_value_seq_lengths": jnp.array([50, 64], jnp.int32),
    }
    padded = jnp.arange(32) >= options["query_seq_lengths"][:, None]
    arrays = make_arrays(keys=64)
    arrays["query"] = jnp.where(padded[..., None, None], jnp.nan, arrays["query"])
    return Problem(arrays=arrays, options=options, padding={"query": padded})


def everything_else() -> Problem:
    """Packed sequences with NaN in the padding, a causal window, sinks and a soft cap."""
    ids = jnp.asarray(np.repeat([[0, 1, 1, -1, 2, 2, -1, -1], [3, 3, 3, 3, 3, 0, 0, 0]], 4, axis=1))
    arrays = make_arrays() | {"sinks": normal(5, 4)}
    for name in ("query", "key", "value"):
        arrays[name] = jnp.where((ids < 0)[..., None, None], jnp.nan, arrays[name])
    options = {
        "is_causal": True,
        "local_window_size": (11, None),
        "query_segment_ids": ids,
        "key_value_segment_ids": ids,
        "logits_soft_cap": 2.0,
        "scale": 0.5,
        "query_offset": 1,
    }
    return Problem(arrays=arrays, options=options, padding={"query": ids < 0})


def causal_with_lengths_and_segments() -> Problem:
    """Lengths that end in a device's first chunk, in its last one, and at 0; padding holds NaN."""
    ids = jnp.asarray(np.repeat([[0, 0, 1, 1, 1, 2, 2, 2], [4, 4, 4, -1, -1, 5, 5, 5]], 4, axis=1))
    lengths = {"query": jnp.array([30, 6], jnp.int32), "key": jnp.array([18, 27], jnp.int32)}
    arrays = make_arrays() | {"sinks": normal(5, 4)}
    padding = {}
    for name, of in (("query", "query"), ("key", "key"), ("value", "key")):
        padding[name] = (jnp.arange(32) >= lengths[of][:, None]) | (ids < 0)
        arrays[name] = jnp.where(padding[name][..., None, None], jnp.nan, arrays[name])
    options = {
        "is_causal": True,
        "query_seq_lengths": lengths["query"],
        "key_value_seq_lengths": lengths["key"],
        "query_segment_ids": ids,
        "key_value_segment_ids": ids,
        "logits_soft_cap": 3.0,
    }
    return Problem(arrays=arrays, options=options, padding={"query": padding["query"]})


def causal_with_more_keys() -> Problem:
    """The last query is aligned with the last key."""
    return Problem(
        arrays=make_arrays(keys=64), options={"is_causal": True, "query_offset": 32, "scale": 0.3}
    )


@pytest.mark.parametrize(
    "make",
    [
        other_lengths_and_offsets,
        everything_else,
        causal_with_lengths_and_segments,
        causal_with_more_keys,
    ],
)
@each_mode
def test_equals_a_single_device(mode: str, order: str, make: Callable[[], Problem]) -> None:
    check(make(), mode, order)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_balanced_causal_work(mode: str) -> None:
    check(causal(), mode, "zigzag")


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_every_pair_attends_to_one_key_head(mode: str) -> None:
    check(full_with_one_key_head(), mode, "contiguous")


def check(problem: Problem, mode: str, order: str) -> None:
    expected = results_and_gradients(problem.single, problem)
    actual = results_and_gradients(
        lambda arrays: problem.spread(
            arrays, mode=mode, order=order, mesh=make_mesh(), batch_axis_name="data"
        ),
        problem,
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_explicit_mesh_with_sharded_heads(mode: str) -> None:
    """Where types tell how arrays are sharded, nothing but the sequence's axis is named."""
    problem = Problem(
        arrays=make_arrays(heads=(8, 2)) | {"sinks": normal(5, 8)}, options={"is_causal": True}
    )
    expected = results_and_gradients(problem.single, problem)
    mesh = make_mesh(AxisType.Explicit, tensor=2)
    rows = NamedSharding(mesh, PartitionSpec("data", "context", "tensor", None))
    with jax.set_mesh(mesh):
        sharded = Problem(
            arrays={
                name: jax.device_put(x, rows) if name != "sinks" else x
                for name, x in problem.arrays.items()
            },
            options=problem.options,
        )
        actual = results_and_gradients(lambda arrays: sharded.spread(arrays, mode=mode), sharded)
    assert actual["output"].sharding.is_equivalent_to(rows, 4)
    assert actual["d_key"].sharding.is_equivalent_to(rows, 4)
    assert_close(actual, expected)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_auto_mesh_that_is_set_and_named_heads(mode: str) -> None:
    problem = Problem(arrays=make_arrays(heads=(8, 2)), options={"is_causal": True})
    expected = results_and_gradients(problem.single, problem)
    with jax.set_mesh(make_mesh(tensor=2)):
        actual = results_and_gradients(
            lambda arrays: problem.spread(
                arrays,
                mode=mode,
                order="zigzag",
                head_axis_name="tensor",
                batch_axis_name=("data",),
            ),
            problem,
        )
    assert_close(actual, expected)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_half_precision(mode: str) -> None:
    """Partial results are rounded, but merged in float32."""
    problem = Problem(arrays=make_arrays(dtype=jnp.bfloat16), options={"is_causal": True})
    expected = results_and_gradients(problem.single, problem)
    actual = results_and_gradients(
        lambda arrays: problem.spread(arrays, mode=mode, order="zigzag", mesh=make_mesh()), problem
    )
    assert actual["output"].dtype == jnp.bfloat16
    assert actual["lse"].dtype == jnp.float32
    assert_close(actual, expected, tolerance=3e-2)


@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_one_device_alone(mode: str) -> None:
    problem = causal()
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices("cpu")[:1])
    expected = results_and_gradients(problem.single, problem)
    actual = results_and_gradients(
        lambda arrays: problem.spread(arrays, mode=mode, mesh=mesh), problem
    )
    assert_close(actual, expected)


def test_without_a_batch_and_with_two_leading_dimensions() -> None:
    arrays = make_arrays()
    options = {"is_causal": True, "axis_name": "context", "mode": "ring", "mesh": make_mesh()}
    whole = context_parallel.attention(**arrays, **options)
    alone = context_parallel.attention(**{name: x[0] for name, x in arrays.items()}, **options)
    nested = context_parallel.attention(**{name: x[None] for name, x in arrays.items()}, **options)
    np.testing.assert_allclose(alone, whole[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(nested[0], whole, rtol=2e-6, atol=2e-6)
