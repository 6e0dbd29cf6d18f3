"""The FFI calls: result buffers, attributes, and the only place that makes them.

What the handlers do with them is in ffi/handlers.cc; the names of operands, results and scalars
are those of `jax_flash.spec.kernel_args`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from jax_flash.ops.dispatch import KernelCall
from jax_flash.ops.packed_heads import with_packed_heads
from jax_flash.spec.launch_plan import Buffer, Operation

CALL_VERSION = 1
"""Version of the attributes' meaning; part of exported programs."""

_RESULT_DTYPES = {"float32": np.float32, "int32": np.int32}

_BOUND_LIMIT = 2**30
"""A band bound of this size hides everything or nothing, as no position reaches it."""


def call_handler(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Runs an operation's kernels on arrays that this device has in full.

    Args:
      operation: the forward or backward operation of `call`.
      call: scalars of the call.
      operands: arrays by the names in `operation.operand_names`, with equal leading dimensions.

    Returns:
      The result buffers by name, workspaces among them.
    """
    return with_packed_heads(_call, operation, call, operands)


def _call(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    results = jax.ffi.ffi_call(
        operation.target,
        [_result_type(buffer, operation, operands) for buffer in operation.results],
    )(*(operands[name] for name in operation.operand_names), **call_attributes(operation, call))
    names = (buffer.name for buffer in operation.results)
    return dict(zip(names, results, strict=True))


def call_attributes(operation: Operation, call: KernelCall) -> dict[str, Any]:
    """Returns the attributes of an FFI call.

    The numpy types decide the attributes' types: a Python float would arrive as float64.
    """
    return {
        "version": np.int32(CALL_VERSION),
        "kernels": ",".join(kernel.name for kernel in operation.kernels),
        "operands": ",".join(operation.operand_names),
        "results": ",".join(buffer.name for buffer in operation.results),
        "scale": np.float32(call.scale),
        "scale_log2": np.float32(call.scale * math.log2(math.e)),
        "inverse_scale": np.float32(1 / call.scale),
        "soft_cap": np.float32(call.soft_cap),
        "band_lower": _bound(call.band.lower),
        "band_upper": _bound(call.band.upper),
        "rows_per_query": np.int32(call.rows_per_query),
    }


def buffer_shape(
    buffer: Buffer, operation: Operation, shapes: Mapping[str, tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Returns the shape of a result buffer from the shapes of the operands."""
    if buffer.like:
        return shapes[buffer.like]
    leading, sizes = shapes["query"][:-3], _axis_sizes(operation, shapes)
    return (*leading, *(sizes[axis] for axis in buffer.axes))


def workspace_bytes(operation: Operation, shapes: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns the bytes of an operation's results beyond those that its caller wants.

    An integer, or an expression of the symbolic dimensions in the shapes.
    """
    wanted = ("output", "lse", "d_query", "d_key", "d_value", "d_bias")
    workspaces = [buffer for buffer in operation.results if buffer.name not in wanted]
    return sum(
        math.prod(buffer_shape(buffer, operation, shapes))
        * np.dtype(_RESULT_DTYPES[buffer.dtype]).itemsize
        for buffer in workspaces
    )


def _bound(bound: int | None) -> np.int32:
    if bound is None:
        return np.int32(0)
    return np.int32(max(-_BOUND_LIMIT, min(bound, _BOUND_LIMIT)))


def _axis_sizes(operation: Operation, shapes: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    query_length, query_heads, head_dim = shapes["query"][-3:]
    key_length, key_heads, value_head_dim = shapes["value"][-3:]
    query_tiles = -(-query_length // operation.tile_q)
    return {
        "query_length": query_length,
        "query_heads": query_heads,
        "head_dim": head_dim,
        "key_length": key_length,
        "key_heads": key_heads,
        "value_head_dim": value_head_dim,
        "query_tiles": query_tiles,
        "padded_query_length": query_tiles * operation.tile_q,
        "padded_head_dim": operation.padded_head_dim,
    }


def _result_type(
    buffer: Buffer, operation: Operation, operands: Mapping[str, jax.Array]
) -> jax.ShapeDtypeStruct:
    """Returns the type of one result, sharded and varying as the operands are.

    Without these two facts `shard_map` would take a result for one that is equal on all devices.
    """
    query = operands["query"]
    shape = buffer_shape(buffer, operation, {name: x.shape for name, x in operands.items()})
    dtype = _RESULT_DTYPES.get(buffer.dtype, query.dtype)
    types = {name: jax.typeof(operand) for name, operand in operands.items()}
    mesh = types["query"].sharding.mesh
    if mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    varying = frozenset[str]().union(*(t.manual_axis_type.varying for t in types.values()))
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(mesh, _partition(buffer, types)),
        manual_axis_type=ManualAxisType(varying=varying),
    )


def _partition(buffer: Buffer, types: Mapping[str, Any]) -> PartitionSpec:
    """Returns how a result is sharded: each axis as the operand axis that it stands for."""

    def spec(name: str) -> tuple[Any, ...]:
        given = tuple(types[name].sharding.spec)
        return given + (None,) * (types[name].ndim - len(given))

    if buffer.like:
        return PartitionSpec(*spec(buffer.like))
    query, value = spec("query"), spec("value")
    axes = {
        "query_length": query[-3],
        "query_heads": query[-2],
        "head_dim": query[-1],
        "key_length": value[-3],
        "key_heads": value[-2],
        "value_head_dim": value[-1],
    }
    used = {name for entry in query[:-3] for name in _mesh_axes(entry)}
    entries = list(query[:-3])
    for axis in buffer.axes:
        entry = axes.get(axis)
        # A mesh axis shards one array axis at most.
        entries.append(None if used.intersection(_mesh_axes(entry)) else entry)
        used.update(_mesh_axes(entry))
    return PartitionSpec(*entries)


def _mesh_axes(entry: Any) -> tuple[Any, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
