"""mbarriers: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"."""

from typing import Any, NamedTuple

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.barrier_state import Mbarrier
from jax_flash.emulator.clocks import Knowledge
from jax_flash.emulator.errors import BarrierFault, PtxError
from jax_flash.emulator.instructions.load_store import memory_address
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate
from jax_flash.emulator.wait import Wait

_CATEGORY = "synchronisation"
_SECTION = "Parallel Synchronization and Communication Instructions: mbarrier"
_U32 = ptx_type("u32")
_SPACES = ("shared", "shared::cta", "shared::cluster")
_BYTES = 8


def _take_common(context: Context) -> tuple[str, bool]:
    """Takes ordering, scope and space; returns the space, and whether the ordering is relaxed."""
    relaxed = context.take("release", "acquire", "relaxed", default="release") == "relaxed"
    context.take("cta", "cluster", default="cta")
    space = context.take(*_SPACES, default="generic")
    context.take("b64", default="b64")
    return space, relaxed


def _released(warp: Any, *, relaxed: bool) -> Knowledge | None:
    """Returns what an arrival passes on: a relaxed one only what a fence released before it."""
    if warp.clock is None:
        return None
    if not relaxed:
        return warp.clock.release()
    if warp.fenced is not None:
        return warp.fenced.copy()
    return Knowledge.nothing(warp.clock.domain)


def find_mbarriers(warp: Any, space: str, addresses: np.ndarray) -> list[Mbarrier]:
    """Returns the mbarrier at each address; checks that its initialisation is synchronised with.

    Lanes may address different blocks of the cluster.
    """
    what = "mbarrier operation"
    if space == "generic":
        space, addresses = access.resolve_generic(addresses, what)
    found: dict[int, Mbarrier] = {}
    numbers = addresses.tolist()
    for lane, number in enumerate(numbers):
        if number in found:
            continue
        block, offsets = warp.block.locate_shared(addresses[lane : lane + 1], what)
        block.shared.check(offsets, _BYTES, what)
        if block.shadow is not None and warp.clock is not None:
            seen = warp.clock.known.happens_before
            block.shadow.check_writes(offsets >> 2, seen, f"use by {warp.name} of an mbarrier in")
        found[number] = block.mbarrier(int(offsets[0]))
    return [found[number] for number in numbers]


@instruction("mbarrier.init", section=f"{_SECTION}.init", category=_CATEGORY)
def initialise(context: Context) -> Run:
    """``mbarrier.init.shared.b64 [a], count``."""
    space, _ = _take_common(context)
    row, offset, view = memory_address(context, context.operands[0], space)
    count = context.source(context.operands[1], _U32)

    def run(warp: Any, lanes: Any) -> None:
        block = warp.block
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        counts = warp.rows["u32"][count] if lanes is True else warp.rows["u32"][count][lanes]
        zeros = np.zeros((2, len(addresses)), np.uint32)
        access.write_lanes(warp, space, addresses, zeros, 4)
        _, offsets = block.locate_shared(addresses, "mbarrier.init")
        block.shared.check(offsets, _BYTES, "mbarrier.init")
        for where, expected in zip(offsets.tolist(), counts.tolist(), strict=True):
            if _is_initialised_again(warp, where, expected):
                continue
            block.mbarriers[where] = Mbarrier(
                offset=where,
                block=block.index,
                expected=expected,
                agent=block.cluster.domain.new_mbarrier(block.rank),
                initialiser=warp.name,
            )

    return run


def _is_initialised_again(warp: Any, offset: int, expected: int) -> bool:
    """Whether an mbarrier is already there, as it would be made; released kernels do that.

    Raises:
      BarrierFault: there is one in use, or with another count.
    """
    barrier = warp.block.mbarriers.get(offset)
    if barrier is None:
        return False
    unused = barrier.phase == 0 and barrier.pending == barrier.expected
    if not unused or barrier.transactions or barrier.expected != expected:
        raise BarrierFault(f"initialised twice: {barrier}")
    warp.machine.statistics.notes[f"the mbarrier at offset {offset} is initialised twice"] += 1
    return True


@instruction("mbarrier.inval", section=f"{_SECTION}.inval", category=_CATEGORY)
def invalidate(context: Context) -> Run:
    """``mbarrier.inval.shared.b64 [a]``: the memory may be used for something else."""
    space, _ = _take_common(context)
    row, offset, view = memory_address(context, context.operands[0], space)

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        for barrier in find_mbarriers(warp, space, addresses):
            if barrier.in_flight or barrier.transactions:
                raise BarrierFault(f"invalidated while copies complete on it: {barrier}")
            del warp.block.mbarriers[barrier.offset]

    return run


def _state(barrier: Mbarrier) -> int:
    """Returns the opaque state of the current phase: its number, and the arrivals it waits for."""
    return barrier.phase % 2**32 << 32 | barrier.pending


@instruction(
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    section=f"{_SECTION}.arrive, arrive_drop",
    category=_CATEGORY,
)
def arrive(context: Context) -> Run:
    """``mbarrier.arrive{_drop}{.expect_tx}{.sem.scope}{.space}.b64 {state,} [a]{, count}``.

    With ``.expect_tx`` the count is bytes to wait for, and one arrival is counted.
    ``arrive_drop`` takes its arrivals out of those that later phases wait for.
    """
    drop = context.statement.opcode.startswith("mbarrier.arrive_drop")
    expect = context.flag("expect_tx")
    completes = not context.flag("noComplete")
    space, relaxed = _take_common(context)
    operands = list(context.operands)
    state = -1
    if not hasattr(operands[0], "base"):
        state = context.destination(operands.pop(0), ptx_type("b64"))
    row, offset, view = memory_address(context, operands[0], space)
    count = context.source(operands[1], _U32) if len(operands) > 1 else -1
    if expect and count < 0:
        raise PtxError("mbarrier.arrive.expect_tx needs a number of bytes")

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        barriers = find_mbarriers(warp, space, addresses)
        counts = np.ones(LANES, np.uint32) if count < 0 else warp.rows["u32"][count]
        counts = counts if lanes is True else counts[lanes]
        known = _released(warp, relaxed=relaxed)
        warp.machine.events += 1
        states = np.zeros(len(barriers), np.uint64)
        for index, number in enumerate(counts.tolist()):
            barrier, arrivals = barriers[index], 1 if expect else number
            if expect:
                barrier.expect(number)
            states[index] = _state(barrier)
            if not completes and arrivals >= barrier.pending:
                raise BarrierFault(f"mbarrier.arrive.noComplete would complete: {barrier}")
            if drop:
                barrier.drop(arrivals)
            barrier.arrive(arrivals, known.copy() if known else None)
        if state >= 0:
            warp.rows["u64"][state][slice(None) if lanes is True else lanes] = states

    return run


@instruction("mbarrier.pending_count", section=f"{_SECTION}.pending_count", category=_CATEGORY)
def pending_count(context: Context) -> Run:
    """``mbarrier.pending_count.b64 d, state``: arrivals that were missing before that one."""
    context.take("b64")
    destination = context.destination(context.operands[0], _U32)
    source = context.source(context.operands[1], ptx_type("b64"))

    def run(warp: Any, lanes: Any) -> None:
        states = warp.rows["u64"][source]
        count = (states & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        np.copyto(warp.rows["u32"][destination], count, where=lanes)

    return run


@instruction(
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    section=f"{_SECTION}.expect_tx",
    category=_CATEGORY,
)
def change_transactions(context: Context) -> Run:
    """``mbarrier.expect_tx.relaxed.scope.space.b64 [a], bytes``, and ``complete_tx``."""
    complete = context.statement.opcode.startswith("mbarrier.complete_tx")
    space, _ = _take_common(context)
    row, offset, view = memory_address(context, context.operands[0], space)
    count = context.source(context.operands[1], _U32)

    def run(warp: Any, lanes: Any) -> None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        counts = warp.rows["u32"][count] if lanes is True else warp.rows["u32"][count][lanes]
        warp.machine.events += 1
        for barrier, number in zip(
            find_mbarriers(warp, space, addresses), counts.tolist(), strict=True
        ):
            if complete:
                barrier.complete(number)
            else:
                barrier.expect(number)

    return run


@instruction(
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    section=f"{_SECTION}.test_wait, try_wait",
    category=_CATEGORY,
)
def wait(context: Context) -> Run:
    """``mbarrier.try_wait{.parity}{.sem.scope}{.space}.b64 p, [a], {state,parity}{, time}``.

    ``try_wait`` waits, but a schedule may make it give up, as its time limit would.
    """
    blocking = context.statement.opcode.startswith("mbarrier.try_wait")
    by_parity = context.flag("parity")
    relaxed = context.take("acquire", "relaxed", default="acquire") == "relaxed"
    context.take("cta", "cluster", default="cta")
    space = context.take(*_SPACES, default="generic")
    context.take("b64")
    context.expect(3, 4)
    destination = context.destination(context.operands[0], ptx_type("pred"))
    row, offset, view = memory_address(context, context.operands[1], space)
    phase_kind = _U32 if by_parity else ptx_type("u64")
    phase_row = context.source(context.operands[2], phase_kind)
    if len(context.operands) == 4 and not isinstance(context.operands[3], Immediate):
        context.source(context.operands[3], _U32)

    def run(warp: Any, lanes: Any) -> Wait | None:
        addresses = access.lane_addresses(warp, view, row, offset, lanes)
        barriers = find_mbarriers(warp, space, addresses)
        values = warp.rows[phase_kind.view][phase_row][slice(None) if lanes is True else lanes]
        parities = values if by_parity else values >> np.uint64(32) & np.uint64(1)
        if (parities > 1).any():
            raise BarrierFault(f"phase parity {int(parities.max())}: needs 0 or 1")
        result = warp.rows["pred"][destination]
        uniform = all(b is barriers[0] for b in barriers) and (parities == parities[0]).all()
        if uniform:
            test = Test(barriers[0], int(parities[0]), result, blocking, relaxed)
            return _wait_for_phase(warp, lanes, test)
        done = np.array([b.completed(int(p)) for b, p in zip(barriers, parities, strict=True)])
        result[lanes if lanes is not True else slice(None)] = done
        for barrier, ok in zip(barriers, done, strict=True):
            if ok:
                _acquire(warp, barrier, relaxed=relaxed)
        return _until_change(warp) if not done.all() and not blocking else None

    return run


class Test(NamedTuple):
    """A test that all lanes make together."""

    barrier: Mbarrier
    parity: int
    result: np.ndarray
    """Predicate row that receives the answer."""
    blocking: bool
    relaxed: bool


def _until_change(warp: Any) -> Wait | None:
    """A non-blocking test that failed: the loop around it need not spin until something changes."""
    machine = warp.machine
    here = (warp.pc, machine.events)
    if warp.poll == here:
        return Wait(lambda: machine.events != here[1], None, "a phase of an mbarrier", True)
    warp.poll = here
    return None


def _wait_for_phase(warp: Any, lanes: Any, test: Test) -> Wait | None:
    barrier, result = test.barrier, test.result
    if barrier.completed(test.parity):
        np.copyto(result, True, where=lanes)
        _acquire(warp, barrier, relaxed=test.relaxed)
        return None
    if not test.blocking or warp.machine.schedule.try_wait_gives_up():
        np.copyto(result, False, where=lanes)
        return None if test.blocking else _until_change(warp)
    phase = barrier.phase
    barrier.waiting[warp.name] = phase

    def finish() -> None:
        barrier.waiting.pop(warp.name, None)
        np.copyto(result, True, where=lanes)
        _acquire(warp, barrier, relaxed=test.relaxed)

    return Wait(lambda: barrier.phase > phase, finish, f"parity {test.parity} of {barrier}")


def _acquire(warp: Any, barrier: Mbarrier, *, relaxed: bool) -> None:
    """The warp learns what the phase passes on; after a relaxed test only a fence makes it."""
    if warp.clock is None or barrier.released is None:
        return
    if not relaxed:
        warp.clock.acquire(barrier.released)
    elif warp.observed is None:
        warp.observed = barrier.released.copy()
    else:
        warp.observed.join(barrier.released)
