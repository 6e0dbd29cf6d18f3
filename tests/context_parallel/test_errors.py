"""Errors appear while tracing, and name the axis, the sizes and the way out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash import context_parallel

from .single_device import make_mesh

ROWS = PartitionSpec(None, "context")


def trace(
    shape: tuple[int, ...] = (2, 32, 4, 8), key_shape: tuple[int, ...] | None = None, **options: Any
) -> Any:
    """Traces a call on whole arrays; nothing is computed."""
    options = {"axis_name": "context", "mesh": make_mesh(tensor=2)} | options
    query = jax.ShapeDtypeStruct(shape, jnp.float32)
    key = jax.ShapeDtypeStruct(key_shape or shape, jnp.float32)
    return jax.eval_shape(partial(context_parallel.attention, **options), query, key, key)


def test_the_calls_below_work_but_for_what_they_change() -> None:
    assert trace(batch_axis_name="data", head_axis_name="tensor").shape == (2, 32, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "all"}, "mode is 'all'; it must be one of 'all_gather', 'ring', 'all_to_all'"),
        ({"order": "striped"}, "order is 'striped'; .* 'contiguous', 'zigzag'.* to_zigzag"),
        ({"mesh": None}, r"no mesh with axis_name='context' here: .* Pass mesh=, or .*set_mesh"),
        ({"axis_name": "sequence"}, "no axis 'sequence' in the mesh, .*'context': 4.* Name one of"),
        ({"batch_axis_name": "dp"}, "no axis 'dp' in the mesh"),
        ({"head_axis_name": "context"}, "a mesh axis can shard only one of"),
        (
            {"shape": (2, 30, 4, 8)},
            "query has T=30, sharded over axis 'context' of size 4; .* 4. Pad",
        ),
        (
            {"shape": (2, 28, 4, 8), "order": "zigzag"},
            r"T=28, .*'context' of size 4; it must be a multiple of 8 \(two chunks .* 4 devices",
        ),
        ({"key_shape": (2, 33, 4, 8)}, "key has S=33, sharded over axis 'context' of size 4"),
        (
            {"shape": (2, 32, 3, 8), "head_axis_name": "tensor"},
            "query has N=3, sharded over axis 'tensor' of size 2; .* 2. .*repeat the key",
        ),
        (
            {"shape": (2, 32, 4, 8), "key_shape": (2, 32, 1, 8), "head_axis_name": "tensor"},
            "key has K=1, sharded over axis 'tensor' of size 2",
        ),
        (
            {
                "shape": (3, 32, 4, 8),
                "batch_axis_name": ("context2",),
                "mesh": jax.make_mesh(
                    (4, 2), ("context", "context2"), devices=jax.devices("cpu")[:8]
                ),
            },
            "the batch size is B=3, sharded over axis 'context2' of size 2; .* a smaller axis",
        ),
        ({"shape": (32, 4, 8), "batch_axis_name": "data"}, "without a batch dimension. Leave it"),
        (
            {"shape": (2, 32, 6, 8), "mode": "all_to_all"},
            "axis 'context' of size 4, and query has N=6 heads .* of 4. Use mode='ring'",
        ),
        (
            {"shape": (2, 32, 12, 8), "key_shape": (2, 32, 3, 8), "mode": "all_to_all"},
            "size 4, and key has K=3 heads .* multiple of 4, or a divisor .* repeat the key",
        ),
        # What jax_flash.attention refuses.
        ({"logits_soft_cap": 0}, "logits_soft_cap is 0.0"),
    ],
)
def test_values_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": ("a", "b")}, r"axis_name is \('a', 'b'\) \(tuple\); it must be a string"),
        ({"mesh": "context"}, r"mesh is 'context' \(str\); it must be a jax.sharding.Mesh"),
        ({"head_axis_name": 1}, r"head_axis_name is 1 \(int\); it must be the name of a mesh axis"),
    ],
)
def test_types_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        trace(**options)


def trace_inside(length: int = 32, axes: set[str] | None = None, **options: Any) -> Any:
    """Traces a call inside shard_map over "context", or over other axes."""
    options = {"axis_name": "context"} | options
    axes = axes or {"context"}
    out_specs = ROWS if "context" in axes else PartitionSpec("data")

    @partial(
        jax.shard_map,
        mesh=make_mesh(),
        in_specs=PartitionSpec(),
        out_specs=out_specs,
        axis_names=axes,
    )
    def run(rows: jax.Array) -> jax.Array:
        return context_parallel.attention(rows, rows, rows, **options)

    return jax.eval_shape(run, jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mesh": make_mesh(), "batch_axis_name": "data"},
            "mesh and batch_axis_name given, inside jax.shard_map over axis 'context'",
        ),
        (
            {"length": 7, "order": "zigzag"},
            "T=7 positions on each of the 4 devices of axis 'context'; .* even. Pad .* of 8",
        ),
        ({"axis_name": "sequence"}, "no axis 'sequence' in the mesh"),
        (
            {"axes": {"data"}, "batch_axis_name": "data"},
            "axis 'data' is one of a surrounding jax.shard_map, but axis_name='context' is not",
        ),
    ],
)
def test_inside_shard_map(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_inside(**arguments)


def test_arrays_that_are_sharded_otherwise_are_not_moved() -> None:
    mesh = make_mesh(AxisType.Explicit)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "context"))
    rows = jax.ShapeDtypeStruct((2, 32, 4, 8), jnp.float32, sharding=heads)
    call = partial(context_parallel.attention, axis_name="context")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"query is float32\[2,32,4@context,8\], but it must be"),
    ):
        jax.jit(call).trace(rows, rows, rows)
    query = jax.ShapeDtypeStruct(
        (2, 32, 4, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "context"))
    )
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"key is float32\[2,32,4@context,8\], but it must be"),
    ):
        jax.jit(call).trace(query, rows, rows)
