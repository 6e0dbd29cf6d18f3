"""Tensor maps: an encoding of our own in the 128 bytes of a ``CUtensorMap``, and tiled copies.

The driver's encoding is opaque, and only the driver's ``cuTensorMapEncodeTiled`` and the hardware
know it. What the copies mean is in the PTX ISA, "Tensors", and in the driver API's description of
``cuTensorMapEncodeTiled``.
"""

import struct
from dataclasses import dataclass

import numpy as np

from jax_flash.emulator.errors import Misaligned, OutOfBounds, PtxError, UninitialisedRead
from jax_flash.emulator.memory import GlobalMemory, Memory
from jax_flash.emulator.swizzle import swizzle_addresses

TENSOR_MAP_BYTES = 128
MAX_RANK = 5
_MAGIC = 0x4A464D31
_LAYOUT = struct.Struct("<IBBBBQ5I4Q5H5B")
_CHUNK = 16

ELEMENT_BYTES = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "s32": 4,
    "u64": 8,
    "s64": 8,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "bf16": 2,
}
"""Element types by name, and their sizes."""

_NAMES = tuple(ELEMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A tiled tensor map; dimension 0 is the contiguous one."""

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between elements of dimensions 1 and up."""
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    """0 (none), 32, 64 or 128."""
    element_strides: tuple[int, ...] = ()
    fill_nan: bool = False

    def __post_init__(self) -> None:
        """Checks what ``cuTensorMapEncodeTiled`` requires."""
        rank, size = len(self.extents), self.element_bytes
        if not 1 <= rank <= MAX_RANK or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(f"tensor map of rank {rank} with {self.strides} and {self.box}")
        if self.address % 16 or any(stride % 16 for stride in self.strides):
            raise Misaligned(
                f"tensor map: address {self.address:#x} and strides {self.strides} must be "
                "multiples of 16"
            )
        if any(not 1 <= n <= 1 << 32 for n in self.extents):
            raise ValueError(f"tensor map extents {self.extents}: must be in [1, 2^32]")
        if any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(f"tensor map box {self.box}: must be in [1, 256]")
        if self.swizzle_bytes not in (0, 32, 64, 128):
            raise ValueError(f"tensor map swizzle of {self.swizzle_bytes} bytes")
        row = self.box[0] * size
        if row % 16 or (self.swizzle_bytes and row > self.swizzle_bytes):
            raise ValueError(
                f"tensor map box rows of {row} bytes: must be a multiple of 16 and at most the "
                f"swizzle of {self.swizzle_bytes}"
            )

    @property
    def element_bytes(self) -> int:
        """Size of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.extents)

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory; out-of-bounds elements count too."""
        return int(np.prod(self.box)) * self.element_bytes

    def encode(self) -> bytes:
        """Returns 128 bytes that :func:`decode` understands."""
        rank = self.rank
        one = (1,) * MAX_RANK
        packed = _LAYOUT.pack(
            _MAGIC,
            rank,
            _NAMES.index(self.dtype),
            self.swizzle_bytes,
            int(self.fill_nan),
            self.address,
            *(n - 1 for n in (*self.extents, *one)[:MAX_RANK]),
            *(*self.strides, 0, 0, 0, 0)[: MAX_RANK - 1],
            *(*self.box, *one)[:MAX_RANK],
            *(*(self.element_strides or one), *one)[:MAX_RANK],
        )
        return packed.ljust(TENSOR_MAP_BYTES, b"\0")

    def steps(self) -> tuple[int, ...]:
        """Returns the element strides."""
        return self.element_strides or (1,) * self.rank


def decode(data: bytes) -> TensorMap:
    """Reads what :meth:`TensorMap.encode` wrote.

    Raises:
      PtxError: the bytes are no tensor map of this emulator.
    """
    magic, rank, dtype, swizzle, nan, address, *rest = _LAYOUT.unpack(data[: _LAYOUT.size])
    if magic != _MAGIC:
        raise PtxError("a tensor copy uses 128 bytes that are no tensor map")
    return TensorMap(
        address=address,
        dtype=_NAMES[dtype],
        extents=tuple(n + 1 for n in rest[:rank]),
        strides=tuple(rest[MAX_RANK : MAX_RANK + rank - 1]),
        box=tuple(rest[9 : 9 + rank]),
        swizzle_bytes=swizzle,
        element_strides=tuple(rest[14 : 14 + rank]),
        fill_nan=bool(nan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRows:
    """Rows of one box: where each lies in global memory, and which part of it exists."""

    memory: Memory
    offsets: np.ndarray
    """Byte offset of each row's first element in ``memory``; may lie outside."""
    inside: np.ndarray
    """Whether the row's outer coordinates are in bounds."""
    first: int
    last: int
    """In-bounds columns are ``[first, last)``, in bytes from the row's start."""
    row_bytes: int


def box_rows(tensor_map: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory) -> BoxRows:
    """Returns the rows of the box at signed element coordinates.

    Raises:
      PtxError: element strides other than 1.
      OutOfBounds: in-bounds elements of the tensor lie outside its allocation.
    """
    if any(step != 1 for step in tensor_map.steps()):
        raise PtxError("tensor maps with element strides are not implemented")
    size = tensor_map.element_bytes
    allocation = memory.memory_at(tensor_map.address)
    base = tensor_map.address - (memory.allocations.index(allocation) + 1 << 36)
    offsets, inside = np.array([base + coordinates[0] * size]), np.array([True])
    for axis in range(1, tensor_map.rank):
        position = coordinates[axis] + np.arange(tensor_map.box[axis])
        stride = tensor_map.strides[axis - 1]
        offsets = (offsets[None, :] + (position * stride)[:, None]).ravel()
        valid = (position >= 0) & (position < tensor_map.extents[axis])
        inside = (inside[None, :] & valid[:, None]).ravel()
    first = max(0, -coordinates[0]) * size
    last = max(0, min(tensor_map.box[0], tensor_map.extents[0] - coordinates[0])) * size
    first = min(first, last)
    rows = BoxRows(
        memory=allocation,
        offsets=offsets,
        inside=inside & (last > first),
        first=first,
        last=last,
        row_bytes=tensor_map.box[0] * size,
    )
    used = offsets[rows.inside]
    if used.size and (used.min() + first < 0 or used.max() + last > allocation.size):
        raise OutOfBounds(f"box at {coordinates} of a tensor map reaches outside {allocation.name}")
    return rows


def load_box(rows: BoxRows, fill: int) -> np.ndarray:
    """Reads a box; returns bytes ``(rows, row bytes)`` with ``fill`` where out of bounds."""
    data = np.full((len(rows.offsets), rows.row_bytes), fill, np.uint8)
    columns = np.arange(rows.first, rows.last)
    where = rows.offsets[rows.inside][:, None] + columns
    if where.size and not rows.memory.written[where].all():
        missing = int(where[rows.memory.written[where] == 0][0])
        raise UninitialisedRead(f"tensor copy reads {rows.memory.name} at byte {missing}")
    data[np.ix_(rows.inside, columns)] = rows.memory.bytes[where]
    return data


def store_box(rows: BoxRows, data: np.ndarray) -> None:
    """Writes the in-bounds part of a box of bytes ``(rows, row bytes)``."""
    columns = np.arange(rows.first, rows.last)
    where = rows.offsets[rows.inside][:, None] + columns
    rows.memory.bytes[where] = data[np.ix_(rows.inside, columns)]
    rows.memory.written[where] = 1


def shared_chunks(start: int, tensor_map: TensorMap) -> np.ndarray:
    """Returns the index of each 16-byte chunk of a box in shared memory, in box order.

    Raises:
      Misaligned: the box does not start at a multiple of 128 bytes.
    """
    if start % 128:
        raise Misaligned(f"tensor copy at shared offset {start}: must be a multiple of 128")
    row = tensor_map.box[0] * tensor_map.element_bytes
    if tensor_map.swizzle_bytes and row < tensor_map.swizzle_bytes:
        raise PtxError(
            f"box rows of {row} bytes with a swizzle of {tensor_map.swizzle_bytes} are not "
            "implemented"
        )
    linear = start + _CHUNK * np.arange(tensor_map.box_bytes // _CHUNK)
    return swizzle_addresses(linear, tensor_map.swizzle_bytes) // _CHUNK
