"""Warpgroup matmuls: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".

Each instruction's result is the exact sum of the accumulator and its products, computed in float64
and rounded once to float32. Hardware sums in an order and a precision of its own.
"""

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_flash.emulator.address_space import SHARED_BASE
from jax_flash.emulator.clocks import TENSOR
from jax_flash.emulator.errors import (
    BarrierFault,
    OutOfBounds,
    PtxError,
    RegisterFault,
    UninitialisedRead,
)
from jax_flash.emulator.fragments import accumulator_to_rows, operand_a_to_rows, rows_to_accumulator
from jax_flash.emulator.matrix_descriptor import decode_descriptor, operand_offsets
from jax_flash.emulator.memory import ALL_WRITTEN
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate, Operand, Vector
from jax_flash.emulator.wait import Wait
from jax_flash.emulator.warpgroup import Matmul

_CATEGORY = "tensor core"
_SECTION = "Asynchronous Warpgroup Level Matrix Instructions"
_F32, _B32, _U64, _PRED = (ptx_type(name) for name in ("f32", "b32", "u64", "pred"))
ROWS = 64

INPUTS: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOperand:
    """Where the elements ``(rows, depth)`` of an operand are in shared memory."""

    index: np.ndarray
    """Element indices."""
    words: tuple[np.ndarray, ...]
    """Indices of the 4-byte words touched, each once, for each quarter of the rows."""

    @property
    def all_words(self) -> np.ndarray:
        """Words of all rows; those of different quarters are different."""
        return np.concatenate(self.words)


_operands: dict[tuple[int, int, int, int, bool, bool], SharedOperand] = {}


def shared_operand(
    bits: int, rows: int, depth: int, element_bytes: int, *, k_major: bool, tcgen05: bool = False
) -> SharedOperand:
    """Returns the places of an operand by its descriptor; kept, as kernels use them repeatedly."""
    key = (bits, rows, depth, element_bytes, k_major, tcgen05)
    operand = _operands.get(key)
    if operand is None:
        descriptor = decode_descriptor(bits, tcgen05=tcgen05)
        offsets = operand_offsets(descriptor, rows, depth, element_bytes, k_major=k_major)
        quarters = np.array_split(offsets >> 2, 4)
        operand = SharedOperand(
            index=offsets // element_bytes, words=tuple(np.unique(part) for part in quarters)
        )
        _operands[key] = operand
    return operand


def read_operand(block: Any, operand: SharedOperand, dtype: Any) -> np.ndarray:
    """Reads an operand from shared memory as float64.

    Raises:
      OutOfBounds, UninitialisedRead: it is not all there.
    """
    bits = read_operand_bits(block, operand, np.dtype(dtype).itemsize)
    return bits.view(dtype).astype(np.float64)


def read_operand_bits(block: Any, operand: SharedOperand, size: int) -> np.ndarray:
    """Reads an operand of ``size``-byte elements as unsigned integers; errors as above."""
    if (
        int(operand.index.max()) >= block.shared.size // size
        or int(operand.index.min()) < SHARED_BASE // size
    ):
        raise OutOfBounds(f"tensor-core operand reaches outside {block.shared.name}")
    missing = block.shared.written_views[size][operand.index] != ALL_WRITTEN[size]
    if missing.any():
        where = int(operand.index[missing][0]) * size
        raise UninitialisedRead(f"tensor core reads {block.shared.name} at offset {where}")
    return block.shared.views[size][operand.index]


@instruction("wgmma.fence", section=f"{_SECTION}: wgmma.fence", category=_CATEGORY, converges=True)
def fence(context: Context) -> Run:
    """``wgmma.fence.sync.aligned``: orders register use before it with the matmuls after it."""
    context.take("sync")
    context.take("aligned")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        tensor = warp.tensor
        tensor.fenced = True
        tensor.touched.clear()
        tensor.written.clear()
        tensor.trace.clear()

    return run


@instruction(
    "wgmma.commit_group",
    section=f"{_SECTION}: wgmma.commit_group",
    category=_CATEGORY,
    converges=True,
)
def commit(context: Context) -> Run:
    """``wgmma.commit_group.sync.aligned``."""
    context.take("sync")
    context.take("aligned")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        warp.block.warpgroups[warp.index // 4].commit(warp)

    return run


@instruction(
    "wgmma.wait_group", section=f"{_SECTION}: wgmma.wait_group", category=_CATEGORY, converges=True
)
def wait(context: Context) -> Run:
    """``wgmma.wait_group.sync.aligned n``: all but the newest ``n`` groups."""
    context.take("sync")
    context.take("aligned")
    operand = context.operands[0]
    if not isinstance(operand, Immediate):
        raise PtxError("needs a constant")
    newest = operand.value

    def run(warp: Any, lanes: Any) -> Wait | None:
        del lanes
        warpgroup = warp.block.warpgroups[warp.index // 4]

        def finish() -> None:
            warpgroup.wait(warp, newest)
            warp.machine.events += 1

        if warpgroup.ready(warp, newest):
            finish()
            return None
        return Wait(
            lambda: warpgroup.ready(warp, newest), finish, "the other warps to issue their matmuls"
        )

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape and operand facts of one instruction."""

    columns: int
    depth: int
    a_dtype: Any
    b_dtype: Any
    a_k_major: bool
    b_k_major: bool
    a_sign: int
    b_sign: int

    @property
    def element_bytes(self) -> int:
        """Size of an input element."""
        return np.dtype(self.a_dtype).itemsize


def _constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError(f"operand {operand} must be a constant")
    return operand.value


def _take_shape(context: Context, a_in_registers: bool) -> Shape:
    match = next((m for m in map(_SHAPE.match, context.modifiers) if m), None)
    if match is None:
        raise PtxError("has no shape m64nNkK")
    context.modifiers.remove(match.group())
    columns, depth = int(match.group(1)), int(match.group(2))
    result = context.take("f32", "f16", default="none")
    if result != "f32":
        raise PtxError(f"accumulators of type {result} are not implemented")
    types = context.modifiers[-2:]
    if len(types) != 2 or any(name not in INPUTS for name in types):
        raise PtxError(f"inputs {types} are not implemented")
    del context.modifiers[-2:]
    a_dtype, b_dtype = (INPUTS[name] for name in types)
    constants = [_constant(operand) for operand in context.operands[4:]]
    size = np.dtype(a_dtype).itemsize
    if depth * size != 32 or columns % 8 or not 8 <= columns <= 256:
        raise PtxError(f"shape m64n{columns}k{depth} does not exist for these types")
    if any(abs(sign) != 1 for sign in constants[:2]):
        raise PtxError(f"scales {constants[:2]} must be 1 or -1")
    transposed = constants[2:]
    expected = 0 if size == 1 else 1 if a_in_registers else 2
    if len(transposed) != expected:
        raise PtxError(f"{len(transposed)} transposition flags; expected {expected}")
    b_transposed = bool(transposed[-1]) if transposed else False
    a_transposed = bool(transposed[0]) if len(transposed) == 2 else False
    return Shape(
        columns=columns,
        depth=depth,
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        a_k_major=not a_transposed,
        b_k_major=not b_transposed,
        a_sign=constants[0],
        b_sign=constants[1],
    )


_SHAPE = re.compile(r"^m64n(\d+)k(\d+)$")


@instruction(
    "wgmma.mma_async",
    section=f"{_SECTION}: wgmma.mma_async",
    category=_CATEGORY,
    converges=True,
    checks_registers=False,
)
def matmul(context: Context) -> Run:
    """``wgmma.mma_async.sync.aligned.m64nNkK.f32.a.b d, a, b-desc, scale-d, scales{, trans}``."""
    context.take("sync")
    context.take("aligned")
    a_in_registers = isinstance(context.operands[1], Vector)
    shape = _take_shape(context, a_in_registers)
    items = context.items(context.operands[0])
    if len(items) != shape.columns // 2:
        raise PtxError(f"{len(items)} accumulator registers for n{shape.columns}")
    rows_d = np.array([context.destination(item, _F32) for item in items])
    accumulators = frozenset(context.writes)
    a_items = context.items(context.operands[1])
    a_kind = _B32 if a_in_registers else _U64
    rows_a = np.array([context.source(item, a_kind) for item in a_items])
    operands = frozenset(context.reads) if a_in_registers else frozenset()
    row_b = context.source(context.operands[2], _U64)
    scale = context.operands[3]
    fixed_scale = scale.value if isinstance(scale, Immediate) else -1
    row_scale = -1 if fixed_scale >= 0 else context.source(scale, _PRED)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        accumulate = bool(fixed_scale)
        if row_scale >= 0:
            flags = warp.rows["pred"][row_scale]
            accumulate = bool(flags[0])
            if (flags != accumulate).any():
                raise BarrierFault("scale-d differs between the threads of a warp")
        _check_registers(warp, accumulators, operands, accumulate)
        b_bits = _uniform_descriptor(warp, row_b)
        a_bits = None if a_in_registers else _uniform_descriptor(warp, int(rows_a[0]))
        places = _note_reads(warp, shape, a_bits, b_bits)
        warpgroup = warp.block.warpgroups[warp.index // 4]
        issue = Matmul(
            (warp.pc, a_bits, b_bits, accumulate),
            lambda parts: _execute(parts, shape, places, rows_d, rows_a, accumulate),
        )
        warpgroup.issue(warp, issue, warp, (accumulators, operands))

    return run


def _uniform_descriptor(warp: Any, row: int) -> int:
    values = warp.rows["u64"][row]
    if (values != values[0]).any():
        raise BarrierFault("a matrix descriptor differs between the threads of a warp")
    return int(values[0])


def _check_registers(
    warp: Any, accumulators: frozenset[int], operands: frozenset[int], accumulate: bool
) -> None:
    """Register use and wgmma.fence; PTX ISA, "wgmma.fence"."""
    tensor, code = warp.tensor, warp.code
    for pc in tensor.trace:
        if code[pc].checks_registers:
            tensor.touched |= code[pc].accesses
            tensor.written |= code[pc].writes
    tensor.trace.clear()
    names = warp.program.table.name_of
    if not tensor.fenced:
        raise RegisterFault("no wgmma.fence before the first wgmma")
    # The ISA asks for a fence after any access; one that only reads what the matmul only reads
    # cannot conflict with it, and compiled kernels rely on that.
    unfenced = (tensor.touched & accumulators) | (tensor.written & operands)
    if unfenced:
        used = ", ".join(names(i) for i in sorted(unfenced)[:8])
        raise RegisterFault(f"no wgmma.fence between other uses of {used} and this wgmma")
    foreign = operands & tensor.accumulators
    if foreign:
        used = ", ".join(names(i) for i in sorted(foreign)[:8])
        raise RegisterFault(f"operand {used} is the accumulator of a wgmma in flight")
    needed = operands | accumulators if accumulate else operands
    for identity in needed - tensor.accumulators:
        if warp.defined.get(identity) is not True:
            raise RegisterFault(f"{names(identity)} is read before it was written")


def _note_reads(
    warp: Any, shape: Shape, a_bits: int | None, b_bits: int
) -> tuple[SharedOperand | None, SharedOperand]:
    """Finds the operands in shared memory, and checks and records that they are read.

    Each warp reads all of B, and the 16 rows of A whose results it holds: its wait for the matmul
    tells nothing of what the tensor cores of the other three warps still read.
    """
    block, size = warp.block, shape.element_bytes
    b = shared_operand(b_bits, shape.columns, shape.depth, size, k_major=shape.b_k_major)
    a = None
    if a_bits is not None:
        a = shared_operand(a_bits, ROWS, shape.depth, size, k_major=shape.a_k_major)
    if warp.clock is not None:
        time = block.warpgroups[warp.index // 4].group_number(warp)
        agent = warp.clock.agent(TENSOR)
        block.on_async_read(warp, b.all_words, agent, time)
        if a is not None:
            block.on_async_read(warp, a.words[warp.index % 4], agent, time)
    return a, b


def _execute(
    parts: list[Any],
    shape: Shape,
    places: tuple[SharedOperand | None, SharedOperand],
    rows_d: np.ndarray,
    rows_a: np.ndarray,
    accumulate: bool,
) -> None:
    block = parts[0].block
    traffic = block.machine.statistics.traffic
    b = read_operand(block, places[1], shape.b_dtype)
    if places[0] is not None:
        a = read_operand(block, places[0], shape.a_dtype)
        traffic["shared read by tensor cores"] += a.size * shape.element_bytes
    else:
        a = np.concatenate(
            [operand_a_to_rows(warp.files["u32"][rows_a], shape.a_dtype) for warp in parts]
        ).astype(np.float64)
    traffic["shared read by tensor cores"] += b.size * shape.element_bytes
    total = (a @ b.T) * (shape.a_sign * shape.b_sign)
    if accumulate:
        old = [accumulator_to_rows(warp.files["f32"][rows_d]) for warp in parts]
        total += np.concatenate(old)
    result = total.astype(np.float32)
    for index, warp in enumerate(parts):
        warp.files["f32"][rows_d] = rows_to_accumulator(result[16 * index : 16 * index + 16])
    kind = np.dtype(shape.a_dtype).name
    operations = block.machine.statistics.tensor_operations
    operations[f"wgmma {kind}"] += ROWS * shape.columns * shape.depth
