"""Bulk copies and their groups: PTX ISA, "Data Movement and Conversion Instructions: Bulk copy".

A copy is checked when it starts, and lands at a moment that the schedule chooses: until then its
destination counts as not written. Threads of a warp that start the very same copy are served
together; their byte counts add up.
"""

from collections import Counter
from typing import Any

import numpy as np

from jax_flash.emulator import access
from jax_flash.emulator.bulk_engine import (
    Destination,
    start_flat_load,
    start_flat_store,
    start_shared_copy,
    start_tensor_load,
    start_tensor_store,
)
from jax_flash.emulator.bulk_reduction import check_reduction
from jax_flash.emulator.errors import OutOfBounds, PtxError
from jax_flash.emulator.instructions.load_store import memory_address
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Address, Immediate, Operand
from jax_flash.emulator.tensor_map import TENSOR_MAP_BYTES, TensorMap, decode
from jax_flash.emulator.wait import Wait

_CATEGORY = "bulk copy"
_SECTION = "Data Movement and Conversion Instructions"
_U16, _U32, _U64 = ptx_type("u16"), ptx_type("u32"), ptx_type("u64")
_COMPLETE = "mbarrier::complete_tx::bytes"
_SHARED = ("shared::cta", "shared::cluster")
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _lanes_of(lanes: Any) -> np.ndarray:
    return np.arange(LANES) if lanes is True else np.flatnonzero(lanes)


def read_tensor_map(warp: Any, address: int) -> TensorMap:
    """Reads the tensor map at a generic address."""
    if address % 64:
        raise OutOfBounds(f"tensor map at address {address:#x}: must be a multiple of 64")
    space, inner = access.resolve_generic(np.array([address], np.uint64), "tensor map")
    if space == "param":
        memory, offset = warp.machine.parameter_memory, int(inner[0])
    else:
        memory, offsets, _ = warp.machine.memory.locate(inner, "tensor map")[0]
        offset = int(offsets[0])
    memory.check(np.array([offset]), 1, "tensor map")
    return decode(memory.bytes[offset : offset + TENSOR_MAP_BYTES].tobytes())


def _coordinates(context: Context, operand: Operand, rank: int) -> list[int]:
    if not isinstance(operand, Address) or operand.coordinates is None:
        raise PtxError("a tensor copy needs [map, {coordinates}]")
    if operand.extra is not None:
        raise PtxError("im2col and gather copies are not implemented")
    if len(operand.coordinates.items) != rank:
        raise PtxError(f"{len(operand.coordinates.items)} coordinates for {rank} dimensions")
    return [context.source(item, ptx_type("s32")) for item in operand.coordinates.items]


def _rank(context: Context) -> int:
    return int(context.take("1d", "2d", "3d", "4d", "5d")[0])


def _addresses(warp: Any, place: tuple[int, int, str]) -> np.ndarray:
    row, offset, view = place
    return access.lane_addresses(warp, view, row, offset, True)


@instruction(
    "cp.async.bulk.tensor", section=f"{_SECTION}: cp.async.bulk.tensor", category=_CATEGORY
)
def tensor_copy(context: Context) -> Run:
    """``cp.async.bulk.tensor.Nd.dst.src{.tile}.completion{.multicast}{.hint} ...``."""
    rank = _rank(context)
    if "bulk_group" in context.modifiers:
        return _tensor_store(context, rank, "")
    context.take(*_SHARED)
    context.take("global")
    context.take("tile", default="tile")
    context.take(_COMPLETE)
    multicast = context.flag("multicast::cluster")
    pair = context.take("cta_group::1", "cta_group::2", default="cta_group::1")
    hint = context.flag("L2::cache_hint")
    context.expect(3 + multicast + hint)
    destination = memory_address(context, context.operands[0], "shared::cluster")
    map_place = context.address(context.operands[1])
    coordinates = _coordinates(context, context.operands[1], rank)
    barrier = memory_address(context, context.operands[2], "shared::cluster")
    mask = context.source(context.operands[3], _U16) if multicast else -1
    if hint:
        context.source(context.operands[3 + multicast], _U64)

    def run(warp: Any, lanes: Any) -> None:
        targets, maps, barriers = (
            _addresses(warp, place) for place in (destination, map_place, barrier)
        )
        places = np.stack([warp.rows["s32"][row] for row in coordinates])
        copies: Counter[tuple[Any, ...]] = Counter()
        for lane in _lanes_of(lanes):
            blocks = int(warp.rows["u16"][mask][lane]) if mask >= 0 else None
            where = Destination(int(targets[lane]), int(barriers[lane]), blocks)
            copies[where, int(maps[lane]), tuple(places[:, lane].tolist())] += 1
        for (where, address, position), count in copies.items():
            start_tensor_load(
                warp,
                where,
                read_tensor_map(warp, address),
                position,
                count,
                pair=pair == "cta_group::2",
            )

    return run


def _tensor_store(context: Context, rank: int, operation: str) -> Run:
    context.take("global")
    context.take("shared::cta")
    context.take("tile", default="tile")
    context.take("bulk_group")
    hint = context.flag("L2::cache_hint")
    context.expect(2 + hint)
    map_place = context.address(context.operands[0])
    coordinates = _coordinates(context, context.operands[0], rank)
    source = memory_address(context, context.operands[1], "shared::cta")
    if hint:
        context.source(context.operands[2], _U64)

    def run(warp: Any, lanes: Any) -> None:
        maps, sources = _addresses(warp, map_place), _addresses(warp, source)
        places = np.stack([warp.rows["s32"][row] for row in coordinates])
        copies = Counter(
            (int(maps[lane]), int(sources[lane]), tuple(places[:, lane].tolist()))
            for lane in _lanes_of(lanes)
        )
        for (address, start, position), count in copies.items():
            start_tensor_store(
                warp, start, read_tensor_map(warp, address), position, operation, count
            )

    return run


@instruction(
    "cp.reduce.async.bulk.tensor",
    section=f"{_SECTION}: cp.reduce.async.bulk.tensor",
    category=_CATEGORY,
)
def tensor_reduce(context: Context) -> Run:
    """``cp.reduce.async.bulk.tensor.Nd.global.shared::cta.op{.tile}.bulk_group ...``."""
    rank = _rank(context)
    operation = context.take(*_OPERATIONS)
    return _tensor_store(context, rank, operation)


@instruction("cp.async.bulk", section=f"{_SECTION}: cp.async.bulk", category=_CATEGORY)
def flat_copy(context: Context) -> Run:
    """``cp.async.bulk.dst.src.completion [dst], [src], size, [mbar]``."""
    if "bulk_group" in context.modifiers:
        return _flat_store(context, "", "u8")
    words = [word for word in context.modifiers if word in (*_SHARED, "global")]
    if len(words) != 2:
        raise PtxError("needs a destination and a source space")
    for word in words:
        context.take(word)
    from_shared = words[1] != "global"
    context.take(_COMPLETE)
    multicast = context.flag("multicast::cluster")
    hint = context.flag("L2::cache_hint")
    context.expect(4 + multicast + hint)
    destination = memory_address(context, context.operands[0], "shared::cluster")
    source = memory_address(context, context.operands[1], words[1])
    size = context.source(context.operands[2], _U32)
    barrier = memory_address(context, context.operands[3], "shared::cluster")
    mask = context.source(context.operands[4], _U16) if multicast else -1
    if hint:
        context.source(context.operands[4 + multicast], _U64)

    def run(warp: Any, lanes: Any) -> None:
        targets, sources, barriers = (
            _addresses(warp, place) for place in (destination, source, barrier)
        )
        copies: Counter[tuple[Any, ...]] = Counter()
        for lane in _lanes_of(lanes):
            blocks = int(warp.rows["u16"][mask][lane]) if mask >= 0 else None
            where = Destination(int(targets[lane]), int(barriers[lane]), blocks)
            copies[where, int(sources[lane]), int(warp.rows["u32"][size][lane])] += 1
        for (where, start, count_bytes), count in copies.items():
            begin = start_shared_copy if from_shared else start_flat_load
            begin(warp, where, start, count_bytes, count)

    return run


def _flat_store(context: Context, operation: str, element: str) -> Run:
    context.take("global")
    context.take("shared::cta")
    context.take("bulk_group")
    hint = context.flag("L2::cache_hint")
    context.expect(3 + hint)
    destination = memory_address(context, context.operands[0], "global")
    source = memory_address(context, context.operands[1], "shared::cta")
    size = context.source(context.operands[2], _U32)
    if hint:
        context.source(context.operands[3], _U64)

    def run(warp: Any, lanes: Any) -> None:
        targets, sources = _addresses(warp, destination), _addresses(warp, source)
        copies = Counter(
            (int(targets[lane]), int(sources[lane]), int(warp.rows["u32"][size][lane]))
            for lane in _lanes_of(lanes)
        )
        for (target, start, count_bytes), count in copies.items():
            start_flat_store(warp, target, start, count_bytes, (operation, element), count)

    return run


@instruction(
    "cp.reduce.async.bulk", section=f"{_SECTION}: cp.reduce.async.bulk", category=_CATEGORY
)
def flat_reduce(context: Context) -> Run:
    """``cp.reduce.async.bulk.global.shared::cta.bulk_group.op.type [dst], [src], size``."""
    if "bulk_group" not in context.modifiers:
        raise PtxError("reductions into shared memory are not implemented")
    operation = context.take(*_OPERATIONS)
    context.flag("noftz")
    kind = context.take_type()
    check_reduction(operation, kind.name)
    return _flat_store(context, operation, kind.name)


@instruction(
    "cp.async.bulk.commit_group",
    section=f"{_SECTION}: cp.async.bulk.commit_group",
    category=_CATEGORY,
)
def commit(context: Context) -> Run:
    """``cp.async.bulk.commit_group``."""
    context.expect(0)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        warp.block.bulk_groups.commit(warp)

    return run


@instruction(
    "cp.async.bulk.wait_group", section=f"{_SECTION}: cp.async.bulk.wait_group", category=_CATEGORY
)
def wait(context: Context) -> Run:
    """``cp.async.bulk.wait_group{.read} n``: all but the newest ``n`` groups."""
    read = context.flag("read")
    operand = context.operands[0]
    if not isinstance(operand, Immediate):
        raise PtxError("needs a constant")
    newest = operand.value

    def run(warp: Any, lanes: Any) -> Wait | None:
        del lanes
        groups = warp.block.bulk_groups

        def ready() -> bool:
            return groups.is_complete(warp, newest, read=read)

        def finish() -> None:
            groups.note_wait(warp, newest)

        if ready():
            finish()
            return None
        return Wait(ready, finish, f"bulk copies ({'read' if read else 'done'})")

    return run
