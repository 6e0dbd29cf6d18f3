"""Keeps the compiler from computing ahead of a loop what few of its steps need."""

import cutlass.cute as cute
from cutlass import Int32


def here(value: Int32) -> Int32:
    """Returns its argument as if just computed.

    What only a bias, a mask or a tile of several segments needs is then computed where it is
    needed, not ahead of the loop over tiles, where it would take registers from all of them.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
