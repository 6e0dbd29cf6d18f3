"""Calls of the emulator: the kernels' PTX on the CPU, under `jit` too, for small problems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_flash.ops import registration
from jax_flash.ops.dispatch import KernelCall
from jax_flash.ops.ffi_calls import buffer_shape
from jax_flash.ops.packed_heads import with_packed_heads
from jax_flash.reference.chunked import unify_varying_axes
from jax_flash.spec.launch_plan import Operation

SIZE_LIMIT = 1 << 24
"""Most (query, key) pairs, over all heads, of an emulated call: about ten minutes a direction."""

_DTYPES = {"float32": np.float32, "int32": np.int32}


def emulate_operation(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Runs an operation's kernels on the emulator, through a callback.

    Args:
      operation: the forward or backward operation of `call`.
      call: scalars of the call.
      operands: arrays by the names in `operation.operand_names`, with equal leading dimensions.

    Returns:
      The result buffers by name, workspaces among them.

    Raises:
      ValueError: the problem is larger than `SIZE_LIMIT`, or has symbolic dimensions.
    """
    _check_size({name: operand.shape for name, operand in operands.items()})
    return with_packed_heads(_emulate, operation, call, operands)


def _emulate(
    operation: Operation, call: KernelCall, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    shapes = {name: operand.shape for name, operand in operands.items()}
    element = operands["query"].dtype
    types = [
        jax.ShapeDtypeStruct(
            buffer_shape(buffer, operation, shapes), _DTYPES.get(buffer.dtype, element)
        )
        for buffer in operation.results
    ]
    run = partial(_run, operation, call)
    arrays = [operands[name] for name in operation.operand_names]
    results = jax.pure_callback(run, types, *arrays)
    # The results vary over the devices of a shard_map as the operands do; a callback's do not say.
    results, _ = unify_varying_axes((results, arrays))
    names = [buffer.name for buffer in operation.results]
    return dict(zip(names, results, strict=True))


def _check_size(shapes: Mapping[str, tuple[Any, ...]]) -> None:
    *leading, query_length, query_heads, _ = shapes["query"]
    sizes = (*leading, query_heads, query_length, shapes["key"][-3])
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f'implementation="emulate" needs shapes of numbers, not {shapes["query"]}; pass "cuda" '
            "or None to export a computation with symbolic dimensions."
        )
    pairs = math.prod(sizes)
    if pairs > SIZE_LIMIT:
        raise ValueError(
            f'implementation="emulate" was given query {shapes["query"]} and key {shapes["key"]}: '
            f"{pairs} pairs of a query and a key over all heads, at most {SIZE_LIMIT} can be "
            'emulated. Make the problem smaller, or pass "xla" or "cuda".'
        )


def _run(operation: Operation, call: KernelCall, *arrays: Any) -> tuple[np.ndarray, ...]:
    # Imported where it is used: `import jax_flash` does without the emulator.
    from jax_flash.emulator.launch import run_operation

    operands = dict(zip(operation.operand_names, map(np.asarray, arrays), strict=True))
    results, _ = run_operation(
        operation,
        operands,
        scale=call.scale,
        soft_cap=call.soft_cap,
        band=call.band,
        rows_per_query=call.rows_per_query,
        directory=registration.REGISTRATION.directory,
    )
    return tuple(results[buffer.name] for buffer in operation.results)
