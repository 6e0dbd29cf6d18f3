"""Register fragments of matrices: PTX ISA, "Register Fragments" of mma, wgmma and tcgen05.

In all of them a warp's lane ``4 g + q`` holds rows ``g`` and ``g + 8`` of 16, and columns
``2 q, 2 q + 1`` of each 8 (32-bit accumulators) or of each 8 sixteen-bit inputs.
"""

from typing import Any

import numpy as np


def accumulator_to_rows(registers: np.ndarray) -> np.ndarray:
    """Returns the matrix ``(16, N)`` that ``(N / 2, 32)`` accumulator registers of a warp hold.

    Register ``4 j + 2 i + c`` of lane ``4 g + q`` is row ``g + 8 i``, column ``8 j + 2 q + c``.
    """
    blocks = len(registers) // 4
    parts = registers.reshape(blocks, 2, 2, 8, 4)  # j, i, c, g, q
    return parts.transpose(1, 3, 0, 4, 2).reshape(16, 8 * blocks)


def rows_to_accumulator(rows: np.ndarray) -> np.ndarray:
    """Returns the registers ``(N / 2, 32)`` of a matrix ``(16, N)``."""
    blocks = rows.shape[1] // 8
    parts = rows.reshape(2, 8, blocks, 4, 2)  # i, g, j, q, c
    return parts.transpose(2, 0, 4, 1, 3).reshape(4 * blocks, 32)


def operand_a_to_rows(registers: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the matrix ``(16, K)`` of inputs that 2 or 4 registers ``(n, 32)`` of a warp hold.

    Register ``2 h + i`` of lane ``4 g + q`` is row ``g + 8 i``, columns ``4 e h + e q ...`` of
    ``e = 4 / size`` elements each.
    """
    each, halves = 4 // np.dtype(dtype).itemsize, len(registers) // 2
    elements = np.ascontiguousarray(registers).view(dtype)
    elements = elements.reshape(halves, 2, 8, 4, each)  # h i g q e
    return elements.transpose(1, 2, 0, 3, 4).reshape(16, 4 * each * halves)
