"""Swizzles of shared memory: PTX ISA, "Swizzling modes".

A swizzle exchanges the 16-byte chunks inside a row of 32, 64 or 128 bytes: the chunk number is
xor-ed with the row number modulo 2, 4 or 8. It acts on the address itself (rows are 128 bytes
apart in the address, whatever the swizzle's width).
"""

import numpy as np

_MASKS = {0: 0, 32: 1, 64: 3, 128: 7}


def swizzle_addresses(addresses: np.ndarray, swizzle_bytes: int) -> np.ndarray:
    """Returns the byte addresses that linear addresses are moved to."""
    mask = _MASKS[swizzle_bytes]
    return addresses ^ (((addresses >> 7) & mask) << 4)
