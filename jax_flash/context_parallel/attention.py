"""The public function of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from jax_flash.context_parallel.all_gather import attend_all_gather
from jax_flash.context_parallel.all_to_all import attend_all_to_all
from jax_flash.context_parallel.local_calls import Operands, Options
from jax_flash.context_parallel.placement import AxisNames, Placement, attend_on_mesh, placement_of
from jax_flash.context_parallel.ring import attend_ring
from jax_flash.ops.arguments import Arguments, Call
from jax_flash.ops.validation import check_call
from jax_flash.reference.chunked import unify_varying_axes
from jax_flash.reference.chunked_backward import Results

_ATTEND: dict[str, Callable[[Options, Operands], Results]] = {
    "all_gather": attend_all_gather,
    "ring": attend_ring,
    "all_to_all": attend_all_to_all,
}

MODES = tuple(_ATTEND)
"""Names that `mode` takes."""

Window = int | tuple[int | None, int | None]
"""Type of `local_window_size`."""


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    mode: str = "all_gather",
    order: str = "contiguous",
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_name: AxisNames = None,
    head_axis_name: AxisNames = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    mode: str = "all_gather",
    order: str = "contiguous",
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_name: AxisNames = None,
    head_axis_name: AxisNames = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    mode: str = "all_gather",
    order: str = "contiguous",
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_name: AxisNames = None,
    head_axis_name: AxisNames = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax_flash.attention` over sequences that are sharded over the mesh axis `axis_name`.

    Inside `jax.shard_map` over that axis, arrays are the device's own parts. Elsewhere they are
    whole (global) arrays, and the function calls `jax.shard_map` itself, over `mesh` or else the
    mesh of `jax.set_mesh`. Either way the result is that of `jax_flash.attention` on the whole
    sequences, sharded as query is, and may be differentiated in the same way.

    Three modes, on n devices (docs/sharding.md has pictures of what they communicate):

    - "all_gather": each device gathers all keys and values. The forward pass has the bits of a
      single device's. Takes memory for one layer's whole K, V, dK and dV while it runs.
    - "ring": keys and values travel round the devices while these compute (Ring Attention,
      arXiv:2310.01889). Memory linear in the local length. Results of the steps are merged in
      float32, in an order fixed by the device's rank.
    - "all_to_all": devices exchange the sequence for heads and back (DeepSpeed-Ulysses,
      arXiv:2309.14509). Bits of a single device's, gradients too if K is a multiple of n. N must be
      a multiple of n, and K a multiple or a divisor of it.

    Gradients have the same bits on every run with `deterministic_bwd`, in every mode.

    Args:
        query: [..., T, N, D]; T is the local length inside shard_map, else the whole one. The same
            goes for every S, T, N and batch size below.
        key: [..., S, K, D]. S may differ from T; it is spread over the devices in the same order.
        value: [..., S, K, Dv].
        axis_name: the mesh axis that T and S are sharded over, of size n.
        mode: one of `MODES`.
        order: "contiguous", or "zigzag": the sequence axis of query, key, value and segment ids is
            in the order of `zigzag_order`, which gives the devices equal work under a causal mask.
            Results are in that order, too.
        mesh: for use outside shard_map.
        batch_axis_name: outside shard_map: the mesh axis, or axes, that the first leading dimension
            is sharded over; None if it is not.
        head_axis_name: outside shard_map: the mesh axis, or axes, that N and K are sharded over.
        scale: as in `jax_flash.attention`.
        is_causal: by positions in the natural order of the whole sequence, whatever `order` is.
        query_offset: likewise; an integer, or an integer array, scalar or [...].
        local_window_size: likewise.
        query_seq_lengths: int [...]: valid queries of the whole sequences, on every device.
        key_value_seq_lengths: int [...]: valid keys of the whole sequences, on every device.
        query_segment_ids: int [..., T], sharded as query.
        key_value_segment_ids: int [..., S], sharded as key.
        logits_soft_cap: as in `jax_flash.attention`.
        sinks: floating [N], on every device of `axis_name`.
        deterministic_bwd: as in `jax_flash.attention`.
        return_residual: also return the log-sum-exp.
        implementation: as in `jax_flash.attention`, for the calls that each device makes.

    Returns:
        Output [..., T, N, Dv] in the dtype of query. With `return_residual`, also the natural
        log-sum-exp, float32 [..., T, N], differentiable.

    Raises:
        TypeError: an argument or dtype of the wrong type.
        ValueError: no mesh, an axis that the mesh does not have, a length that does not divide into
            the axis (in zigzag order: into twice its size), heads or batch that do not divide into
            theirs, or a shape or value that does not fit.
        NotImplementedError, RuntimeError: as `jax_flash.attention`.
    """
    given = locals()
    names = ("axis_name", "mode", "order", "mesh", "batch_axis_name", "head_axis_name")
    placement = placement_of(MODES, **{name: given.pop(name) for name in names})
    options, operands = _split(placement, check_call(Arguments(**given)))
    if placement.is_inside_shard_map:
        results = _attend(options, operands)
    else:
        results = attend_on_mesh(placement, options, operands, _attend)
    return (results.output, results.lse) if return_residual else results.output


def _split(placement: Placement, call: Call) -> tuple[Options, Operands]:
    """Separates what is static of a call from its arrays."""
    semantics = call.semantics
    options = Options(
        axis_name=placement.axis_name,
        shards=placement.shards,
        mode=placement.mode,
        order=placement.order,
        scale=semantics.scale,
        is_causal=semantics.is_causal,
        window=semantics.window,
        soft_cap=semantics.soft_cap,
        query_offset=call.query_offset,
        deterministic_bwd=call.deterministic_bwd,
        implementation=call.implementation,
    )
    operands = Operands(
        query=jnp.asarray(call.query),
        key=jnp.asarray(call.key),
        value=jnp.asarray(call.value),
        query_offset=semantics.query_offset,
        query_lengths=semantics.query_lengths,
        key_lengths=semantics.key_lengths,
        query_segment_ids=semantics.query_segment_ids,
        key_segment_ids=semantics.key_segment_ids,
        sinks=semantics.sinks,
    )
    return options, operands


def _attend(options: Options, operands: Operands) -> Results:
    """The results of this device's queries; operands are the device's parts."""
    _check_local_lengths(options, operands)
    # The rank makes results vary over the axis; where an operand does not, JAX must know.
    rank = jax.lax.axis_index(options.axis_name)
    operands, _ = unify_varying_axes((operands, rank))
    return _ATTEND[options.mode](options, operands)


def _check_local_lengths(options: Options, operands: Operands) -> None:
    for name, axis, array in (("query", "T", operands.query), ("key", "S", operands.key)):
        length = array.shape[-3]
        if length % options.layout(length).chunks:
            raise ValueError(
                f"{name} has {axis}={length} positions on each of the {options.shards} devices of "
                f"axis {options.axis_name!r}; with order='zigzag' a device holds two chunks of one "
                "length, so it must be even. Pad the whole sequence to a multiple of "
                f"{2 * options.shards}, or use order='contiguous'."
            )
