"""Packed query heads: the query heads of a group as rows of one head, where queries are few.

Query heads of a group read the same keys and values. A tile of 128 rows has room for the queries of
several of them, and a matmul takes as long for one row as for all: a decoding step of 8 heads a
group reads its keys once instead of 8 times. Each row gives the same bits wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_flash.spec.band_mask import with_both_bounds
from jax_flash.spec.buffers import SEQUENCE_FEATURES
from jax_flash.spec.launch_plan import Operation
from jax_flash.spec.problem import AttentionProblem

if TYPE_CHECKING:
    from jax_flash.ops.dispatch import KernelCall

# On one H200, B=8 to 64, T=1 to 64 queries of 32 heads over 4 or 8, S=8192, packing took 0.15 to
# 0.66 of the time; at T=128 1.04 to 1.22 of it (2026-11-30_nvidia-h200_packed_heads.csv).
MOST_QUERIES = 64
"""Half a tile: with more, few tiles are saved."""

_POSSIBLE = frozenset(SEQUENCE_FEATURES)


def can_pack_heads(problem: AttentionProblem) -> bool:
    """Whether the forward pass of a call packs query heads, if there are several in a group.

    Not with sinks, biases and masks, whose values differ between heads, nor with segments.
    """
    length = problem.query_length
    is_few = isinstance(length, int) and length <= MOST_QUERIES
    grouped = problem.query_heads != problem.key_heads
    return is_few and grouped and problem.features <= _POSSIBLE


def with_packed_heads(
    run: Callable[[Operation, KernelCall, Mapping[str, jax.Array]], dict[str, jax.Array]],
    operation: Operation,
    call: KernelCall,
    operands: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Runs an operation on a device's part of a call, with packed query heads where it has them."""
    if not operation.packs_heads:
        return run(operation, call, operands)
    # The devices' parts decide: some may have fewer query heads for each of their key heads.
    group = operands["query"].shape[-2] // operands["key"].shape[-2]
    packed = replace(call, rows_per_query=group, band=with_both_bounds(call.band))
    results = run(operation, packed, pack_heads(operands))
    return unpack_heads(results, group)


def pack_heads(operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Packs the query heads of a call.

    Args:
      operands: query [..., T, N, D], key [..., S, K, D] and others by name. Of these query_lengths
        [...] changes as well: it counts rows.

    Returns:
      The same names with query [..., T * N / K, K, D]: row t * N / K + g of head k is query t of
      head k * N / K + g.
    """
    query = operands["query"]
    *leading, length, heads, columns = query.shape
    key_heads = operands["key"].shape[-2]
    group = heads // key_heads
    rows = query.reshape(*leading, length, key_heads, group, columns).swapaxes(-3, -2)
    packed = {"query": rows.reshape(*leading, length * group, key_heads, columns)}
    if "query_lengths" in operands:
        # As the kernels clip them, so that the product fits int32.
        packed["query_lengths"] = jnp.clip(operands["query_lengths"], 0, length) * group
    return {**operands, **packed}


def unpack_heads(results: Mapping[str, jax.Array], group: int) -> dict[str, jax.Array]:
    """Returns output [..., T, N, Dv] and lse [..., T, N] of a call with packed query heads."""
    output, lse = results["output"], results["lse"]
    *leading, rows, key_heads, columns = output.shape
    length, heads = rows // group, key_heads * group
    output = output.reshape(*leading, length, group, key_heads, columns).swapaxes(-3, -2)
    lse = lse.reshape(*leading, length, group, key_heads).swapaxes(-2, -1)
    return {
        "output": output.reshape(*leading, length, heads, columns),
        "lse": lse.reshape(*leading, length, heads),
    }
