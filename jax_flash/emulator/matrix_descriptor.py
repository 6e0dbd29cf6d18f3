"""Matrices of tensor-core operands in shared memory.

PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" (wgmma) and "Tcgen05 Shared
Memory Layout": canonical layouts, strides and swizzles, and the 64-bit descriptors of both.
"""

from dataclasses import dataclass

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.swizzle import swizzle_addresses

_WGMMA_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
_CHUNK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDescriptor:
    """A matrix of an operand, as its descriptor says."""

    start: int
    """Byte offset in shared memory."""
    leading_bytes: int
    stride_bytes: int
    swizzle_bytes: int


def decode_descriptor(bits: int, *, tcgen05: bool = False) -> MatrixDescriptor:
    """Decodes a descriptor.

    Raises:
      PtxError: a base offset, an absolute leading dimension, or an unknown swizzle.
    """
    if tcgen05:
        swizzle, table = bits >> 61 & 7, _TCGEN05_SWIZZLES
        if bits >> 46 & 7 != 1:
            raise PtxError(f"tcgen05 matrix descriptor {bits:#x}: bits 46-48 must be 0b001")
        if bits >> 52 & 1:
            raise PtxError("matrix descriptors with an absolute leading dimension")
    else:
        swizzle, table = bits >> 62 & 3, _WGMMA_SWIZZLES
    if bits >> 49 & 7:
        raise PtxError("matrix descriptors with a base offset are not implemented")
    if swizzle not in table:
        raise PtxError(f"matrix descriptor {bits:#x}: swizzle mode {swizzle} is not implemented")
    return MatrixDescriptor(
        start=(bits & 0x3FFF) << 4,
        leading_bytes=(bits >> 16 & 0x3FFF) << 4,
        stride_bytes=(bits >> 32 & 0x3FFF) << 4,
        swizzle_bytes=table[swizzle],
    )


def operand_offsets(
    descriptor: MatrixDescriptor, rows: int, depth: int, element_bytes: int, *, k_major: bool
) -> np.ndarray:
    """Returns the byte offset in shared memory of each element ``(rows, depth)``.

    ``rows`` is M or N, ``depth`` is K. With ``k_major``, elements along K are contiguous.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    leading, stride = descriptor.leading_bytes, descriptor.stride_bytes
    width = descriptor.swizzle_bytes
    per_chunk = _CHUNK // element_bytes
    if k_major and not width:
        linear = (
            row % 8 * _CHUNK
            + row // 8 * stride
            + k % per_chunk * element_bytes
            + k // per_chunk * leading
        )
    elif k_major:
        # Inside one swizzle row the leading stride plays no part; the ISA takes it to be 1.
        linear = row % 8 * width + row // 8 * stride + k * element_bytes
    elif not width:
        linear = (
            row % per_chunk * element_bytes
            + row // per_chunk * stride
            + k % 8 * _CHUNK
            + k // 8 * leading
        )
    else:
        across = width // element_bytes
        linear = (
            row % across * element_bytes + row // across * leading + k % 8 * width + k // 8 * stride
        )
    return swizzle_addresses(descriptor.start + linear, width)
