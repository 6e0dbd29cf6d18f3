"""Tensor memory: allocation, loads, stores and waits; PTX ISA, "TensorCore 5th Generation Family".

A load's registers are written at once: PTX of known-good kernels omits ``tcgen05.wait::ld``, whose
work the assembler does. A store becomes visible to others with ``tcgen05.wait::st``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.clocks import TENSOR_STORE
from jax_flash.emulator.errors import PtxError, TensorMemoryFault
from jax_flash.emulator.instructions.load_store import memory_address
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate, Operand
from jax_flash.emulator.tensor_memory import split_address
from jax_flash.emulator.wait import Wait

_CATEGORY = "tensor memory"
_FAMILY = "TensorCore 5th Generation Family Instructions"
_U32, _B32 = ptx_type("u32"), ptx_type("b32")
_LANE = np.arange(LANES)
_ROW, _PLACE = _LANE // 4, _LANE % 4
_REGISTERS = 128


def fragment(shape: str, count: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``(lanes, columns)`` offsets of each register and thread ``(registers, 32)``.

    PTX ISA, "Data Movement Shape" figures of the shapes, ``.x1`` repeated along the columns. With
    ``16x32bx2`` the upper 16 threads access the columns from ``split`` on.

    Raises:
      PtxError: more registers than the ISA's table has for a shape.
    """
    if shape == "32x32b":
        register = np.arange(count)[:, None]
        return np.broadcast_to(_LANE, (count, LANES)), np.broadcast_to(register, (count, LANES))
    repeat = np.arange(count)
    if shape == "16x256b":  # registers 2 i + c: row g + 8 i, columns 2 q + c
        lanes = [_ROW + 8 * i for _ in repeat for i in (0, 1) for _ in (0, 1)]
        columns = [8 * n + 2 * _PLACE + c for n in repeat for _ in (0, 1) for c in (0, 1)]
    elif shape == "16x128b":  # registers i: row g + 8 i, column q
        lanes = [_ROW + 8 * i for _ in repeat for i in (0, 1)]
        columns = [4 * n + _PLACE for n in repeat for _ in (0, 1)]
    elif shape == "16x64b":  # one register: even threads of a quad row g, odd threads row g + 8
        lanes = [_ROW + 8 * (_PLACE % 2) for _ in repeat]
        columns = [2 * n + _PLACE // 2 for n in repeat]
    else:  # 16x32bx2
        lanes = [_LANE % 16 for _ in repeat]
        columns = [n + split * (_LANE // 16) for n in repeat]
    if len(lanes) > _REGISTERS:
        raise PtxError(f"{shape}.x{count} needs {len(lanes)} registers; at most {_REGISTERS}")
    return np.stack(lanes), np.stack(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What registers of one load or store hold."""

    lanes: np.ndarray
    """Lane offsets ``(registers, 32)``, or ``(registers, 2, 32)`` where registers are halved."""
    columns: np.ndarray
    """Column offsets, likewise."""
    halves: bool
    """Whether a register holds the low 16 bits of two neighbouring columns."""

    def join(self, words: np.ndarray) -> np.ndarray:
        """Returns the registers ``(registers, 32)`` that hold words of tensor memory."""
        if not self.halves:
            return words
        return words[:, 0] & np.uint32(0xFFFF) | words[:, 1] << np.uint32(16)

    def split(self, registers: np.ndarray) -> np.ndarray:
        """Returns the words of tensor memory; the ISA leaves the upper half of halved ones open."""
        if not self.halves:
            return registers
        return np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=1)


def _take_fragment(context: Context, halves: str, operands: list[Operand]) -> Fragment:
    """Takes shape, number and ``halves``; and from the operands the immediate of ``16x32bx2``."""
    for word in ("sync", "aligned"):
        context.take(word)
    shape = context.take("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    count = int(context.take(*(f"x{1 << i}" for i in range(8)))[1:])
    halved = context.flag(halves)
    context.take("b32")
    split = 0
    if shape == "16x32bx2":
        constants = [operand for operand in operands if isinstance(operand, Immediate)]
        if len(constants) != 1:
            raise PtxError("16x32bx2 needs one constant: the column of the upper threads")
        operands.remove(constants[0])
        split = constants[0].value
    if len(operands) != 2:
        raise PtxError(f"{len(operands)} operands; expected registers and an address")
    lanes, columns = fragment(shape, count, split)
    if halved:
        # Twice the columns, two to a register; the immediate counts columns as they are.
        base = split * (_LANE // 16) if shape == "16x32bx2" else np.zeros(LANES, np.int64)
        first = 2 * (columns - base) + base
        columns = np.stack([first, first + 1], axis=1)
        lanes = np.broadcast_to(lanes[:, None], columns.shape)
    return Fragment(lanes=lanes, columns=columns, halves=halved)


def _places(
    warp: Any, row: int, offset: int, lanes: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adds the address, which must name the quarter of the lanes that the warp may access."""
    addresses = warp.rows["u32"][row]
    if (addresses != addresses[0]).any():
        raise TensorMemoryFault("the address differs between the threads of a warp")
    lane, column = split_address((int(addresses[0]) + offset) % 2**32)
    quarter = 32 * (warp.index % 4)
    if not quarter <= lane <= lane + int(lanes.max()) < quarter + 32:
        raise TensorMemoryFault(
            f"warp {warp.index} accesses lanes from {lane} on; it may access [{quarter}, "
            f"{quarter + 32})"
        )
    return lanes + lane, columns + column


@instruction(
    "tcgen05.alloc", section=f"{_FAMILY}: tcgen05.alloc", category=_CATEGORY, converges=True
)
def allocate(context: Context) -> Run:
    """``tcgen05.alloc.cta_group.sync.aligned{.shared::cta}.b32 [dst], columns``: may wait."""
    context.take("cta_group::1", "cta_group::2")
    for word in ("sync", "aligned", "b32"):
        context.take(word)
    space = context.take("shared::cta", default="generic")
    row, offset, view = memory_address(context, context.operands[0], space)
    count = context.source(context.operands[1], _U32)

    def run(warp: Any, lanes: Any) -> Wait | None:
        memory = warp.block.tensor_memory
        columns = int(warp.rows["u32"][count][0])

        def finish() -> None:
            start = memory.find_free(columns)
            memory.allocations[start] = columns
            address = access.lane_addresses(warp, view, row, offset, lanes)[:1]
            access.write_lanes(warp, space, address, np.full((1, 1), start, np.uint32), 4)

        if memory.find_free(columns) is not None:
            finish()
            return None
        return Wait(
            lambda: memory.find_free(columns) is not None, finish, f"{columns} free columns"
        )

    return run


@instruction(
    "tcgen05.dealloc", section=f"{_FAMILY}: tcgen05.dealloc", category=_CATEGORY, converges=True
)
def release(context: Context) -> Run:
    """``tcgen05.dealloc.cta_group.sync.aligned.b32 taddr, columns``."""
    context.take("cta_group::1", "cta_group::2")
    for word in ("sync", "aligned", "b32"):
        context.take(word)
    address, count = (context.source(operand, _U32) for operand in context.operands)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        rows = warp.rows["u32"]
        _, column = split_address(int(rows[address][0]))
        warp.block.tensor_memory.release(column, int(rows[count][0]))
        warp.machine.events += 1

    return run


@instruction(
    "tcgen05.relinquish_alloc_permit",
    section=f"{_FAMILY}: tcgen05.relinquish_alloc_permit",
    category=_CATEGORY,
    converges=True,
)
def relinquish(context: Context) -> Run:
    """``tcgen05.relinquish_alloc_permit.cta_group.sync.aligned``: no allocation may follow."""
    context.take("cta_group::1", "cta_group::2")
    for word in ("sync", "aligned"):
        context.take(word)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        warp.block.tensor_memory.permit_relinquished = True

    return run


@instruction("tcgen05.ld", section=f"{_FAMILY}: tcgen05.ld", category=_CATEGORY, converges=True)
def load(context: Context) -> Run:
    """``tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]{, split}``."""
    operands = list(context.operands)
    part = _take_fragment(context, "pack::16b", operands)
    items = context.items(operands[0])
    if len(items) != len(part.lanes):
        raise PtxError(f"{len(items)} registers for {len(part.lanes)} of the shape")
    targets = np.array([context.destination(item, _B32) for item in items])
    row, offset, _ = context.address(operands[1], "32")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        memory = warp.block.tensor_memory
        where, columns = _places(warp, row, offset, part.lanes, part.columns)
        if warp.clock is not None:
            memory.note(warp, where, columns, warp.clock.me, warp.clock.now, writes=False)
        warp.files["u32"][targets] = part.join(memory.read(where, columns, "tcgen05.ld"))
        warp.machine.statistics.traffic["tensor memory read by warps"] += 4 * where.size

    return run


@instruction("tcgen05.st", section=f"{_FAMILY}: tcgen05.st", category=_CATEGORY, converges=True)
def store(context: Context) -> Run:
    """``tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr]{, split}, r``."""
    operands = list(context.operands)
    part = _take_fragment(context, "unpack::16b", operands)
    row, offset, _ = context.address(operands[0], "32")
    items = context.items(operands[1])
    if len(items) != len(part.lanes):
        raise PtxError(f"{len(items)} registers for {len(part.lanes)} of the shape")
    sources = np.array([context.source(item, _B32) for item in items])

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        memory = warp.block.tensor_memory
        where, columns = _places(warp, row, offset, part.lanes, part.columns)
        if warp.clock is not None:
            agent = warp.clock.agent(TENSOR_STORE)
            memory.note(warp, where, columns, agent, warp.tensor_stores + 1, writes=True)
        memory.write(where, columns, part.split(warp.files["u32"][sources]), "tcgen05.st")
        warp.machine.statistics.traffic["tensor memory write by warps"] += 4 * where.size

    return run


@instruction(
    "tcgen05.wait::ld",
    "tcgen05.wait::st",
    section=f"{_FAMILY}: tcgen05.wait",
    category=_CATEGORY,
    converges=True,
)
def wait(context: Context) -> Run:
    """``tcgen05.wait::{ld,st}.sync.aligned``: the warp's loads or stores are complete."""
    stores = context.statement.opcode.startswith("tcgen05.wait::st")
    for word in ("sync", "aligned"):
        context.take(word)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        if stores:
            warp.tensor_stores += 1
            if warp.clock is not None:
                warp.clock.complete(warp.clock.agent(TENSOR_STORE), warp.tensor_stores)

    return run


@instruction(
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    section=f"{_FAMILY}: tcgen05.fence",
    category=_CATEGORY,
)
def fence(context: Context) -> Run:
    """Orders tcgen05 operations with thread synchronisation; every execution here is so ordered."""
    context.expect(0)

    def run(warp: Any, lanes: Any) -> None:
        del warp, lanes

    return run
