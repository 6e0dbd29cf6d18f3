"""Atomics: PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red".

Lanes of one instruction are served in lane order; warps in the order of the schedule.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.errors import OutOfBounds, PtxError
from jax_flash.emulator.instructions import floating
from jax_flash.emulator.instructions.load_store import (
    B128,
    halves_of,
    joined,
    memory_address,
    register_rows,
    take_space,
)
from jax_flash.emulator.instructions.rounding import maximum, minimum, without_subnormals
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_CATEGORY = "atomic"
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_HALF_FUNCTIONS: dict[str, Combine] = {
    # Rounded once: a sum of halves is exact, or far from a tie, in the float32 that numpy adds in.
    "add": np.add,
    "min": lambda old, operand: minimum(old, operand, False),
    "max": lambda old, operand: maximum(old, operand, False),
}


def combine(operation: str, kind: PtxType, *, flush: bool) -> Combine:
    """Returns the function ``(old, operand) -> new`` of an operation."""
    if kind.name in _HALVES:
        half = _HALF_FUNCTIONS.get(operation)
        if half is None:
            raise PtxError(f"{operation} of .{kind.name} does not exist")
        return floating.packed(half, kind)
    if operation == "add" and kind.kind == "f":

        def add(old: np.ndarray, operand: np.ndarray) -> np.ndarray:
            if not flush:
                return old + operand
            total = without_subnormals(old) + without_subnormals(operand)
            return without_subnormals(total)

        return add
    if operation in ("min", "max") and kind.kind == "f":
        function = minimum if operation == "min" else maximum
        return lambda old, operand: function(old, operand, False)
    table: dict[str, Combine] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, operand: operand,
        "inc": lambda old, operand: np.where(old >= operand, 0, old + 1).astype(old.dtype),
        "dec": lambda old, operand: np.where((old == 0) | (old > operand), operand, old - 1).astype(
            old.dtype
        ),
    }
    return table[operation]


def _take(context: Context) -> tuple[str, str, int, PtxType]:
    context.take(*_ORDERS, default="relaxed")
    context.take(*_SCOPES, default="gpu")
    space = take_space(context)
    operation = context.take(*_OPERATIONS)
    context.flag("noftz")
    context.flag("L2::cache_hint")
    count = int(context.take("v2", "v4", "v8", default="v1")[1:])
    kind = context.take_type()
    return space, operation, count, kind


def update_lanes(
    warp: Any,
    space: str,
    addresses: np.ndarray,
    operands: np.ndarray,
    kind: PtxType,
    function: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Updates memory lane by lane.

    Args:
      warp: who does it.
      space: state space.
      addresses: one for each lane.
      operands: ``(count, lanes)`` values of ``kind``, used for the shape and by ``function``.
      kind: type in memory.
      function: ``(old values (count,), lane) -> new values``.

    Returns:
      The old values ``(count, lanes)``.
    """
    element, count = kind.bits // 8, len(operands)
    what = f"atomic on {space} memory"
    if space == "generic":
        space, addresses = access.resolve_generic(addresses, what)
    warp.machine.events += 1
    old = np.empty(operands.shape, kind.dtype)
    if space.startswith("shared"):
        block, offsets = warp.block.locate_shared(addresses, what)
        access.note_shared_write(warp, block, offsets, element * count)
        places = [(block.shared, int(offset)) for offset in offsets]
    elif space == "global":
        places = [(memory, 0) for memory in [None] * len(addresses)]
        for memory, offsets, which in warp.machine.memory.locate(addresses, what):
            index = np.arange(len(addresses))[which]
            for lane, offset in zip(index, offsets, strict=True):
                places[int(lane)] = (memory, int(offset))
    else:
        raise OutOfBounds(f"{what}: read-only")
    traffic = warp.machine.statistics.traffic
    traffic[f"{'shared' if space != 'global' else 'global'} atomic by warps"] += (
        element * count * len(addresses)
    )
    for lane, (memory, offset) in enumerate(places):
        where = np.array([offset])
        memory.check(where, element * count, what)
        old[:, lane] = memory.read(where, element, count).view(kind.dtype)[:, 0]
        new = np.ascontiguousarray(function(old[:, lane], lane).astype(kind.dtype))
        memory.write(where, new.view(f"u{element}")[:, None], element)
    return old


def _lane_values(warp: Any, view: str, rows: list[int], lanes: Any) -> np.ndarray:
    return np.stack(
        [warp.rows[view][row] if lanes is True else warp.rows[view][row][lanes] for row in rows]
    )


@instruction(
    "red",
    section="Parallel Synchronization and Communication Instructions: red",
    category=_CATEGORY,
)
def reduce(context: Context) -> Run:
    """``red{.order.scope}{.space}.op{.vec}.type [a], b``."""
    space, operation, count, kind = _take(context)
    row, offset, view = memory_address(context, context.operands[0], space)
    sources, _ = register_rows(context, context.operands[1], kind, count, written=False)
    function = combine(operation, kind, flush=kind.name == "f32" and space == "global")

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        operands = _lane_values(warp, kind.view, sources, lanes)
        if space == "global" and _is_disjoint(addresses, kind.bits // 8 * count):
            _reduce_disjoint(warp, addresses, operands, kind, function)
            return
        update_lanes(
            warp,
            space,
            addresses,
            operands,
            kind,
            lambda old, lane: function(old, operands[:, lane]),
        )

    return run


def _is_disjoint(addresses: np.ndarray, width: int) -> bool:
    return len(addresses) > 1 and bool((np.diff(np.sort(addresses)) >= width).all())


def _reduce_disjoint(
    warp: Any, addresses: np.ndarray, operands: np.ndarray, kind: PtxType, function: Combine
) -> None:
    """All lanes at once, where no two lanes touch the same element."""
    element, count = kind.bits // 8, len(operands)
    machine = warp.machine
    machine.events += 1
    machine.statistics.traffic["global atomic by warps"] += element * count * len(addresses)
    what = "atomic on global memory"
    for memory, offsets, which in machine.memory.locate(addresses, what):
        memory.check(offsets, element * count, what)
        old = memory.read(offsets, element, count).view(kind.dtype)
        new = np.ascontiguousarray(function(old, operands[:, which]).astype(kind.dtype))
        memory.write(offsets, new.view(f"u{element}"), element)


@instruction(
    "atom",
    section="Parallel Synchronization and Communication Instructions: atom",
    category=_CATEGORY,
)
def atomic(context: Context) -> Run:
    """``atom{.order.scope}{.space}.op.type d, [a], b{, c}``."""
    space, operation, count, kind = _take(context)
    if kind.bits == 128:
        return _atomic_wide(context, space, operation)
    targets, _ = register_rows(context, context.operands[0], kind, count, written=True)
    row, offset, view = memory_address(context, context.operands[1], space)
    sources, _ = register_rows(context, context.operands[2], kind, count, written=False)
    swap = context.source(context.operands[3], kind) if operation == "cas" else -1
    if operation == "cas":
        function: Combine = np.add  # not used
    else:
        function = combine(operation, kind, flush=kind.name == "f32" and space == "global")

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        operands = _lane_values(warp, kind.view, sources, lanes)
        if swap >= 0:
            swaps = _lane_values(warp, kind.view, [swap], lanes)

            def update(old: np.ndarray, lane: int) -> np.ndarray:
                return np.where(old == operands[:, lane], swaps[:, lane], old)
        else:

            def update(old: np.ndarray, lane: int) -> np.ndarray:
                return function(old, operands[:, lane])

        old = update_lanes(warp, space, addresses, operands, kind, update)
        for target, value in zip(targets, old, strict=True):
            if lanes is True:
                warp.rows[kind.view][target][:] = value
            else:
                warp.rows[kind.view][target][lanes] = value

    return run


def _atomic_wide(context: Context, space: str, operation: str) -> Run:
    """``atom{...}.{exch,cas}.b128 d, [a], b{, c}``."""
    if operation not in ("exch", "cas"):
        raise PtxError(f"atom.{operation}.b128 does not exist")
    target = context.destination(context.operands[0], B128)
    row, offset, view = memory_address(context, context.operands[1], space)
    operand = context.source(context.operands[2], B128)
    swap = context.source(context.operands[3], B128) if operation == "cas" else -1

    def run(warp: Any, lanes: Any) -> None:
        chosen = slice(None) if lanes is True else lanes
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        rows = warp.rows["u128"]
        given = halves_of(rows[operand][chosen])
        swaps = halves_of(rows[swap][chosen]) if swap >= 0 else given

        def update(old: np.ndarray, lane: int) -> np.ndarray:
            equal = swap < 0 or (old == given[:, lane]).all()
            return swaps[:, lane] if equal else old

        old = update_lanes(warp, space, addresses, given, ptx_type("u64"), update)
        rows[target][chosen] = joined(old)

    return run
