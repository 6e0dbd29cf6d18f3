"""Warp-level matmuls: PTX ISA, "Warp Level Matrix Instructions: mma"."""

import re
from typing import Any

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.fragments import (
    accumulator_to_rows,
    operand_a_to_rows,
    rows_to_accumulator,
)
from jax_flash.emulator.instructions.wgmma import INPUTS
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_F32, _B32 = ptx_type("f32"), ptx_type("b32")
_SHAPE = re.compile(r"^m16n8k(\d+)$")


def operand_b_to_rows(registers: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the matrix ``(8, K)``, N first, that one or two registers ``(n, 32)`` of a warp hold.

    Register ``h`` of lane ``4 g + q`` is column ``g`` of B, rows ``4 e h + e q ...`` of
    ``e = 4 / size`` elements each.
    """
    each, halves = 4 // np.dtype(dtype).itemsize, len(registers)
    elements = np.ascontiguousarray(registers).view(dtype).reshape(halves, 8, 4, each)  # h g q e
    return elements.transpose(1, 0, 2, 3).reshape(8, 4 * each * halves)


@instruction(
    "mma.sync",
    section="Warp Level Matrix Instructions: mma",
    category="tensor core",
    converges=True,
)
def matmul(context: Context) -> Run:
    """``mma.sync.aligned.m16n8kK.row.col.f32.a.b.f32 d, a, b, c``: the exact sum, rounded once."""
    context.take("aligned")
    match = next((m for m in map(_SHAPE.match, context.modifiers) if m), None)
    if match is None:
        raise PtxError("shapes other than m16n8kK are not implemented")
    context.modifiers.remove(match.group())
    context.take("row")
    context.take("col")
    words = list(context.modifiers)
    if len(words) != 4 or words[0] != "f32" or words[3] != "f32":
        raise PtxError(f"types {words} are not implemented")
    a_name, b_name = words[1:3]
    if a_name not in INPUTS or b_name not in INPUTS:
        raise PtxError(f"inputs {a_name}, {b_name} are not implemented")
    context.modifiers.clear()
    a_dtype, b_dtype = INPUTS[a_name], INPUTS[b_name]
    depth_bytes = int(match.group(1)) * np.dtype(a_dtype).itemsize
    if depth_bytes not in (16, 32):
        raise PtxError(f"{match.group()} does not exist for {a_name}, or is not implemented")
    items = [context.items(operand) for operand in context.operands]
    if [len(part) for part in items] != [4, depth_bytes // 8, depth_bytes // 16, 4]:
        raise PtxError(f"operands of {[len(part) for part in items]} registers")
    d = np.array([context.destination(item, _F32) for item in items[0]])
    a, b = (np.array([context.source(item, _B32) for item in part]) for part in items[1:3])
    c = np.array([context.source(item, _F32) for item in items[3]])

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        words, floats = warp.files["u32"], warp.files["f32"]
        left = operand_a_to_rows(words[a], a_dtype).astype(np.float64)
        right = operand_b_to_rows(words[b], b_dtype).astype(np.float64)
        total = left @ right.T + accumulator_to_rows(floats[c])
        floats[d] = rows_to_accumulator(total.astype(np.float32))
        operations = warp.machine.statistics.tensor_operations
        operations[f"mma {a_name}"] += left.size * len(right)

    return run
