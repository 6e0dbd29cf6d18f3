"""Tensor-core matmuls on tensor memory: PTX ISA, "tcgen05.mma, tcgen05.commit".

As for wgmma, each instruction's result is the exact sum rounded once to float32.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.async_operation import AsyncOperation
from jax_flash.emulator.clocks import TENSOR
from jax_flash.emulator.errors import BarrierFault, ConvergenceFault, OutOfBounds, PtxError
from jax_flash.emulator.instructions.load_store import memory_address
from jax_flash.emulator.instructions.wgmma import SharedOperand, read_operand, shared_operand
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Address, Immediate, Vector
from jax_flash.emulator.tensor_memory import split_address

_CATEGORY = "tensor core"
_SECTION = "TensorCore 5th Generation Family Instructions"
_U16, _U32, _U64, _PRED = (ptx_type(name) for name in ("u16", "u32", "u64", "pred"))
_KINDS: dict[str, dict[int, Any]] = {
    "kind::f16": {0: np.float16, 1: ml_dtypes.bfloat16},
    "kind::f8f6f4": {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2},
}
_DEPTH_BYTES = 32
_OFFSET_BITS = (1 << 24) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionDescriptor:
    """PTX ISA, table "Instruction descriptor format for .kind::f16, .kind::tf32, .kind::f8f6f4"."""

    rows: int
    columns: int
    a_dtype: Any
    b_dtype: Any
    a_k_major: bool
    b_k_major: bool
    sign: int

    @property
    def element_bytes(self) -> int:
        """Size of an input element."""
        return np.dtype(self.a_dtype).itemsize

    @property
    def depth(self) -> int:
        """K of one instruction."""
        return _DEPTH_BYTES // self.element_bytes


def decode_instruction_descriptor(bits: int, kind: str) -> InstructionDescriptor:
    """Decodes the 32-bit descriptor.

    Raises:
      PtxError: a field that is not implemented.
    """
    if bits & 0xF:
        raise PtxError(f"instruction descriptor {bits:#x}: sparsity and saturation")
    if bits >> 4 & 3 != 1:
        raise PtxError(f"instruction descriptor {bits:#x}: only float32 results are implemented")
    if bits >> 30:
        raise PtxError(f"instruction descriptor {bits:#x}: maximum shift")
    types = _KINDS[kind]
    a, b = bits >> 7 & 7, bits >> 10 & 7
    if a not in types or b not in types:
        raise PtxError(f"instruction descriptor {bits:#x}: input types {a}, {b} of .{kind}")
    negations = (bits >> 13 & 1) + (bits >> 14 & 1)
    return InstructionDescriptor(
        rows=(bits >> 24 & 0x1F) << 4,
        columns=(bits >> 17 & 0x3F) << 3,
        a_dtype=types[a],
        b_dtype=types[b],
        a_k_major=not bits >> 15 & 1,
        b_k_major=not bits >> 16 & 1,
        sign=-1 if negations == 1 else 1,
    )


def result_places(rows: int, columns: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tensor-memory lane and column of each element of D that one block holds.

    "Data path layout" of the ISA: D (M = 128) and A (M = 256, two blocks) have a row in each lane;
    F (M = 64) has 16 rows in each quarter of the lanes; B (M = 128, two blocks) has 64 rows, the
    first half of the columns in lanes 0 to 63 and the second half in lanes 64 to 127.

    Returns:
      Two arrays that broadcast to ``(rows / blocks, columns)``.
    """
    each = rows // blocks
    row, column = np.arange(each)[:, None], np.arange(columns)[None, :]
    if each == 128:
        return row, column
    if each == 64 and blocks == 1:
        return 32 * (row // 16) + row % 16, column
    if each == 64:
        half = columns // 2
        return row + 64 * (column // half), column % half
    raise PtxError(f"{rows} rows over {blocks} blocks are not implemented")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One matmul as issued."""

    descriptor: InstructionDescriptor
    result: int
    """Column of D."""
    a_bits: int | None
    a_column: int
    b_bits: int
    accumulate: bool
    blocks: tuple[Any, ...]
    """The block, or the pair with its even block first."""


@instruction("tcgen05.mma", section=f"{_SECTION}: tcgen05.mma", category=_CATEGORY)
def matmul(context: Context) -> Run:
    """``tcgen05.mma.cta_group.kind [d], a, b-desc, idesc{, lanes}, enable-input-d``."""
    pair = context.take("cta_group::1", "cta_group::2") == "cta_group::2"
    kind = context.take(*_KINDS)
    for word in ("fill", "use", "lastuse", "discard"):
        context.flag(f"collector::a::{word}")
    operands = list(context.operands)
    disabled: list[int] = []
    if len(operands) == 6 and isinstance(operands[4], Vector):
        disabled = [context.source(item, _U32) for item in context.items(operands.pop(4))]
    if len(operands) != 5:
        raise PtxError(f"{len(operands)} operands; expected 5, or 6 with disable-output-lane")
    result, result_offset, _ = context.address(operands[0], "32")
    a_in_tensor_memory = isinstance(operands[1], Address)
    a_offset = 0
    if a_in_tensor_memory:
        a, a_offset, _ = context.address(operands[1], "32")
    else:
        a = context.source(operands[1], _U64)
    b, idesc = context.source(operands[2], _U64), context.source(operands[3], _U32)
    flag = operands[4]
    fixed = bool(flag.value) if isinstance(flag, Immediate) else None
    row, negated = (-1, False) if fixed is not None else context.predicate(flag)

    def run(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes, "tcgen05.mma")
        rows, wide = warp.rows["u32"], warp.rows["u64"]
        if any(rows[item][lane] for item in disabled):
            raise PtxError("tcgen05.mma that disables output lanes is not implemented")
        column = _column(int(rows[result][lane]) + result_offset)
        accumulate = fixed if fixed is not None else bool(warp.rows["pred"][row][lane] ^ negated)
        issue = Issue(
            descriptor=decode_instruction_descriptor(int(rows[idesc][lane]), kind),
            result=column,
            a_bits=None if a_in_tensor_memory else int(wide[a][lane]),
            a_column=_column(int(rows[a][lane]) + a_offset) if a_in_tensor_memory else 0,
            b_bits=int(wide[b][lane]),
            accumulate=accumulate,
            blocks=pair_of_blocks(warp) if pair else (warp.block,),
        )
        start(warp, issue)

    return run


def one_lane(lanes: Any, what: str) -> int:
    """Returns the lane that executes an instruction of one thread.

    Raises:
      ConvergenceFault: several threads execute it.
    """
    if lanes is True or int(lanes.sum()) != 1:
        raise ConvergenceFault(f"{what} must be issued by one thread")
    return int(np.argmax(lanes))


def _column(address: int) -> int:
    lane, column = split_address(address % 2**32)
    if lane:
        raise PtxError(f"tensor-memory operands that start at lane {lane} are not implemented")
    return column


def pair_of_blocks(warp: Any) -> tuple[Any, ...]:
    """Returns the blocks of a ``cta_group::2`` operation, the even one first.

    Raises:
      BarrierFault: the cluster has no such pair.
    """
    even = warp.block.rank & ~1
    blocks = warp.block.cluster.blocks[even : even + 2]
    if len(blocks) != 2:
        raise BarrierFault("cta_group::2 in a cluster without a pair of blocks")
    return tuple(blocks)


def _operands(issue: Issue) -> tuple[SharedOperand | None, SharedOperand]:
    descriptor = issue.descriptor
    count, size = len(issue.blocks), descriptor.element_bytes
    b = shared_operand(
        issue.b_bits,
        descriptor.columns // count,
        descriptor.depth,
        size,
        k_major=descriptor.b_k_major,
        tcgen05=True,
    )
    if issue.a_bits is None:
        return None, b
    rows = descriptor.rows // count
    a = shared_operand(
        issue.a_bits, rows, descriptor.depth, size, k_major=descriptor.a_k_major, tcgen05=True
    )
    return a, b


def start(warp: Any, issue: Issue) -> None:
    """Checks a matmul's accesses and puts it into the warp's queue."""
    descriptor = issue.descriptor
    lanes, columns = result_places(descriptor.rows, descriptor.columns, len(issue.blocks))
    columns = columns + issue.result
    a, b = _operands(issue)
    words = descriptor.depth * descriptor.element_bytes // 4
    a_lanes, a_columns = result_places(descriptor.rows, words, len(issue.blocks))
    a_columns = a_columns + issue.a_column
    if a is None and descriptor.rows // len(issue.blocks) != 128:
        raise PtxError(f"A in tensor memory with {descriptor.rows} rows is not implemented")
    queue = warp.block.tensor_memory.queue(warp)
    if warp.clock is not None:
        agent, time = warp.clock.agent(TENSOR), queue.commits + 1
        for block in issue.blocks:
            memory = block.tensor_memory
            block.on_async_read(warp, b.all_words, agent, time)
            if a is not None:
                block.on_async_read(warp, a.all_words, agent, time)
            else:
                memory.note(warp, a_lanes, a_columns, agent, time, writes=False)
            memory.note(warp, lanes, columns, agent, time, writes=True)
    places = ((lanes, columns), (a_lanes, a_columns))
    push(warp, lambda: _execute(issue, a, b, places), "tcgen05.mma")


def push(warp: Any, execute: Any, what: str, *, is_commit: bool = False) -> None:
    """Queues an operation; it executes after the earlier ones, when the schedule says."""
    queue = warp.block.tensor_memory.queue(warp)
    queue.items.append((execute, is_commit))
    text = f"{what} (or an earlier one) issued by {warp.name}, line {warp.line}"
    warp.machine.pending.append(AsyncOperation(queue.execute_next, text, None))


def _execute(
    issue: Issue,
    a: SharedOperand | None,
    b: SharedOperand,
    places: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> None:
    descriptor = issue.descriptor
    (lanes, columns), (a_lanes, a_columns) = places
    statistics = issue.blocks[0].machine.statistics
    right = np.concatenate([read_operand(block, b, descriptor.b_dtype) for block in issue.blocks])
    for block in issue.blocks:
        memory = block.tensor_memory
        if a is not None:
            left = read_operand(block, a, descriptor.a_dtype)
        else:
            words = memory.read(a_lanes, a_columns, "tcgen05.mma (A)")
            left = np.ascontiguousarray(words).view(descriptor.a_dtype).astype(np.float64)
        total = (left @ right.T) * descriptor.sign
        if issue.accumulate:
            total += memory.read(lanes, columns, "tcgen05.mma (D)").view(np.float32)
        result = total.astype(np.float32).view(np.uint32)
        memory.write(lanes, columns, result, "tcgen05.mma (D)")
        traffic = statistics.traffic
        traffic["tensor memory write by tensor cores"] += 4 * result.size
        read = (result.size if issue.accumulate else 0) + (0 if a is not None else a_columns.size)
        traffic["tensor memory read by tensor cores"] += 4 * read
        traffic["shared read by tensor cores"] += (
            b.index.size + (a.index.size if a is not None else 0)
        ) * descriptor.element_bytes
        kind = np.dtype(descriptor.a_dtype).name
        statistics.tensor_operations[f"tcgen05 {kind}"] += left.size * descriptor.columns


@instruction("tcgen05.commit", section=f"{_SECTION}: tcgen05.commit", category=_CATEGORY)
def commit(context: Context) -> Run:
    """``tcgen05.commit.cta_group.mbarrier::arrive::one{.multicast::cluster}.b64 [a]{, mask}``."""
    context.take("cta_group::1", "cta_group::2")
    context.take("mbarrier::arrive::one")
    space = context.take("shared::cluster", default="generic")
    multicast = context.flag("multicast::cluster")
    context.take("b64")
    row, offset, view = memory_address(context, context.operands[0], "shared::cluster")
    mask = context.source(context.operands[1], _U16) if multicast else -1

    def run(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes, "tcgen05.commit")
        addresses = access.lane_addresses(warp, view, row, offset, True)[lane : lane + 1]
        if space == "generic" and view == "u64":
            _, addresses = access.resolve_generic(addresses, "tcgen05.commit")
        address = int(addresses[0])
        ranks = [address >> 24]
        if mask >= 0:
            bits = int(warp.rows["u16"][mask][lane])
            ranks = [rank for rank in range(16) if bits >> rank & 1]
        blocks = warp.block.cluster.blocks
        if any(rank >= len(blocks) for rank in ranks):
            raise OutOfBounds(f"tcgen05.commit to blocks {ranks} of a cluster of {len(blocks)}")
        barriers = [blocks[rank].mbarrier(address & _OFFSET_BITS) for rank in ranks]
        queue = warp.block.tensor_memory.queue(warp)
        queue.commits += 1
        known = warp.clock.release() if warp.clock is not None else None
        if known is not None and warp.clock is not None:
            agent = warp.clock.agent(TENSOR)
            for vector in (known.happens_before, known.async_visible):
                vector[agent] = queue.commits

        def arrive() -> None:
            warp.machine.events += 1
            for barrier in barriers:
                barrier.arrive(1, known.copy() if known is not None else None)

        push(warp, arrive, "tcgen05.commit", is_commit=True)

    return run
