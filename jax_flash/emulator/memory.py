"""Byte-addressed storage with a map of what has been written, and global memory made of it."""

from typing import Any

import numpy as np

from jax_flash.emulator.errors import Misaligned, OutOfBounds, UninitialisedRead

_POISON = 0xFF
"""Content of memory that was never written: NaN as any float, -1 as any integer."""


class Memory:
    """A contiguous range of bytes."""

    def __init__(self, size: int, name: str) -> None:
        """Allocates ``size`` poisoned bytes."""
        padded = -(-size // 16) * 16
        self.size = size
        self.name = name
        self.bytes = np.full(padded, _POISON, np.uint8)
        self.written = np.zeros(padded, np.uint8)
        self.views = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.written_views = {width: self.written.view(f"u{width}") for width in (1, 2, 4, 8)}

    def fill(self, data: bytes | np.ndarray) -> None:
        """Sets the whole content."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.view(np.uint8)
        self.bytes[: self.size] = raw.reshape(-1)[: self.size]
        self.written[: self.size] = 1

    def check(self, offsets: np.ndarray, width: int, what: str) -> None:
        """Checks that every access of ``width`` bytes lies inside and is aligned to its width."""
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + width > self.size:
            bad = low if low < 0 else high
            raise OutOfBounds(
                f"{what} of {width} bytes at offset {bad} of {self.name}, which has {self.size}"
            )
        if (offsets % width).any():
            bad = int(offsets[offsets % width != 0][0])
            raise Misaligned(
                f"{what} of {width} bytes at offset {bad} of {self.name}: must be a multiple of "
                f"{width}"
            )

    def read(self, offsets: np.ndarray, element: int, count: int) -> np.ndarray:
        """Returns ``(count, lanes)`` unsigned integers of ``element`` bytes, checked beforehand."""
        index = offsets // element
        if count > 1:
            index = index + np.arange(count)[:, None]
        if self.written_views[element][index].min() < ALL_WRITTEN[element]:
            missing = self.written_views[element][index] != ALL_WRITTEN[element]
            where = int(np.broadcast_to(index, missing.shape)[missing][0]) * element
            raise UninitialisedRead(f"read of {self.name} at offset {where}, never written")
        return self.views[element][index].reshape(count, -1)

    def write(self, offsets: np.ndarray, values: np.ndarray, element: int) -> None:
        """Writes ``(count, lanes)`` unsigned integers of ``element`` bytes."""
        index = offsets // element
        if len(values) > 1:
            index = index + np.arange(len(values))[:, None]
            self.views[element][index] = values
        else:
            self.views[element][index] = values[0]
        self.written_views[element][index] = ALL_WRITTEN[element]


ALL_WRITTEN = {width: int.from_bytes(b"\1" * width, "little") for width in (1, 2, 4, 8)}
"""What the map of written bytes holds for a written element, by its width."""

_ALLOCATION_BITS = 36
"""Each allocation starts at a multiple of 64 GiB, so that no overrun reaches the next one."""


class GlobalMemory:
    """Allocations in the device's address space."""

    def __init__(self) -> None:
        """Starts empty."""
        self.allocations: list[Memory] = []

    def allocate(self, size: int, name: str, data: bytes | np.ndarray | None = None) -> int:
        """Allocates ``size`` bytes, with ``data`` or uninitialised; returns the address."""
        memory = Memory(size, name)
        if data is not None:
            memory.fill(data)
        self.allocations.append(memory)
        return len(self.allocations) << _ALLOCATION_BITS

    def memory_at(self, address: int) -> Memory:
        """Returns the allocation that starts at an address."""
        return self.allocations[(address >> _ALLOCATION_BITS) - 1]

    def locate(self, addresses: np.ndarray, what: str) -> list[tuple[Memory, np.ndarray, Any]]:
        """Splits ``uint64`` addresses by allocation.

        Returns:
          ``(memory, byte offsets, which)`` for each allocation met; ``which`` selects the
          addresses (all of them where there is one allocation).
        """
        numbers = (addresses >> np.uint64(_ALLOCATION_BITS)).astype(np.int64)
        offsets = (addresses & np.uint64((1 << _ALLOCATION_BITS) - 1)).astype(np.int64)
        first = int(numbers[0])
        if (numbers == first).all():
            return [(self._allocation(first, int(addresses[0]), what), offsets, slice(None))]
        parts = []
        for number in np.unique(numbers):
            which = numbers == number
            memory = self._allocation(int(number), int(addresses[which][0]), what)
            parts.append((memory, offsets[which], which))
        return parts

    def _allocation(self, number: int, address: int, what: str) -> Memory:
        if not 1 <= number <= len(self.allocations):
            raise OutOfBounds(f"{what} at address {address:#x}, which belongs to no buffer")
        return self.allocations[number - 1]
