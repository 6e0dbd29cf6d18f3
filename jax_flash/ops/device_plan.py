"""Which part of a call each device computes: some of its batch elements, some of its query heads.

Nothing else of a call can be split without communication inside it. Where there are fewer key heads
than parts, each device takes the key heads that its query heads read from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

MeshAxes: TypeAlias = tuple[str, ...]
"""Mesh axes that shard one array axis; empty for none."""

_LETTERS = {
    "query_length": "T",
    "key_length": "S",
    "query_heads": "N",
    "key_heads": "K",
    "head_dim": "D",
    "value_head_dim": "Dv",
}
_HEAD_DIMS = ("head_dim", "value_head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedOperand:
    """An operand and how it is sharded.

    Attributes:
        name: for error texts.
        shape: of the whole array.
        axes: a name for each dimension; see `named_axes`.
        sharding: mesh axes of each dimension.
    """

    name: str
    shape: tuple[Any, ...]
    axes: tuple[str, ...]
    sharding: tuple[MeshAxes, ...]


def named_axes(leading: int, axes: tuple[str, ...], rank: int) -> tuple[str, ...]:
    """Returns axis names for an array of `rank` dimensions, aligned from the last.

    Args:
        leading: how many leading dimensions query has; they are called "batch_0", "batch_1", ...
        axes: names of the dimensions after the leading ones.
        rank: of an array that may lack some of the first dimensions.
    """
    names = (*(f"batch_{index}" for index in range(leading)), *axes)
    return names[len(names) - rank :]


def is_splittable(axis: str) -> bool:
    """Whether devices may have parts of an axis: batch or heads."""
    return axis.startswith("batch_") or axis in ("query_heads", "key_heads")


def mesh_axes(spec: PartitionSpec, rank: int) -> tuple[MeshAxes, ...]:
    """Returns the mesh axes of each of `rank` dimensions."""
    entries = [() if entry is None else entry for entry in spec]
    padded = entries + [()] * (rank - len(entries))
    return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """How the arrays of one call are cut up.

    Attributes:
        split: mesh axes by the name of the array axis that they shard: batch axes and query_heads.
        mesh_sizes: size of each mesh axis.
        query_heads: N of the whole call.
        key_heads: K of the whole call.
    """

    split: Mapping[str, MeshAxes]
    mesh_sizes: Mapping[str, int]
    query_heads: int
    key_heads: int

    @property
    def parts(self) -> int:
        """Into how many parts the query heads are cut."""
        return self._parts_over(self.head_axes)

    @property
    def key_heads_are_split(self) -> bool:
        """Whether each device has key heads of its own; else all have all of them."""
        return self.key_heads % self.parts == 0

    @property
    def head_axes(self) -> MeshAxes:
        """Mesh axes that the query heads are split over."""
        return self.split.get("query_heads", ())

    @property
    def mesh_axes(self) -> frozenset[str]:
        """All mesh axes that the call is split over."""
        return frozenset(name for axes in self.split.values() for name in axes)

    def spec(self, axes: tuple[str, ...], shape: tuple[Any, ...]) -> PartitionSpec:
        """Returns how an array with these axis names is sharded.

        An axis of size 1 stands for one that does not vary: it is not cut up.
        """
        entries: list[Any] = []
        for axis, size in zip(axes, shape, strict=True):
            if axis == "key_heads":
                split = self.head_axes if self.key_heads_are_split else ()
            else:
                split = self.split.get(axis, ())
            is_one = isinstance(size, int) and size == 1 and self._parts_over(split) > 1
            entries.append(None if is_one or not split else split)
        return PartitionSpec(*entries)

    def axes_without(self, spec: PartitionSpec) -> MeshAxes:
        """Returns the mesh axes that the call is split over, and an array with `spec` is not.

        A gradient with `spec` is summed over them.
        """
        used = {name for axes in mesh_axes(spec, len(spec)) for name in axes}
        return tuple(sorted(self.mesh_axes - used))

    def _parts_over(self, axes: MeshAxes) -> int:
        return math.prod(self.mesh_sizes[name] for name in axes)

    def take_key_heads(self, array: jax.Array) -> jax.Array:
        """Takes what this device's query heads read from all key heads.

        Args:
            array: [..., S, K, D] on each device. Runs where the mesh axes have names.

        Returns:
            [..., S, k, D], where query head n of the device reads head n // (n_local // k).
        """
        return jnp.take(array, self._key_heads_here(), axis=-2)

    def give_key_heads(self, gradient: jax.Array, dtype: Any) -> jax.Array:
        """Transposes `take_key_heads` for one device: zeros where it read nothing, in `dtype`."""
        shape = (*gradient.shape[:-2], self.key_heads, gradient.shape[-1])
        zeros = jnp.zeros(shape, dtype)
        return zeros.at[..., self._key_heads_here(), :].add(gradient.astype(dtype))

    def _key_heads_here(self) -> jax.Array:
        group = self.query_heads // self.key_heads
        local = self.query_heads // self.parts
        # The most query heads in a row that read one key head and divide both.
        together = math.gcd(group, local)
        first = jax.lax.axis_index(self.head_axes) * local
        return (first + together * jnp.arange(local // together)) // group


def run_on_part(
    plan: DevicePlan,
    function: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]],
    operands: Mapping[str, jax.Array],
    sum_bias_over: MeshAxes = (),
) -> dict[str, jax.Array]:
    """Runs `function` on a device's part of a call, where the plan's mesh axes have names.

    Args:
        plan: how the call is cut up.
        function: takes and returns arrays by name.
        operands: the device's parts: of key and value all heads, if the devices share them.
        sum_bias_over: mesh axes over which the devices share elements of a bias.

    Returns:
        What `function` returns; gradients of what devices share are summed over them in float32.
    """
    if plan.key_heads_are_split:
        return _with_shared_bias(function(operands), sum_bias_over)
    own = {name: plan.take_key_heads(operands[name]) for name in ("key", "value")}
    results = _with_shared_bias(function({**operands, **own}), sum_bias_over)
    shared = {
        name: plan.give_key_heads(results[name], jnp.float32)
        for name in ("d_key", "d_value")
        if name in results
    }
    totals = jax.lax.psum(shared, plan.head_axes)
    return results | {name: x.astype(operands["key"].dtype) for name, x in totals.items()}


def _with_shared_bias(results: dict[str, jax.Array], axes: MeshAxes) -> dict[str, jax.Array]:
    if not axes or "d_bias" not in results:
        return results
    return results | {"d_bias": jax.lax.psum(results["d_bias"], axes)}


def plan_devices(
    operands: Iterable[ShardedOperand],
    mesh_sizes: Mapping[str, int],
    *,
    reshard: str,
    must_agree: bool,
) -> DevicePlan:
    """Decides how a call is cut up from how its operands are.

    Args:
        operands: query and key among them, the most decisive first.
        mesh_sizes: size of each mesh axis.
        reshard: what changes an array's sharding here, for error texts.
        must_agree: refuse operands that are sharded differently; else the first decides.

    Returns:
        The plan: an axis is split if it is in any operand.

    Raises:
        ValueError: an axis is sharded that cannot be, operands disagree, or heads do not divide.
    """
    operands = tuple(operands)
    split: dict[str, MeshAxes] = {}
    decided_by: dict[str, ShardedOperand] = {}
    for operand in operands:
        for axis, size, given in zip(operand.axes, operand.shape, operand.sharding, strict=True):
            if not given:
                continue
            if not is_splittable(axis):
                raise ValueError(_unsplittable(operand, axis, size, given, mesh_sizes, reshard))
            name = "query_heads" if axis == "key_heads" else axis
            other = next((key for key, used in split.items() if set(used) & set(given)), name)
            if split.get(name, given) == given and other == name:
                split[name] = given
                decided_by.setdefault(name, operand)
            elif must_agree:
                raise ValueError(_disagreement(operand, decided_by[other], reshard))
    shapes = {operand.name: operand.shape for operand in operands}
    plan = DevicePlan(
        split=split,
        mesh_sizes=dict(mesh_sizes),
        query_heads=shapes["query"][-2],
        key_heads=shapes["key"][-2],
    )
    if plan.query_heads % plan.parts:
        raise ValueError(
            f"query has N={plan.query_heads} heads, and they are sharded over mesh axis "
            f"{_described(plan.head_axes, mesh_sizes)}, which does not divide them. Use a number "
            f"of heads that is a multiple of {plan.parts}, or shard fewer: {reshard}."
        )
    return plan


def _described(axes: MeshAxes, mesh_sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} of size {mesh_sizes[name]}" for name in axes)


def _unsplittable(
    operand: ShardedOperand,
    axis: str,
    size: Any,
    given: MeshAxes,
    mesh_sizes: Mapping[str, int],
    reshard: str,
) -> str:
    """Error text for a sharded sequence or head dimension."""
    is_sequence = axis not in _HEAD_DIMS
    what = "its sequence axis" if is_sequence else "its head dimension"
    named = _LETTERS.get(axis, axis)
    other = (
        "split sequences over devices with jax_flash.context_parallel"
        if is_sequence
        else "shard the heads instead"
    )
    return (
        f"{operand.name} {tuple(operand.shape)} is sharded on {what} {named}={size} over "
        f"mesh axis {_described(given, mesh_sizes)}. jax_flash.attention needs that axis whole on "
        f"each device, and does not gather it unasked. Shard batch and heads only: {reshard}; or "
        f"{other}."
    )


def _disagreement(operand: ShardedOperand, decided_by: ShardedOperand, reshard: str) -> str:
    """Error text for two operands that are sharded differently."""
    shardings = " and ".join(
        f"{one.name} {tuple(one.shape)} is sharded as {_spec_text(one.sharding)}"
        for one in (decided_by, operand)
    )
    return (
        f"{shardings}. Batch axes must be sharded over the same mesh axes in all operands, and key "
        f"heads over those of the query heads (or not at all). Reshard one of them: {reshard}."
    )


def _spec_text(sharding: tuple[MeshAxes, ...]) -> str:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in sharding]
    return f"PartitionSpec({', '.join(map(repr, entries))})"
