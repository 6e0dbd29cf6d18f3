"""Copies and stores of single threads that complete later: PTX ISA, "cp.async", "st.async".

``cp.async`` lands at a moment of the schedule's choosing, at the latest when its group is waited
for. The ISA keeps groups for each thread; here the threads of a warp share theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.async_operation import AsyncOperation
from jax_flash.emulator.clocks import CP_ASYNC
from jax_flash.emulator.errors import BarrierFault, PtxError
from jax_flash.emulator.instructions.load_store import memory_address, register_rows
from jax_flash.emulator.instructions.mbarriers import find_mbarriers
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate
from jax_flash.emulator.wait import Wait

_CATEGORY = "load and store"
_SECTION = "Data Movement and Conversion Instructions: cp.async"
_U32 = ptx_type("u32")


@dataclass(slots=True, eq=False)
class Copies:
    """``cp.async`` groups of one warp."""

    open: list[list[bool]] = field(default_factory=list)
    """Copies not yet committed; each says in its only item whether it has landed."""
    groups: list[list[list[bool]]] = field(default_factory=list)


def _copies(warp: Any) -> Copies:
    return warp.block.thread_copies.setdefault(warp.index, Copies())


@instruction("cp.async", section=_SECTION, category=_CATEGORY)
def copy(context: Context) -> Run:
    """``cp.async.{ca,cg}.shared.global [dst], [src], size{, source size}``; the rest is zeros."""
    context.take("ca", "cg")
    context.take("shared", "shared::cta", "shared::cluster")
    context.take("global")
    hint = context.flag("L2::cache_hint")
    for word in ("L2::64B", "L2::128B", "L2::256B"):
        context.flag(word)
    destination = memory_address(context, context.operands[0], "shared")
    source = memory_address(context, context.operands[1], "global")
    size = context.operands[2]
    if not isinstance(size, Immediate) or size.value not in (4, 8, 16):
        raise PtxError("cp.async copies 4, 8 or 16 bytes")
    width = size.value
    rest = list(context.operands[3:])
    if hint:
        context.source(rest.pop(), ptx_type("u64"))
    given = context.source(rest[0], _U32) if rest else -1

    def run(warp: Any, lanes: Any) -> None:
        targets = access.lane_addresses(warp, destination[2], destination[0], destination[1], lanes)
        sources = access.lane_addresses(warp, source[2], source[0], source[1], lanes)
        sizes = np.full(len(targets), width, np.uint32)
        if given >= 0:
            row = warp.rows["u32"][given]
            sizes = (row if lanes is True else row[lanes]).copy()
        _start(warp, targets, sources, sizes, width)

    return run


def _start(
    warp: Any, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, width: int
) -> None:
    block, offsets = warp.block.locate_shared(targets, "cp.async")
    block.shared.check(offsets, width, "cp.async")
    copies = _copies(warp)
    if warp.clock is not None:
        agent, time = warp.clock.agent(CP_ASYNC), len(copies.groups) + 1
        block.on_async_write(warp, access.words_of(offsets, width), agent, time)
    for offset in offsets:
        block.shared.written[offset : offset + width] = 0
    landed = [False]
    copies.open.append(landed)

    def land() -> None:
        values = np.zeros((width // 4, len(targets)), np.uint32)
        whole = sizes == width
        if whole.any():
            values[:, whole] = access.read_lanes(warp, "global", sources[whole], 4, width // 4)
        for lane in np.flatnonzero(~whole):
            for word in range(int(sizes[lane]) // 4):
                place = sources[lane : lane + 1] + np.uint64(4 * word)
                values[word, lane] = access.read_lanes(warp, "global", place, 4, 1)[0, 0]
        block.shared.write(offsets, values, 4)
        traffic = warp.machine.statistics.traffic
        traffic["shared write by asynchronous copies"] += width * len(offsets)
        landed[0] = True

    text = f"cp.async started by {warp.name}, line {warp.line}"
    warp.machine.pending.append(AsyncOperation(land, text, warp.block))


@instruction("cp.async.commit_group", section=f"{_SECTION}.commit_group", category=_CATEGORY)
def commit(context: Context) -> Run:
    """``cp.async.commit_group``."""
    context.expect(0)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        copies = _copies(warp)
        copies.groups.append(copies.open)
        copies.open = []

    return run


@instruction(
    "cp.async.wait_group", "cp.async.wait_all", section=f"{_SECTION}.wait_group", category=_CATEGORY
)
def wait(context: Context) -> Run:
    """``cp.async.wait_group n``: all but the newest ``n`` groups; ``wait_all`` commits first."""
    every = context.statement.opcode == "cp.async.wait_all"
    newest = 0
    if not every:
        operand = context.operands[0]
        if not isinstance(operand, Immediate):
            raise PtxError("needs a constant")
        newest = operand.value

    def run(warp: Any, lanes: Any) -> Wait | None:
        del lanes
        copies = _copies(warp)
        if every and copies.open:
            copies.groups.append(copies.open)
            copies.open = []
        done = max(0, len(copies.groups) - newest)

        def ready() -> bool:
            return all(landed[0] for group in copies.groups[:done] for landed in group)

        def finish() -> None:
            if warp.clock is not None:
                warp.clock.complete(warp.clock.agent(CP_ASYNC), done)

        if ready():
            finish()
            return None
        return Wait(ready, finish, "cp.async groups")

    return run


@instruction(
    "cp.async.mbarrier.arrive",
    section="Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive",
    category=_CATEGORY,
)
def arrive(context: Context) -> Run:
    """``cp.async.mbarrier.arrive.noinc.shared.b64 [a]``: arrives when earlier copies land."""
    context.take("noinc")
    space = context.take("shared", "shared::cta", default="generic")
    context.take("b64")
    row, offset, view = memory_address(context, context.operands[0], space)

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        barriers = find_mbarriers(warp, space, addresses)
        copies = _copies(warp)
        earlier = [landed for group in (*copies.groups, copies.open) for landed in group]
        if copies.open:  # later copies have a later time
            copies.groups.append(copies.open)
            copies.open = []
        known = None
        if warp.clock is not None:
            known, agent = warp.clock.release(), warp.clock.agent(CP_ASYNC)
            known.happens_before[agent] = known.async_visible[agent] = len(copies.groups)

        def land() -> None:
            for barrier in barriers:
                barrier.arrive(1, known.copy() if known is not None else None)

        _after(warp, earlier, land)

    return run


def _after(warp: Any, earlier: list[list[bool]], land: Callable[[], None]) -> None:
    """Lands once other copies have; until then it goes back to the end of what is pending."""
    text = f"cp.async.mbarrier.arrive by {warp.name}, line {warp.line}"

    def attempt() -> None:
        if all(landed[0] for landed in earlier):
            land()
        else:
            warp.machine.pending.append(AsyncOperation(attempt, text, warp.block))

    warp.machine.pending.append(AsyncOperation(attempt, text, warp.block))


@instruction(
    "st.async",
    section="Data Movement and Conversion Instructions: st.async",
    category=_CATEGORY,
)
def store(context: Context) -> Run:
    """``st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar]``.

    The bytes land in any block of the cluster, and count on an mbarrier of the same block.
    """
    context.flag("weak")
    context.take("shared::cluster")
    context.take("mbarrier::complete_tx::bytes")
    count = int(context.take("v2", "v4", default="v1")[1:])
    kind = context.take_type()
    row, offset, view = memory_address(context, context.operands[0], "shared::cluster")
    sources, _ = register_rows(context, context.operands[1], kind, count, written=False)
    barrier = memory_address(context, context.operands[2], "shared::cluster")
    element = kind.bits // 8

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        signals = access.lane_addresses(warp, barrier[2], barrier[0], barrier[1], lanes)
        rows = [warp.rows[kind.view][source] for source in sources]
        values = np.stack([r.copy() if lanes is True else r[lanes] for r in rows])
        _start_store(warp, addresses, signals, values.view(f"u{element}"))

    return run


def _start_store(warp: Any, addresses: np.ndarray, signals: np.ndarray, values: np.ndarray) -> None:
    block, offsets = warp.block.locate_shared(addresses, "st.async")
    element, width = values.dtype.itemsize, values.dtype.itemsize * len(values)
    block.shared.check(offsets, width, "st.async")
    owner, places = warp.block.locate_shared(signals, "st.async")
    if owner is not block:
        raise BarrierFault("st.async: destination and mbarrier belong to different blocks")
    barriers = [block.mbarrier(int(place)) for place in places]
    for lane, barrier in enumerate(barriers):
        where = offsets[lane : lane + 1]
        words = access.words_of(where, width)
        block.on_async_write(warp, words, barrier.agent, barrier.phase + 1)
        block.shared.written[int(where[0]) : int(where[0]) + width] = 0
        barrier.in_flight += 1

    def land() -> None:
        block.shared.write(offsets, values, element)
        traffic = warp.machine.statistics.traffic
        traffic["shared write by asynchronous copies"] += width * len(offsets)
        for barrier in barriers:
            barrier.in_flight -= 1
            barrier.complete(width)

    text = f"st.async started by {warp.name}, line {warp.line}"
    warp.machine.pending.append(AsyncOperation(land, text, block))
