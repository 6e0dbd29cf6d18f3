"""Blocks that take over clusters which have not started yet.

PTX ISA, "Parallel Synchronization and Communication Instructions: clusterlaunchcontrol". The answer
is 16 opaque bytes; here they are the index of the cancelled cluster's first block, and a mark.
"""

from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.bulk_engine import (
    Destination,
    begin_writes,
    find_targets,
    finish_writes,
    pend,
)
from jax_flash.emulator.errors import BarrierFault, Misaligned, OutOfBounds, PtxError
from jax_flash.emulator.instructions.load_store import B128, halves_of, memory_address
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_SECTION = "Parallel Synchronization and Communication Instructions: clusterlaunchcontrol"
_CATEGORY = "synchronisation"
_BYTES = 16
_REFUSED, _CANCELLED = 0x434C4330, 0x434C4331
_NOTHING = 0xFFFFFFFF
_AXES = "xyz"


@instruction(
    "clusterlaunchcontrol.try_cancel", section=f"{_SECTION}.try_cancel", category=_CATEGORY
)
def try_cancel(context: Context) -> Run:
    """``clusterlaunchcontrol.try_cancel.async{.space}.completion{.multicast}.b128 [a], [mbar]``.

    With ``.multicast::cluster::all`` every block of the cluster receives the answer at the same
    offset, and counts its bytes on its own mbarrier.
    """
    context.take("async")
    space = context.take("shared::cta", default="generic")
    context.take("mbarrier::complete_tx::bytes")
    multicast = context.flag("multicast::cluster::all")
    context.take("b128")
    context.expect(2)
    answer = memory_address(context, context.operands[0], space)
    barrier = memory_address(context, context.operands[1], space)

    def run(warp: Any, lanes: Any) -> None:
        for lane in range(LANES):
            if lanes is True or lanes[lane]:
                _request(
                    warp,
                    _own_address(warp, space, answer, lane),
                    _own_address(warp, space, barrier, lane),
                    multicast=multicast,
                )

    return run


def _own_address(warp: Any, space: str, place: tuple[int, int, str], lane: int) -> int:
    row, offset, view = place
    addresses = access.lane_addresses(warp, view, row, offset, True)[lane : lane + 1]
    what = "clusterlaunchcontrol.try_cancel"
    if space == "generic" and view == "u64":
        space, addresses = access.resolve_generic(addresses, what)
        if space == "global":
            raise OutOfBounds(f"{what}: the address is not in shared memory")
    address = int(addresses[0])
    if address >> 24 != warp.block.rank:
        raise OutOfBounds(f"{what}: {address:#x} is not in the shared memory of its own block")
    return address


def _request(warp: Any, answer: int, barrier: int, *, multicast: bool) -> None:
    block, machine = warp.block, warp.machine
    if answer % _BYTES:
        raise Misaligned(f"clusterlaunchcontrol.try_cancel to {answer:#x}: needs 16-byte alignment")
    if block.refusal is not None and warp.clock is not None:
        agent, time = block.refusal
        if warp.clock.known.happens_before[agent] >= time:
            raise BarrierFault("clusterlaunchcontrol.try_cancel after it was seen to fail")
    every = (1 << len(block.cluster.blocks)) - 1
    where = Destination(answer, barrier, every if multicast else None)
    targets = find_targets(warp, where, _BYTES)
    begin_writes(warp, targets, _BYTES, 1)
    times = [(target.barrier.agent, target.barrier.phase + 1) for target in targets]

    def land() -> None:
        first = machine.cancel_waiting()
        words = (*first, _CANCELLED) if first else (_NOTHING, _NOTHING, _NOTHING, _REFUSED)
        data = np.array(words, np.uint32).view(np.uint8)
        for target, time in zip(targets, times, strict=True):
            target.block.shared.bytes[target.offset : target.offset + _BYTES] = data
            target.block.shared.written[target.offset : target.offset + _BYTES] = 1
            if first is None:
                target.block.refusal = time
        finish_writes(targets, _BYTES, 1)

    pend(warp, land, "clusterlaunchcontrol.try_cancel")


@instruction(
    "clusterlaunchcontrol.query_cancel", section=f"{_SECTION}.query_cancel", category=_CATEGORY
)
def query_cancel(context: Context) -> Run:
    """``clusterlaunchcontrol.query_cancel.{is_canceled.pred,get_first_ctaid{::axis}.b32}.b128``.

    Of a request that failed the index is undefined, not an error: compilers read it all the same.
    """
    what = context.take("is_canceled", "get_first_ctaid", *(f"get_first_ctaid::{a}" for a in _AXES))
    context.take("b128")
    source = context.source(context.operands[1], B128)
    axes: list[int] = []
    if what == "is_canceled":
        context.take("pred")
        targets = [context.destination(context.operands[0], ptx_type("pred"))]
    else:
        context.take("b32")
        items = context.items(context.operands[0])
        axes = [0, 1, 2, 3] if what == "get_first_ctaid" else [_AXES.index(what[-1])]
        if what == "get_first_ctaid":
            context.take("v4")
        if len(items) != len(axes):
            raise PtxError(f"{len(items)} destinations for {len(axes)} values")
        targets = [context.destination(item, ptx_type("b32")) for item in items]

    def run(warp: Any, lanes: Any) -> None:
        words = halves_of(warp.rows["u128"][source]).T.copy().view(np.uint32)
        marks = words[:, 3] if lanes is True else words[lanes, 3]
        if not np.isin(marks, (_REFUSED, _CANCELLED)).all():
            raise BarrierFault("query_cancel of something that is no answer of try_cancel")
        if not axes:
            np.copyto(warp.rows["pred"][targets[0]], words[:, 3] == _CANCELLED, where=lanes)
        for target, axis in zip(targets, axes, strict=False):
            np.copyto(warp.rows["u32"][target], words[:, axis], where=lanes)

    return run
