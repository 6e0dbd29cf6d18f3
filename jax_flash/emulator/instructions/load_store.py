"""Loads and stores: PTX ISA, "Data Movement and Conversion Instructions: ld, st"."""

from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Operand, Register, Symbol
from jax_flash.emulator.wait import Wait

_CATEGORY = "load and store"
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
_STRONG = ("acquire", "release", "relaxed", "volatile", "mmio")
_HINTS = (
    "weak",
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_last",
    "L2::evict_first",
    "L2::evict_normal",
)
_SCOPES = ("cta", "cluster", "gpu", "sys")
B128 = ptx_type("b128")


def take_space(context: Context) -> str:
    """Takes the state space; none means generic addresses."""
    space = context.take(*_SPACES, default="generic")
    if space == "local":
        raise PtxError("local memory is not implemented")
    return "global" if space == "const" else space


def take_ordering(context: Context) -> str:
    """Takes memory-ordering and scope modifiers and cache hints; returns the ordering."""
    ordering = context.take(*_STRONG, default="weak")
    if ordering != "weak":
        context.take(*_SCOPES, default="sys")
    for hint in _HINTS:
        context.flag(hint)
    return ordering


def take_count(context: Context) -> int:
    """Takes the vector modifier; returns the number of elements."""
    return int(context.take("v2", "v4", "v8", default="v1")[1:])


def memory_address(context: Context, operand: Operand, space: str) -> tuple[int, int, str]:
    """Returns ``(row, offset, view)`` of an address in a space."""
    base = getattr(operand, "base", None)
    if isinstance(base, Symbol):
        return context.address(operand, "32" if space.startswith("shared") else "64")
    if isinstance(base, Register) and space.startswith("shared"):
        return context.address(operand)
    return context.address(operand)


def register_rows(
    context: Context, operand: Operand, kind: PtxType, count: int, *, written: bool
) -> tuple[list[int], str]:
    """Returns the rows of a scalar or vector operand, and their file, which may be wider."""
    items = context.items(operand)
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {count} elements")
    files = {context.file_of(item, kind) for item in items if isinstance(item, Register)}
    file = files.pop() if files else kind.file
    if files:
        raise PtxError("registers of different widths")
    rows = []
    for item in items:
        if written:
            rows.append(context.destination(item, ptx_type(f"b{file}")))
        elif isinstance(item, Register):
            rows.append(context.source(item, ptx_type(f"b{file}")))
        else:
            rows.append(context.source(item, kind if kind.bits >= 16 else ptx_type("b16")))
    return rows, file


@instruction("ld", section="Data Movement and Conversion Instructions: ld", category=_CATEGORY)
def load(context: Context) -> Run:
    """``ld{.order.scope}{.space}{.vec}.type d, [a]``."""
    ordering = take_ordering(context)
    space = take_space(context)
    context.flag("entry")
    count = take_count(context)
    kind = context.take_type()
    if kind.bits == 128:
        return _load_wide(context, space)
    targets, file = register_rows(context, context.operands[0], kind, count, written=True)
    row, offset, view = memory_address(context, context.operands[1], space)
    element, target_view = kind.bits // 8, f"u{file}"
    widened = np.dtype(f"{'i' if kind.kind == 's' else 'u'}{int(file) // 8}")
    unsigned = np.dtype(f"u{int(file) // 8}")
    strong = ordering in ("acquire", "volatile", "relaxed")

    def run(warp: Any, lanes: Any) -> Wait | None:
        if strong and space in ("global", "generic"):
            machine = warp.machine
            here = (warp.pc, machine.events)
            if warp.poll == here:
                return Wait(lambda: machine.events != here[1], None, "a change of memory", True)
            warp.poll = here
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        values = access.read_lanes(warp, space, addresses, element, count)
        rows = warp.rows[target_view]
        for target, value in zip(targets, values, strict=True):
            if value.dtype != unsigned or kind.kind == "s":
                value = value.view(kind.dtype).astype(widened).view(unsigned)
            if lanes is True:
                rows[target][:] = value
            else:
                rows[target][lanes] = value
        return None

    return run


def joined(halves: np.ndarray) -> np.ndarray:
    """Returns 128-bit values ``(lanes,)`` from 64-bit halves ``(2, lanes)``, the low one first."""
    return np.ascontiguousarray(halves.T).view(B128.dtype)[:, 0]


def halves_of(values: np.ndarray) -> np.ndarray:
    """Returns the 64-bit halves ``(2, lanes)`` of 128-bit values ``(lanes,)``."""
    return np.ascontiguousarray(values).view(np.uint64).reshape(-1, 2).T


def _load_wide(context: Context, space: str) -> Run:
    """``ld{...}.b128 d, [a]``: one register of 128 bits."""
    target = context.destination(context.operands[0], B128)
    row, offset, view = memory_address(context, context.operands[1], space)

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        values = joined(access.read_lanes(warp, space, addresses, 8, 2))
        warp.rows["u128"][target][slice(None) if lanes is True else lanes] = values

    return run


def _store_wide(context: Context, space: str) -> Run:
    """``st{...}.b128 [a], b``: one register of 128 bits."""
    row, offset, view = memory_address(context, context.operands[0], space)
    source = context.source(context.operands[1], B128)

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        values = warp.rows["u128"][source][slice(None) if lanes is True else lanes]
        access.write_lanes(warp, space, addresses, halves_of(values), 8)

    return run


@instruction("st", section="Data Movement and Conversion Instructions: st", category=_CATEGORY)
def store(context: Context) -> Run:
    """``st{.order.scope}{.space}{.vec}.type [a], b``."""
    take_ordering(context)
    space = take_space(context)
    count = take_count(context)
    kind = context.take_type()
    if kind.bits == 128:
        return _store_wide(context, space)
    row, offset, view = memory_address(context, context.operands[0], space)
    sources, file = register_rows(context, context.operands[1], kind, count, written=False)
    element, source_view = kind.bits // 8, f"u{file}"
    unsigned = np.dtype(f"u{element}")

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        rows = warp.rows[source_view]
        values = np.empty((count, len(addresses)), unsigned)
        for index, source in enumerate(sources):
            value = rows[source] if lanes is True else rows[source][lanes]
            values[index] = value.astype(unsigned)
        access.write_lanes(warp, space, addresses, values, element)

    return run
