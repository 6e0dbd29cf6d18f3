"""What bulk copies do when they start and when they land."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jax_flash.emulator.address_space import SHARED_BASE
from jax_flash.emulator.async_operation import AsyncOperation
from jax_flash.emulator.barrier_state import Mbarrier
from jax_flash.emulator.bulk_groups import BulkOperation
from jax_flash.emulator.bulk_reduction import reduced
from jax_flash.emulator.clocks import BULK_READ
from jax_flash.emulator.errors import (
    BarrierFault,
    Misaligned,
    OutOfBounds,
    UninitialisedRead,
)
from jax_flash.emulator.memory import Memory
from jax_flash.emulator.tensor_map import (
    TensorMap,
    box_rows,
    load_box,
    shared_chunks,
    store_box,
)

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block
    from jax_flash.emulator.warp import Warp

_CHUNK = np.dtype("V16")
_OFFSET_BITS = (1 << 24) - 1


class Destination(NamedTuple):
    """Where a copy into shared memory goes."""

    address: int
    barrier: int
    """Address of the mbarrier that counts the bytes."""
    blocks: int | None
    """Multicast mask of block ranks; None for one block."""


class Target(NamedTuple):
    """One block that receives a copy."""

    block: "Block"
    offset: int
    barrier: Mbarrier


def find_targets(
    warp: "Warp", where: Destination, size: int, *, pair: bool = False
) -> list[Target]:
    """Returns the blocks that ``size`` bytes go to, with the mbarriers that count them.

    Raises:
      OutOfBounds: a block that does not run, or bytes outside its shared memory.
      BarrierFault: no mbarrier there, or one in another block.
    """
    blocks = warp.block.cluster.blocks
    ranks = [where.address >> 24]
    if where.blocks is not None:
        ranks = [rank for rank in range(16) if where.blocks >> rank & 1]
    targets = []
    for rank in ranks:
        if rank >= len(blocks) or blocks[rank].running == 0:
            raise OutOfBounds(f"bulk copy to block {rank} of the cluster, which is not running")
        block, offset = blocks[rank], where.address & _OFFSET_BITS
        if offset < SHARED_BASE or offset + size > block.shared.size:
            raise OutOfBounds(
                f"bulk copy of {size} bytes to offset {offset} of {block.shared.name}, which ends "
                f"at {block.shared.size}"
            )
        owner = blocks[where.barrier >> 24]
        if where.blocks is not None:
            # With cta_group::2 the barrier of the pair's block of the same parity is signalled.
            owner = blocks[(rank & ~1) | (where.barrier >> 24 & 1)] if pair else block
        elif owner is not block and not (pair and owner.rank ^ block.rank == 1):
            raise BarrierFault("bulk copy: destination and mbarrier belong to different blocks")
        targets.append(Target(block, offset, _check_barrier(warp, owner, where.barrier)))
    return targets


def _check_barrier(warp: "Warp", block: "Block", address: int) -> Mbarrier:
    offset = address & _OFFSET_BITS
    barrier = block.mbarrier(offset)
    if block.shadow is not None and warp.clock is not None:
        if not barrier.published:
            raise BarrierFault(
                "the mbarrier's initialisation is not visible to the async proxy (no "
                f"fence.mbarrier_init or fence.proxy.async after it): {barrier}"
            )
        words = np.array([offset >> 2])
        seen = warp.clock.known.happens_before
        block.shadow.check_writes(words, seen, "a bulk copy's use of an mbarrier in")
    return barrier


def begin_writes(warp: "Warp", targets: list[Target], size: int, count: int) -> None:
    """Marks the destinations of a copy as in flight."""
    for block, offset, barrier in targets:
        words = slice(offset >> 2, offset + size >> 2)
        block.on_async_write(warp, words, barrier.agent, barrier.phase + 1)
        block.shared.written[offset : offset + size] = 0
        barrier.in_flight += count


def finish_writes(targets: list[Target], size: int, count: int) -> None:
    """Counts the bytes of copies that have landed."""
    for _, _, barrier in targets:
        barrier.in_flight -= count
        barrier.complete(size * count)


def pend(warp: "Warp", land: Callable[[], None], what: str) -> None:
    """Leaves it to the schedule when something lands that a warp has started."""
    text = f"{what} started by {warp.name}, line {warp.line}"
    warp.machine.pending.append(AsyncOperation(land, text, warp.block))


def start_tensor_load(
    warp: "Warp",
    where: Destination,
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    count: int,
    *,
    pair: bool = False,
) -> None:
    """Starts ``count`` equal tiled copies from global to shared memory.

    Raises:
      Misaligned, OutOfBounds, BarrierFault, DataRace: what the copy needs and does not have.
    """
    if len(coordinates) != tensor_map.rank:
        raise OutOfBounds(f"{len(coordinates)} coordinates for a map of rank {tensor_map.rank}")
    size = tensor_map.box_bytes
    targets = find_targets(warp, where, size, pair=pair)
    chunks = [shared_chunks(target.offset, tensor_map) for target in targets]
    begin_writes(warp, targets, size, count)
    machine = warp.machine
    fill = 0xFF if tensor_map.fill_nan else 0

    def land() -> None:
        rows = box_rows(tensor_map, coordinates, machine.memory)
        data = load_box(rows, fill).reshape(-1).view(_CHUNK)
        for target, index in zip(targets, chunks, strict=True):
            target.block.shared.bytes.view(_CHUNK)[index] = data
            target.block.shared.written[target.offset : target.offset + size] = 1
        machine.statistics.traffic["global read by bulk copies"] += size * count
        machine.statistics.traffic["shared write by bulk copies"] += size * count * len(targets)
        finish_writes(targets, size, count)

    pend(warp, land, f"tensor copy of {size} bytes at {coordinates}")


def _check_flat(size: int, *addresses: int) -> None:
    if size % 16 or any(address % 16 for address in addresses):
        raise Misaligned(
            f"bulk copy of {size} bytes at {[hex(address) for address in addresses]}: all must be "
            "multiples of 16"
        )


def _global_range(warp: "Warp", address: int, size: int) -> tuple[Memory, int]:
    what = "bulk copy"
    memory, offsets, _ = warp.machine.memory.locate(np.array([address], np.uint64), what)[0]
    offset = int(offsets[0])
    if offset + size > memory.size:
        raise OutOfBounds(f"{what} of {size} bytes at offset {offset} of {memory.name}")
    return memory, offset


def _read_range(memory: Memory, offset: int, size: int) -> np.ndarray:
    if not memory.written[offset : offset + size].all():
        raise UninitialisedRead(f"bulk copy reads {memory.name} at [{offset}, {offset + size})")
    return memory.bytes[offset : offset + size].copy()


def start_flat_load(warp: "Warp", where: Destination, source: int, size: int, count: int) -> None:
    """Starts ``count`` equal copies of contiguous bytes from global to shared memory."""
    _check_flat(size, source, where.address)
    targets = find_targets(warp, where, size)
    memory, offset = _global_range(warp, source, size)
    begin_writes(warp, targets, size, count)
    machine = warp.machine

    def land() -> None:
        data = _read_range(memory, offset, size)
        for block, start, _ in targets:
            block.shared.bytes[start : start + size] = data
            block.shared.written[start : start + size] = 1
        machine.statistics.traffic["global read by bulk copies"] += size * count
        machine.statistics.traffic["shared write by bulk copies"] += size * count * len(targets)
        finish_writes(targets, size, count)

    pend(warp, land, f"bulk copy of {size} bytes")


def start_shared_copy(warp: "Warp", where: Destination, source: int, size: int, count: int) -> None:
    """Starts copies from this block's shared memory to another block's.

    The source may be overwritten once the destination's mbarrier has completed its phase.
    """
    _check_flat(size, source, where.address)
    targets = find_targets(warp, where, size)
    block, offset = warp.block, source & _OFFSET_BITS
    barrier = targets[0].barrier
    words = slice(offset >> 2, offset + size >> 2)
    block.on_async_read(warp, words, barrier.agent, barrier.phase + 1)
    begin_writes(warp, targets, size, count)
    machine = warp.machine

    def land() -> None:
        data = _read_range(block.shared, offset, size)
        for target, start, _ in targets:
            target.shared.bytes[start : start + size] = data
            target.shared.written[start : start + size] = 1
        machine.statistics.traffic["shared to shared by bulk copies"] += size * count
        finish_writes(targets, size, count)

    pend(warp, land, f"bulk copy of {size} bytes between blocks")


def _start_store(
    warp: "Warp",
    offset: int,
    size: int,
    read: Callable[[], np.ndarray],
    write: Callable[[np.ndarray], None],
    what: str,
) -> None:
    """Starts a copy out of shared memory: it reads at one moment, and writes at a later one."""
    block, machine = warp.block, warp.machine
    if offset < SHARED_BASE or offset + size > block.shared.size:
        raise OutOfBounds(f"{what} from offset {offset} of {block.shared.name}")
    operation = BulkOperation()
    group = block.bulk_groups.add(warp, operation)
    if warp.clock is not None:
        words = slice(offset >> 2, offset + size >> 2)
        block.on_async_read(warp, words, warp.clock.agent(BULK_READ), group)
    text = f"{what} started by {warp.name}, line {warp.line}"

    def land_read() -> None:
        data = read()
        operation.read_done = True
        machine.statistics.traffic["shared read by bulk copies"] += size

        def land_write() -> None:
            write(data)
            operation.done = True
            machine.statistics.traffic["global write by bulk copies"] += size

        # From here on the block's shared memory is no longer needed.
        machine.pending.append(AsyncOperation(land_write, text, None))

    pend(warp, land_read, what)


def start_tensor_store(
    warp: "Warp",
    source: int,
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    operation: str,
    count: int,
) -> None:
    """Starts a tiled copy or reduction from shared to global memory, ``count`` times the same."""
    offset, size = source & _OFFSET_BITS, tensor_map.box_bytes
    chunks = shared_chunks(offset, tensor_map)
    if count > 1:
        note = f"{count} threads of a warp start the same tensor store (line {warp.line})"
        warp.machine.statistics.notes[note] += 1
    shared, memory = warp.block.shared, warp.machine.memory

    def read() -> np.ndarray:
        _read_range(shared, offset, size)
        return shared.bytes.view(_CHUNK)[chunks].view(np.uint8)

    def write(data: np.ndarray) -> None:
        rows = box_rows(tensor_map, coordinates, memory)
        data = data.reshape(-1, rows.row_bytes)
        for _ in range(count if operation else 1):
            new = data
            if operation:
                new = reduced(load_box(rows, 0), data, operation, tensor_map.dtype)
            store_box(rows, new)

    what = f"tensor {'reduction' if operation else 'copy'} of {size} bytes to {coordinates}"
    _start_store(warp, offset, size, read, write, what)


def start_flat_store(
    warp: "Warp",
    target: int,
    source: int,
    size: int,
    reduction: tuple[str, str],
    count: int,
) -> None:
    """Starts a copy or reduction ``(operation, element)`` of contiguous bytes to global memory."""
    _check_flat(size, target, source)
    offset, shared = source & _OFFSET_BITS, warp.block.shared
    memory, place = _global_range(warp, target, size)
    operation, element = reduction

    def write(data: np.ndarray) -> None:
        for _ in range(count if operation else 1):
            new = data
            if operation:
                new = reduced(_read_range(memory, place, size), data, operation, element)
            memory.bytes[place : place + size] = new
            memory.written[place : place + size] = 1

    _start_store(
        warp,
        offset,
        size,
        lambda: _read_range(shared, offset, size),
        write,
        f"bulk {'reduction' if operation else 'copy'} of {size} bytes to global memory",
    )
