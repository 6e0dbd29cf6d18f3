"""Division of indices, which are never negative."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def divide(dividend: Int32, divisor: Int32) -> Int32:
    """Returns the quotient of two non-negative integers.

    Taken as unsigned they need half the instructions of a signed floor division, and a block
    divides several times before it can load its first tile.
    """
    return Int32(Uint32(dividend) // Uint32(divisor))
