"""8x8 matrices between registers and shared memory.

PTX ISA: "Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix".
"""

from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.instructions.load_store import memory_address
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_CATEGORY = "matrix move"
_SECTION = "Warp Level Matrix Instructions"
_B32 = ptx_type("b32")
_ROW_BYTES = 16
_ROW = np.arange(8)


def _take_shape(context: Context) -> tuple[int, bool]:
    context.take("aligned")
    context.take("m8n8")
    count = int(context.take("x1", "x2", "x4")[1:])
    transposed = context.flag("trans")
    context.take("shared", "shared::cta", default="shared")
    context.take("b16")
    return count, transposed


def fragments_of(matrix: np.ndarray, transposed: bool) -> np.ndarray:
    """Returns the 32 registers of one matrix ``(8, 8)`` of 16-bit elements.

    Lane ``l`` holds row ``l / 4``, columns ``2 (l % 4)`` and the next; of the transpose if asked.
    """
    matrix = matrix.T if transposed else matrix
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


def matrix_of(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """Returns the matrix ``(8, 8)`` of 16-bit elements that 32 registers hold."""
    matrix = np.ascontiguousarray(registers).view(np.uint16).reshape(8, 8)
    return matrix.T if transposed else matrix


@instruction("ldmatrix.sync", section=f"{_SECTION}: ldmatrix", category=_CATEGORY, converges=True)
def load_matrix(context: Context) -> Run:
    """``ldmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16 r, [p]``: lane ``8 i + j`` gives row ``j``
    of matrix ``i``."""
    count, transposed = _take_shape(context)
    items = context.items(context.operands[0])
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {count} matrices")
    targets = [context.destination(item, _B32) for item in items]
    row, offset, view = memory_address(context, context.operands[1], "shared")

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)[: 8 * count]
        words = _read_rows(warp, addresses)
        for index, target in enumerate(targets):
            matrix = words[8 * index : 8 * index + 8].view(np.uint16)
            warp.rows["u32"][target][:] = fragments_of(matrix, transposed)

    return run


def _read_rows(warp: Any, addresses: np.ndarray) -> np.ndarray:
    """Reads 16 bytes at each address; returns ``(rows, 4)`` words."""
    block, offsets = warp.block.locate_shared(addresses, "ldmatrix")
    block.shared.check(offsets, _ROW_BYTES, "ldmatrix")
    access.note_shared_read(warp, block, offsets, _ROW_BYTES)
    traffic = warp.machine.statistics.traffic
    traffic["shared read by warps"] += _ROW_BYTES * len(offsets)
    return np.ascontiguousarray(block.shared.read(offsets, 4, 4).T)


@instruction("stmatrix.sync", section=f"{_SECTION}: stmatrix", category=_CATEGORY, converges=True)
def store_matrix(context: Context) -> Run:
    """``stmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16 [p], r``; rows as of ``ldmatrix``."""
    count, transposed = _take_shape(context)
    row, offset, view = memory_address(context, context.operands[0], "shared")
    items = context.items(context.operands[1])
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {count} matrices")
    sources = [context.source(item, _B32) for item in items]

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)[: 8 * count]
        matrices = [matrix_of(warp.rows["u32"][source], transposed) for source in sources]
        rows = np.ascontiguousarray(np.concatenate(matrices)).view(np.uint32)
        access.write_lanes(warp, "shared", addresses, np.ascontiguousarray(rows.T), 4)

    return run


@instruction("movmatrix.sync", section=f"{_SECTION}: movmatrix", category=_CATEGORY, converges=True)
def transpose_matrix(context: Context) -> Run:
    """``movmatrix.sync.aligned.m8n8.trans.b16 d, a``."""
    for word in ("aligned", "m8n8", "trans", "b16"):
        context.take(word)
    destination = context.destination(context.operands[0], _B32)
    source = context.source(context.operands[1], _B32)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        rows = warp.rows["u32"]
        rows[destination][:] = fragments_of(matrix_of(rows[source], False), True)

    return run
