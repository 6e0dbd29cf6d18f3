"""Calls of kernels on sharded arrays: each device runs them on its own part.

Who says how arrays are sharded depends on the mesh's axes:

    Manual     the caller, in shard_map: the arrays are a device's part already
    Explicit   the arrays' types: `explicit_sharding` has put a shard_map around this
    Auto       XLA, when it compiles: it asks for a rule, and then for each device's program
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_flash.ops.device_plan import (
    DevicePlan,
    MeshAxes,
    ShardedOperand,
    is_splittable,
    mesh_axes,
    named_axes,
    plan_devices,
    run_on_part,
)
from jax_flash.ops.dispatch import KernelCall
from jax_flash.ops.ffi_calls import buffer_shape, call_handler
from jax_flash.spec.launch_plan import Buffer, Operation

_OF_RESULTS = ("output", "lse", "d_output", "d_lse", "lse_log2", "delta")
"""Operands that are results of another operation, or their cotangents."""
_RESHARD = (
    "jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(batch, None, heads, "
    "None)))"
)


def call_operation(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Runs an operation's kernels, on each device for its part of the batch and the heads.

    Args:
      operation: the forward or backward operation of `call`.
      call: scalars of the call.
      operands: arrays by the names in `operation.operand_names`, with equal leading dimensions.

    Returns:
      The result buffers by name, workspaces among them.

    Raises:
      ValueError: a sequence or head dimension is sharded over an Auto axis; when XLA compiles.
    """
    mesh = jax.typeof(operands["query"]).sharding.mesh
    if mesh.empty or AxisType.Auto in mesh.axis_types:
        return _call_on_automatic_parts(operation, call, operands)
    return call_handler(operation, call, operands)


def _call_on_automatic_parts(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    leading = operands["query"].ndim - 3
    run = _partitioned_call(operation, call, leading)
    results = run(*(operands[name] for name in operation.operand_names))
    return dict(zip((buffer.name for buffer in operation.results), results, strict=True))


@functools.cache
def _partitioned_call(operation: Operation, call: KernelCall, leading: int) -> Any:
    """Returns a function of an operation's operands that XLA partitions by our rule."""
    names = operation.operand_names

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            call_handler(operation, call, dict(zip(names, operands, strict=True))).values()
        )

    def run_part(
        plan: DevicePlan | None, sum_bias_over: MeshAxes, *parts: jax.Array
    ) -> tuple[jax.Array, ...]:
        # XLA may ask while the caller's mesh is in use; a device's part is no array on that mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            if plan is None:
                return run(*parts)
            named = dict(zip(names, parts, strict=True))
            handler = functools.partial(call_handler, operation, call)
            return tuple(run_on_part(plan, handler, named, sum_bias_over).values())

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        if not all(isinstance(info.sharding, NamedSharding) for info in operands):
            _check_unnamed_parts(operation, leading, operands, results)
            shardings = [tuple(info.sharding for info in infos) for infos in (results, operands)]
            return mesh, functools.partial(run_part, None, ()), *shardings
        plan = _automatic_plan(operation, leading, mesh, operands)
        axes = _operand_axes(operation, leading)
        shapes = {name: info.shape for name, info in zip(names, operands, strict=True)}
        specs = [plan.spec(axes[name], shapes[name]) for name in names]
        result_specs = [_result_spec(plan, operation, b, shapes) for b in operation.results]
        sum_bias_over = next(
            (
                plan.axes_without(spec)
                for buffer, spec in zip(operation.results, result_specs, strict=True)
                if buffer.like
            ),
            (),
        )
        return (
            mesh,
            functools.partial(run_part, plan, sum_bias_over),
            tuple(NamedSharding(mesh, spec) for spec in result_specs),
            tuple(NamedSharding(mesh, spec) for spec in specs),
        )

    partitioned = custom_partitioning(run)
    partitioned.def_partition(
        partition,
        sharding_rule=lambda mesh, operand_types, result_types: _sharding_rule(
            operation, leading, operand_types
        ),
    )
    return partitioned


def _automatic_plan(operation: Operation, leading: int, mesh: Any, operands: Any) -> DevicePlan:
    axes = _operand_axes(operation, leading)
    sharded = [
        ShardedOperand(
            name=name,
            shape=info.shape,
            axes=axes[name],
            sharding=mesh_axes(info.sharding.spec, len(info.shape)),
        )
        for name, info in zip(operation.operand_names, operands, strict=True)
        if name not in _OF_RESULTS
    ]
    return plan_devices(sharded, dict(mesh.shape), reshard=_RESHARD, must_agree=False)


def _check_unnamed_parts(operation: Operation, leading: int, operands: Any, results: Any) -> None:
    """Checks that devices can do as they are, where XLA tells parts but not mesh axes.

    It does so inside a shard_map over some axes of a mesh whose other axes are Auto.

    Raises:
      ValueError: batch and heads are not sharded alike everywhere, or another axis is sharded.
    """
    parts: dict[str, set[int]] = {}
    for buffer, info in zip(
        (*operation.operands, *operation.results), (*operands, *results), strict=True
    ):
        axes = named_axes(leading, buffer.axes, len(info.shape))
        here = info.sharding.shard_shape(info.shape)
        for axis, size, part in zip(axes, info.shape, here, strict=True):
            if buffer.broadcast and size == 1:
                continue
            name = "query_heads" if axis == "key_heads" else axis
            parts.setdefault(name, set()).add(size // part)
    query, key, value = operands[:3]
    alike = query.sharding == key.sharding == value.sharding
    if alike and all(
        len(counts) == 1 and (is_splittable(name) or counts == {1})
        for name, counts in parts.items()
    ):
        return
    local = ", ".join(
        f"{name} {tuple(info.shape)} in parts of {info.sharding.shard_shape(info.shape)}"
        for name, info in zip(("query", "key", "value"), operands[:3], strict=True)
    )
    raise ValueError(
        f"Inside a shard_map over some axes of a mesh, XLA shards over its Auto axes {local}. "
        "jax_flash.attention needs them sharded alike there, on batch and heads only. Give the "
        "other axes AxisType.Explicit, or name them in the shard_map's axis_names, too."
    )


def _sharding_rule(operation: Operation, leading: int, operand_types: Any) -> SdyShardingRule:
    """Returns what XLA may assume of an operation's shardings.

    Batch and heads are sharded alike in operands and results. The other axes of operands keep the
    sharding they came with, which is then refused. Those of results and cotangents are never
    sharded, so that results can be cut up afterwards by who wants them so.
    """
    types = dict(zip(operation.operand_names, operand_types, strict=True))
    # With as many key heads, the two are one axis.
    same_heads = types["query"].shape[-2] == types["key"].shape[-2]
    whole: list[str] = []

    def factor(kind: str, axis: str) -> str:
        if is_splittable(axis):
            return "query_heads" if same_heads and axis == "key_heads" else axis
        name = f"{kind}_{axis}"
        if kind != "operand" and name not in whole:
            whole.append(name)
        return name

    def mapping(buffer: Buffer, kind: str) -> ArrayMapping:
        axes = named_axes(leading, buffer.axes, leading + len(buffer.axes))
        if not buffer.broadcast:
            return ArrayMapping(*(factor(kind, axis) for axis in axes))
        shape = types[buffer.like or buffer.name].shape
        # An axis of size 1 is none of those that others have.
        return ArrayMapping(
            *(
                factor("result", f"{buffer.name}_{axis}_of_one")
                if size == 1
                else factor(kind, axis)
                for axis, size in zip(axes, shape, strict=True)
            )
        )

    return SdyShardingRule(
        tuple(
            mapping(buffer, "result" if buffer.name in _OF_RESULTS else "operand")
            for buffer in operation.operands
        ),
        tuple(mapping(buffer, "result") for buffer in operation.results),
        need_replication_factors=tuple(whole),
    )


def _operand_axes(operation: Operation, leading: int) -> dict[str, tuple[str, ...]]:
    return {
        buffer.name: named_axes(leading, buffer.axes, leading + len(buffer.axes))
        for buffer in operation.operands
    }


def _result_spec(
    plan: DevicePlan,
    operation: Operation,
    buffer: Buffer,
    shapes: Mapping[str, tuple[Any, ...]],
) -> PartitionSpec:
    shape = buffer_shape(buffer, operation, shapes)
    leading = len(shape) - len(buffer.axes)
    return plan.spec(named_axes(leading, buffer.axes, len(shape)), shape)
