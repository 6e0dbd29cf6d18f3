"""Attention on meshes with Explicit axes: each device computes its part, under `shard_map`.

The shardings are in the operands' types, so everything is decided, and refused, while tracing; what
it becomes can be cached and exported as any program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash.ops.device_plan import (
    DevicePlan,
    ShardedOperand,
    mesh_axes,
    named_axes,
    plan_devices,
    run_on_part,
)
from jax_flash.reference.semantics import Semantics
from jax_flash.spec.buffers import DENSE_AXES, INPUTS, RESULTS

_AXES = {
    **{buffer.name: buffer.axes for buffer in (*INPUTS, *RESULTS)},
    **{f"d_{buffer.name}": buffer.axes for buffer in (*INPUTS, *RESULTS)},
    "query_offset": (),
    "query_lengths": (),
    "key_lengths": (),
    "query_segment_ids": ("query_length",),
    "key_segment_ids": ("key_length",),
    "bias": DENSE_AXES,
    "mask": DENSE_AXES,
    "d_bias": DENSE_AXES,
    "sinks": ("query_heads",),
    "d_sinks": ("query_heads",),
}
"""Axes after the leading ones; an array may lack leading ones."""

_RESHARD = "jax.sharding.reshard(array, jax.sharding.PartitionSpec(batch, None, heads, None))"


def on_each_device(
    function: Callable[[jax.Array, jax.Array, jax.Array, Semantics], tuple[jax.Array, jax.Array]],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
) -> tuple[jax.Array, jax.Array]:
    """Runs `function` on each device's part of operands that are sharded over Explicit axes.

    Operands that are not sharded where others are get cut up, too, which costs no communication.
    Gradients of what devices share are summed over them.

    Args:
        function: takes query, key, value and semantics, and returns output and log-sum-exp.
        query: [..., T, N, D].
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        semantics: the call's.

    Returns:
        output [..., T, N, Dv] and log-sum-exp [..., T, N], with batch and heads sharded as the
        operands'. Without Explicit axes in the operands' types, just what `function` returns.

    Raises:
        ValueError: a sequence or head dimension is sharded, or operands disagree.
    """
    arrays = {"query": query, "key": key, "value": value} | {
        field.name: getattr(semantics, field.name)
        for field in fields(semantics)
        if field.name in _AXES and getattr(semantics, field.name) is not None
    }
    leading = query.ndim - 3
    axes = {name: named_axes(leading, _AXES[name], x.ndim) for name, x in arrays.items()}
    plan = explicit_plan(arrays, axes)
    if plan is None:
        return function(query, key, value, semantics)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        operands = _own_key_heads(plan, arrays)
        optional = {
            name: x for name, x in operands.items() if name not in ("query", "key", "value")
        }
        return function(
            operands["query"], operands["key"], operands["value"], replace(semantics, **optional)
        )

    specs = {name: plan.spec(axes[name], x.shape) for name, x in arrays.items()}
    output = named_axes(leading, ("query_length", "query_heads", "value_head_dim"), query.ndim)
    rows = plan.spec(output[:-1], query.shape[:-1])
    return shard_map_of_plan(plan, run, arrays, specs, (PartitionSpec(*rows, None), rows))


def on_each_part(
    function: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]],
    arrays: Mapping[str, jax.Array],
    wanted: tuple[str, ...],
    bias_shape: tuple[Any, ...] = (),
) -> dict[str, jax.Array]:
    """Runs one pass on each device's part, where `on_each_device` has left Explicit axes.

    It has where an axis that vmap maps is sharded, and where it was not used.

    Args:
        function: the pass; takes and returns arrays by name.
        arrays: with equal leading dimensions.
        wanted: names of the results, which have those leading dimensions, too.
        bias_shape: of the gradient of a bias, if that is wanted; its dimensions may be 1.

    Returns:
        The wanted results.

    Raises:
        ValueError: see `plan_devices`.
    """
    query, value = arrays["query"], arrays["value"]
    leading = query.ndim - 3
    axes = {name: named_axes(leading, _AXES[name], x.ndim) for name, x in arrays.items()}
    plan = explicit_plan(arrays, axes)
    if plan is None:
        return function(arrays)
    sizes = dict(zip(axes["query"], query.shape, strict=True))
    sizes |= dict(zip(axes["value"], value.shape, strict=True))

    def spec_of_result(name: str) -> PartitionSpec:
        result = named_axes(leading, _AXES[name], leading + len(_AXES[name]))
        if name == "d_bias":
            return plan.spec(result, bias_shape)
        return plan.spec(result, tuple(sizes[axis] for axis in result))

    specs = {name: plan.spec(axes[name], x.shape) for name, x in arrays.items()}
    out_specs = {name: spec_of_result(name) for name in wanted}

    def run(parts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        shared = plan.axes_without(out_specs["d_bias"]) if "d_bias" in wanted else ()
        results = run_on_part(plan, function, parts, shared)
        return {name: results[name] for name in wanted}

    return shard_map_of_plan(plan, run, arrays, specs, out_specs)


def explicit_plan(
    arrays: Mapping[str, jax.Array], axes: Mapping[str, tuple[str, ...]]
) -> DevicePlan | None:
    """Returns how arrays are cut up by the Explicit axes in their types, None if by none.

    Raises:
        ValueError: see `plan_devices`.
    """
    operands = [_sharded_operand(name, x, axes[name]) for name, x in arrays.items()]
    if not any(axis for operand in operands for axis in operand.sharding):
        return None
    mesh = jax.typeof(arrays["query"]).sharding.mesh
    return plan_devices(operands, dict(mesh.shape), reshard=_RESHARD, must_agree=True)


def shard_map_of_plan(
    plan: DevicePlan,
    function: Callable[[dict[str, jax.Array]], Any],
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, PartitionSpec],
    out_specs: Any,
) -> Any:
    """Runs `function` on each device's part of `arrays`, over the mesh axes of the plan."""
    mesh = jax.typeof(arrays["query"]).sharding.mesh
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(dict(specs),),
        out_specs=out_specs,
        axis_names=plan.mesh_axes,
    )
    return run({name: _resharded(x, mesh, specs[name]) for name, x in arrays.items()})


def _resharded(array: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    # Inside a shard_map over other axes, jax 0.10.2 gathers for a reshard that changes nothing.
    if mesh_axes(jax.typeof(array).sharding.spec, array.ndim) == mesh_axes(spec, array.ndim):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


def _own_key_heads(plan: DevicePlan, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    if plan.key_heads_are_split:
        return arrays

    # In float32, so that the gradient, the transpose of all this, is summed over devices in it.
    def take(array: jax.Array) -> jax.Array:
        return plan.take_key_heads(array.astype(jnp.float32)).astype(array.dtype)

    return arrays | {name: take(arrays[name]) for name in ("key", "value")}


def _sharded_operand(name: str, array: jax.Array, axes: tuple[str, ...]) -> ShardedOperand:
    sharding = jax.typeof(array).sharding
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return ShardedOperand(
        name=name,
        shape=array.shape,
        axes=axes,
        sharding=tuple(
            tuple(axis for axis in entry if types[axis] is AxisType.Explicit)
            for entry in mesh_axes(sharding.spec, array.ndim)
        ),
    )
