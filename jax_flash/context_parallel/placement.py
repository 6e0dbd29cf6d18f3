"""Where a context-parallel call runs: its mesh axes, their checks, and shard_map around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash.context_parallel.local_calls import Operands, Options
from jax_flash.context_parallel.order import check_order
from jax_flash.reference.chunked_backward import Results

AxisNames = str | tuple[str, ...] | None
"""Type of arguments that name the mesh axes of one array axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a call is spread over devices; hashable, part of every jit key.

    Attributes:
        axis_name: the mesh axis of the sequence.
        mode: what is communicated.
        order: one of `order.ORDERS`.
        mesh: for shard_map; None inside of it.
        batch_axes: mesh axes of the first leading dimension.
        head_axes: mesh axes of the heads.
    """

    axis_name: str
    mode: str
    order: str
    mesh: Mesh | AbstractMesh | None
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]

    @property
    def is_inside_shard_map(self) -> bool:
        return self.mesh is None

    @property
    def chunks(self) -> int:
        """Parts of a device's sequence, which must have one length."""
        return 2 if self.order == "zigzag" else 1

    @property
    def shards(self) -> int:
        """Devices that share a sequence."""
        if self.mesh is None:
            return jax.lax.axis_size(self.axis_name)
        return self.mesh.shape[self.axis_name]


def placement_of(modes: tuple[str, ...], **arguments: Any) -> Placement:
    """Checks where a call is to run.

    Args:
        modes: names that `mode` may have.
        **arguments: the arguments of `attention` of these names: axis_name, mode, order, mesh,
            batch_axis_name, head_axis_name.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an unknown mode or order, no mesh, or a mesh without one of the axes.
    """
    axis_name, mode, mesh = arguments["axis_name"], arguments["mode"], arguments["mesh"]
    if not isinstance(axis_name, str):
        raise TypeError(
            f"axis_name is {axis_name!r} ({type(axis_name).__name__}); it must be a string, the "
            "name of the mesh axis that the sequence is sharded over."
        )
    if mode not in modes:
        raise ValueError(
            f"mode is {mode!r}; it must be one of {', '.join(map(repr, modes))}. See "
            "jax_flash.context_parallel.attention for what they communicate."
        )
    check_order(arguments["order"])
    placement = Placement(
        axis_name=axis_name,
        mode=mode,
        order=arguments["order"],
        mesh=None,
        batch_axes=_axes("batch_axis_name", arguments["batch_axis_name"]),
        head_axes=_axes("head_axis_name", arguments["head_axis_name"]),
    )
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh is {mesh!r} ({type(mesh).__name__}); it must be a jax.sharding.Mesh. Make one "
            "with jax.make_mesh, or leave it None under jax.set_mesh."
        )
    around = jax.sharding.get_abstract_mesh()
    if axis_name in around.manual_axes:
        _refuse_inside_shard_map(placement, mesh)
        return placement
    return replace(placement, mesh=_checked_mesh(placement, around if mesh is None else mesh))


def _axes(name: str, value: Any) -> tuple[str, ...]:
    axes = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}); it must be the name of a mesh axis, a "
            "tuple of names, or None."
        )
    return axes


def _refuse_inside_shard_map(placement: Placement, mesh: Mesh | AbstractMesh | None) -> None:
    given = {
        "mesh": mesh,
        "batch_axis_name": placement.batch_axes or None,
        "head_axis_name": placement.head_axes or None,
    }
    present = [name for name, value in given.items() if value is not None]
    if present:
        raise ValueError(
            f"{' and '.join(present)} given, inside jax.shard_map over axis "
            f"{placement.axis_name!r}; there, arrays are a device's own parts and the mesh is "
            "known. Leave these arguments out, or call attention outside shard_map."
        )


def _checked_mesh(placement: Placement, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    if mesh.empty:
        raise ValueError(
            f"there is no mesh with axis_name={placement.axis_name!r} here: mesh is None, no mesh "
            "is set, and the call is not inside jax.shard_map over that axis. Pass mesh=, or call "
            "inside `with jax.set_mesh(mesh):`."
        )
    axes = (placement.axis_name, *placement.batch_axes, *placement.head_axes)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in axes:
        if axis not in types:
            raise ValueError(
                f"there is no axis {axis!r} in the mesh, whose axes are {dict(mesh.shape)}. Name "
                f"one of {', '.join(map(repr, mesh.axis_names))}, or make another mesh with "
                "jax.make_mesh."
            )
        if types[axis] is AxisType.Manual:
            raise ValueError(
                f"axis {axis!r} is one of a surrounding jax.shard_map, but axis_name="
                f"{placement.axis_name!r} is not. Make both manual in that shard_map, and leave "
                "out batch_axis_name and head_axis_name."
            )
    if len(set(axes)) != len(axes):
        raise ValueError(
            f"axis_name is {placement.axis_name!r}, batch_axis_name {placement.batch_axes} and "
            f"head_axis_name {placement.head_axes}; a mesh axis can shard only one of the "
            "sequence, the batch and the heads. Use a mesh with more axes."
        )
    return mesh


def _check_divisible(placement: Placement, operands: Operands) -> None:
    sizes = dict(placement.mesh.shape) if placement.mesh is not None else {}
    query, key = operands.query, operands.key

    def check(name: str, size: Any, axes: tuple[str, ...], chunks: int, remedy: str) -> None:
        shards = math.prod(sizes[axis] for axis in axes)
        if size % (shards * chunks):
            over = " and ".join(f"{axis!r} of size {sizes[axis]}" for axis in axes)
            twice = f" (two chunks for each of {shards} devices)" if chunks == 2 else ""
            raise ValueError(
                f"{name}={size}, sharded over axis {over}; it must be a multiple of "
                f"{shards * chunks}{twice}. {remedy}"
            )

    pad = "Pad the sequence (and pass lengths), or use a smaller axis."
    heads = "Use a smaller axis, or repeat the key and value heads if it is they that are too few."
    sequence = (placement.axis_name,)
    check("query has T", query.shape[-3], sequence, placement.chunks, pad)
    check("key has S", key.shape[-3], sequence, placement.chunks, pad)
    check("query has N", query.shape[-2], placement.head_axes, 1, heads)
    check("key has K", key.shape[-2], placement.head_axes, 1, heads)
    if placement.batch_axes:
        if len(query.shape) == 3:
            raise ValueError(
                f"batch_axis_name is {placement.batch_axes}, but query has shape "
                f"{query.shape}, [T, N, D], without a batch dimension. Leave it None."
            )
        batch = "Use a batch that the axis divides, or a smaller axis."
        check("the batch size is B", query.shape[0], placement.batch_axes, 1, batch)


def attend_on_mesh(
    placement: Placement,
    options: Options,
    operands: Operands,
    attend: Callable[[Options, Operands], Results],
) -> Results:
    """Calls `attend` on every device of the mesh, on its parts of the operands.

    Raises:
        ValueError: a size that does not divide into its mesh axis.
    """
    placement = _with_axes_of_query(placement, operands.query)
    _check_divisible(placement, operands)
    return _run_on_mesh(operands, placement=placement, options=options, attend=attend)


# Compiled as a whole when called eagerly; inlined, so that a caller's jit sees what is inside.
@partial(jax.jit, static_argnames=("placement", "options", "attend"), inline=True)
def _run_on_mesh(
    operands: Operands,
    *,
    placement: Placement,
    options: Options,
    attend: Callable[[Options, Operands], Results],
) -> Results:
    given = {field.name: getattr(operands, field.name) for field in fields(operands)}
    arrays = {name: array for name, array in given.items() if array is not None}
    all_specs = _specs(placement, operands)
    specs = {name: all_specs[name] for name in arrays}
    on_every_device = jax.shard_map(
        lambda parts: tuple(attend(options, Operands(**parts))),
        mesh=placement.mesh,
        in_specs=(specs,),
        out_specs=(specs["query"], PartitionSpec(*specs["query"][:-1])),
        axis_names={placement.axis_name, *placement.batch_axes, *placement.head_axes},
    )
    placed = {name: _place(placement, name, array, specs[name]) for name, array in arrays.items()}
    return Results(*on_every_device(placed))


def _specs(placement: Placement, operands: Operands) -> dict[str, PartitionSpec]:
    """How each operand is sharded."""
    leading: list[Any] = [None] * (operands.query.ndim - 3)
    if placement.batch_axes:
        leading[0] = placement.batch_axes
    heads = placement.head_axes or None
    rows = PartitionSpec(*leading, placement.axis_name, heads, None)
    per_position = PartitionSpec(*leading, placement.axis_name)
    per_sequence = PartitionSpec(*leading)
    offset = operands.query_offset
    return {
        "query": rows,
        "key": rows,
        "value": rows,
        "query_offset": PartitionSpec() if offset is None or offset.ndim == 0 else per_sequence,
        "query_lengths": per_sequence,
        "key_lengths": per_sequence,
        "query_segment_ids": per_position,
        "key_segment_ids": per_position,
        "sinks": PartitionSpec(heads),
    }


def _explicit_axes(array: jax.Array, dimension: int) -> tuple[str, ...]:
    """The mesh axes of type Explicit that a dimension is sharded over, according to its type."""
    sharding = jax.typeof(array).sharding
    entry = tuple(sharding.spec)[dimension] if dimension < len(sharding.spec) else None
    axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return tuple(axis for axis in axes if types.get(axis) is AxisType.Explicit)


def _with_axes_of_query(placement: Placement, query: jax.Array) -> Placement:
    """Fills in the axes of batch and heads where the type of query tells them."""

    def axes(dimension: int) -> tuple[str, ...]:
        found = _explicit_axes(query, dimension)
        return () if placement.axis_name in found else found

    return replace(
        placement,
        batch_axes=placement.batch_axes or (axes(0) if query.ndim > 3 else ()),
        head_axes=placement.head_axes or axes(query.ndim - 2),
    )


def _place(placement: Placement, name: str, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Shards an array that is not sharded yet: where mesh axes are Explicit, shard_map does not.

    Raises:
        ValueError: it is sharded otherwise, so that this would move data between devices.
    """
    mesh = placement.mesh
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return array
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wanted = [
        entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for entry in (*spec, *[None] * (array.ndim - len(spec)))
    ]
    manual = {axis for axes in wanted for axis in axes}
    merged = []
    for dimension, axes in enumerate(wanted):
        has = _explicit_axes(array, dimension)
        needs = tuple(axis for axis in axes if types[axis] is AxisType.Explicit)
        if has[: len(needs)] == needs and manual.isdisjoint(has[len(needs) :]):
            merged.append(has)
        elif manual.isdisjoint(has):
            merged.append(needs + has)
        else:
            raise ValueError(
                f"{name} is {jax.typeof(array)}, but it must be sharded as {spec}, and a mesh axis "
                "of these shards another dimension now. Name batch_axis_name and head_axis_name "
                "as the arrays have them, or move the array with jax.sharding.reshard first."
            )
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*merged)))
