"""Exchange between the lanes of a warp.

PTX ISA: "Data Movement and Conversion Instructions: shfl.sync", "Parallel Synchronization and
Communication Instructions: vote.sync, match.sync, redux.sync, elect.sync, activemask,
bar.warp.sync".
"""

from typing import Any

import numpy as np

from jax_flash.emulator.errors import ConvergenceFault, PtxError
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Pair

_CATEGORY = "warp exchange"
_LANE = np.arange(LANES)
_U32, _B32, _PRED = ptx_type("u32"), ptx_type("b32"), ptx_type("pred")
_SYNC = "Parallel Synchronization and Communication Instructions"


def _mask_of(warp: Any, row: int, lanes: Any) -> np.ndarray:
    """Returns the membership mask as lanes; every executing lane must be a member."""
    executing = np.ones(LANES, bool) if lanes is True else lanes
    mask = int(warp.rows["u32"][row][int(np.argmax(executing))])
    members = (mask >> _LANE) & 1 != 0
    if (executing & ~members).any():
        raise ConvergenceFault(f"membership mask {mask:#010x} lacks a lane that executes")
    return members


def shuffle_source(
    mode: str, operand: np.ndarray, clamp: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source lane of each lane, and whether it is in range (else its own value)."""
    b, c = operand.astype(np.int64) & 31, clamp.astype(np.int64)
    segment, bound = (c >> 8) & 31, c & 31
    highest = (_LANE & segment) | (bound & ~segment)
    lowest = _LANE & segment
    if mode == "up":
        source = _LANE - b
        inside = source >= highest
    elif mode == "down":
        source = _LANE + b
        inside = source <= highest
    elif mode == "bfly":
        source = _LANE ^ b
        inside = source <= highest
    else:
        source = lowest | (b & ~segment)
        inside = source <= highest
    return np.where(inside, source, _LANE) & 31, inside


@instruction(
    "shfl.sync",
    section="Data Movement and Conversion Instructions: shfl.sync",
    category=_CATEGORY,
    converges=True,
)
def shuffle(context: Context) -> Run:
    """``shfl.sync.mode.b32 d{|p}, a, b, c, membermask``."""
    mode = context.take("up", "down", "bfly", "idx")
    context.take("b32")
    target = context.operands[0]
    predicate = context.destination(target.second, _PRED) if isinstance(target, Pair) else -1
    destination = context.destination(target.first if isinstance(target, Pair) else target, _B32)
    a, b, c, mask = (context.source(operand, _U32) for operand in context.operands[1:])
    context.member_mask = mask

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows["u32"]
        members = _mask_of(warp, mask, lanes)
        source, inside = shuffle_source(mode, rows[b], rows[c])
        active = members if lanes is True else lanes
        if not active[source][active].all():
            raise ConvergenceFault("shfl.sync reads from a lane that does not take part")
        np.copyto(rows[destination], rows[a][source], where=lanes)
        if predicate >= 0:
            np.copyto(warp.rows["pred"][predicate], inside, where=lanes)

    return run


def _bits(flags: np.ndarray) -> int:
    return int((flags.astype(np.uint64) << _LANE.astype(np.uint64)).sum())


@instruction("vote.sync", section=f"{_SYNC}: vote.sync", category=_CATEGORY, converges=True)
def vote(context: Context) -> Run:
    """``vote.sync.{all,any,uni}.pred p, a, membermask`` and ``vote.sync.ballot.b32``."""
    mode = context.take("all", "any", "uni", "ballot")
    kind = context.take_type()
    destination = context.destination(context.operands[0], kind)
    source, negated = context.predicate(context.operands[1])
    mask = context.member_mask = context.source(context.operands[2], _U32)

    def run(warp: Any, lanes: Any) -> None:
        members = _mask_of(warp, mask, lanes)
        flags = (warp.rows["pred"][source] ^ negated) & members
        count, total = int(flags.sum()), int(members.sum())
        answer = {
            "all": count == total,
            "any": count > 0,
            "uni": count in (0, total),
            "ballot": _bits(flags),
        }[mode]
        row = warp.rows["u32" if mode == "ballot" else "pred"][destination]
        np.copyto(row, row.dtype.type(answer), where=lanes)

    return run


@instruction("match", section=f"{_SYNC}: match.sync", category=_CATEGORY, converges=True)
def match(context: Context) -> Run:
    """``match.{any,all}.sync.type d{|p}, a, membermask``."""
    mode = context.take("any", "all")
    context.take("sync")
    kind = context.take_type()
    target = context.operands[0]
    predicate = context.destination(target.second, _PRED) if isinstance(target, Pair) else -1
    destination = context.destination(target.first if isinstance(target, Pair) else target, _B32)
    source = context.source(context.operands[1], kind)
    mask = context.member_mask = context.source(context.operands[2], _U32)

    def run(warp: Any, lanes: Any) -> None:
        members = _mask_of(warp, mask, lanes)
        values = warp.rows[kind.view][source]
        equal = (values[:, None] == values[None, :]) & members[None, :]
        found = np.array([_bits(row) for row in equal], np.uint32)
        same = (equal == members[None, :]).all(axis=1)
        if mode == "all":
            found = np.where(same, found, 0).astype(np.uint32)
        np.copyto(warp.rows["u32"][destination], found, where=lanes)
        if predicate >= 0:
            np.copyto(warp.rows["pred"][predicate], same, where=lanes)

    return run


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux.sync", section=f"{_SYNC}: redux.sync", category=_CATEGORY, converges=True)
def reduce_over_lanes(context: Context) -> Run:
    """``redux.sync.op{.abs}{.NaN}.type d, a, membermask``."""
    operation = context.take(*_REDUCTIONS)
    absolute, propagate = context.flag("abs"), context.flag("NaN")
    kind = context.take_type()
    if kind.kind == "f" and operation not in ("min", "max"):
        raise PtxError(f"redux.sync.{operation}.{kind.name}")
    destination = context.destination(context.operands[0], kind)
    source = context.source(context.operands[1], kind)
    mask = context.member_mask = context.source(context.operands[2], _U32)
    ufunc: Any = _REDUCTIONS[operation]
    if kind.kind == "f" and not propagate:
        ufunc = np.fmin if operation == "min" else np.fmax

    def run(warp: Any, lanes: Any) -> None:
        members = _mask_of(warp, mask, lanes)
        values = warp.rows[kind.view][source][members]
        if absolute:
            values = np.abs(values)
        result = ufunc.reduce(values, dtype=kind.dtype)
        np.copyto(warp.rows[kind.view][destination], result, where=lanes)

    return run


@instruction("elect.sync", section=f"{_SYNC}: elect.sync", category=_CATEGORY, converges=True)
def elect(context: Context) -> Run:
    """``elect.sync d|p, membermask``: the lowest member leads."""
    target = context.operands[0]
    if not isinstance(target, Pair):
        raise PtxError("elect.sync has two destinations")
    destination = context.destination(target.first, _B32)
    predicate = context.destination(target.second, _PRED)
    mask = context.member_mask = context.source(context.operands[1], _U32)

    def run(warp: Any, lanes: Any) -> None:
        members = _mask_of(warp, mask, lanes)
        if lanes is not True:
            members = members & lanes
        leader = int(np.argmax(members))
        np.copyto(warp.rows["u32"][destination], np.uint32(leader), where=lanes)
        np.copyto(warp.rows["pred"][predicate], leader == _LANE, where=lanes)

    return run


@instruction("activemask", section=f"{_SYNC}: activemask", category=_CATEGORY)
def active_mask(context: Context) -> Run:
    """``activemask.b32 d``."""
    context.take("b32")
    destination = context.destination(context.operands[0], _B32)

    def run(warp: Any, lanes: Any) -> None:
        active = np.ones(LANES, bool) if lanes is True else lanes
        np.copyto(warp.rows["u32"][destination], np.uint32(_bits(active)), where=lanes)

    return run


@instruction("bar.warp.sync", section=f"{_SYNC}: bar.warp.sync", category=_CATEGORY, converges=True)
def synchronise_warp(context: Context) -> Run:
    """``bar.warp.sync membermask``: waits for the members; lanes share one clock already."""
    mask = context.member_mask = context.source(context.operands[0], _U32)

    def run(warp: Any, lanes: Any) -> None:
        _mask_of(warp, mask, lanes)

    return run
