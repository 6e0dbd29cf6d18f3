"""Loads and stores of warps: state spaces, bounds, alignment, initialisation, races, statistics."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jax_flash.emulator.address_space import PARAMETER_WINDOW, SHARED_WINDOW
from jax_flash.emulator.errors import OutOfBounds

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block
    from jax_flash.emulator.warp import Warp

BANKS = 32
_SHARED = ("shared", "shared::cta", "shared::cluster")


def lane_addresses(warp: "Warp", view: str, row: int, offset: int, lanes: Any) -> np.ndarray:
    """Returns the addresses of the active lanes, an offset added."""
    addresses = warp.rows[view][row]
    if lanes is not True:
        addresses = addresses[lanes]
    return addresses + addresses.dtype.type(offset % (1 << 8 * addresses.dtype.itemsize))


def resolve_generic(addresses: np.ndarray, what: str) -> tuple[str, np.ndarray]:
    """Returns the space of generic addresses and the addresses in it; all lanes must agree."""
    windows = addresses >> np.uint64(60)
    if (windows != windows[0]).any():
        raise OutOfBounds(f"{what}: generic addresses of several state spaces in one access")
    window = int(windows[0]) << 60
    if window == SHARED_WINDOW:
        return "shared::cluster", (addresses - np.uint64(SHARED_WINDOW)).astype(np.uint32)
    if window == PARAMETER_WINDOW:
        return "param", addresses - np.uint64(PARAMETER_WINDOW)
    return "global", addresses


def read_lanes(
    warp: "Warp", space: str, addresses: np.ndarray, element: int, count: int
) -> np.ndarray:
    """Reads ``count`` elements of ``element`` bytes for each address.

    Returns:
      Unsigned integers ``(count, lanes)``.
    """
    what = f"load from {space} memory"
    if space == "generic":
        space, addresses = resolve_generic(addresses, what)
    width = element * count
    traffic = warp.machine.statistics.traffic
    if space in _SHARED:
        block, offsets = warp.block.locate_shared(addresses, what)
        block.shared.check(offsets, width, what)
        traffic["shared read by warps"] += width * len(offsets)
        note_shared_read(warp, block, offsets, width)
        return block.shared.read(offsets, element, count)
    if space == "param":
        offsets = addresses.astype(np.int64)
        warp.machine.parameter_memory.check(offsets, width, what)
        return warp.machine.parameter_memory.read(offsets, element, count)
    traffic["global read by warps"] += width * len(addresses)
    result = np.empty((count, len(addresses)), f"u{element}")
    for memory, offsets, which in warp.machine.memory.locate(addresses, what):
        memory.check(offsets, width, what)
        result[:, which] = memory.read(offsets, element, count)
    return result


def write_lanes(
    warp: "Warp", space: str, addresses: np.ndarray, values: np.ndarray, element: int
) -> None:
    """Writes ``(count, lanes)`` unsigned integers of ``element`` bytes, one column an address."""
    what = f"store to {space} memory"
    if space == "generic":
        space, addresses = resolve_generic(addresses, what)
    width = element * len(values)
    machine = warp.machine
    machine.events += 1
    if space in _SHARED:
        block, offsets = warp.block.locate_shared(addresses, what)
        block.shared.check(offsets, width, what)
        machine.statistics.traffic["shared write by warps"] += width * len(offsets)
        note_shared_write(warp, block, offsets, width)
        block.shared.write(offsets, values, element)
        return
    if space != "global":
        raise OutOfBounds(f"{what}: read-only")
    machine.statistics.traffic["global write by warps"] += width * len(addresses)
    for memory, offsets, which in machine.memory.locate(addresses, what):
        memory.check(offsets, width, what)
        memory.write(offsets, values[:, which], element)


def words_of(offsets: np.ndarray, width: int) -> np.ndarray:
    """Returns the indices of the 4-byte words that accesses of ``width`` bytes touch."""
    words = offsets >> 2
    if width <= 4:
        return words
    return (words + np.arange(width // 4)[:, None]).ravel()


def note_shared_read(warp: "Warp", block: "Block", offsets: np.ndarray, width: int) -> None:
    """Checks a generic read of shared memory for races, and counts its bank conflicts."""
    clock = warp.clock
    if block.shadow is not None and clock is not None:
        block.shadow.read(words_of(offsets, width), clock, clock.me, clock.now)
    if warp.machine.checks.bank_conflicts:
        count_passes(warp, offsets, width)


def note_shared_write(warp: "Warp", block: "Block", offsets: np.ndarray, width: int) -> None:
    """Checks a generic write of shared memory for races, and counts its bank conflicts."""
    clock = warp.clock
    if block.shadow is not None and clock is not None:
        block.shadow.write(words_of(offsets, width), clock, clock.me, clock.now, warp.line)
    if warp.machine.checks.bank_conflicts:
        count_passes(warp, offsets, width)


def count_passes(warp: "Warp", offsets: np.ndarray, width: int) -> None:
    """Counts how many passes the banks need for one access: 32 banks of 4 bytes a pass.

    Accesses of 8 and 16 bytes are served for 16 and 8 lanes at a time; lanes that read the same
    word share it. This is the usual model of the hardware, not a documented one.
    """
    lanes_at_once = max(1, 128 // max(width, 4))
    passes = 0
    for start in range(0, len(offsets), lanes_at_once):
        words = np.unique(words_of(offsets[start : start + lanes_at_once], width))
        passes += int(np.bincount(words % BANKS).max())
    ideal = -(-len(offsets) // lanes_at_once)
    statistics = warp.machine.statistics.shared_passes
    statistics["ideal passes"] += ideal
    statistics["passes"] += passes
