"""Builders of every instruction, by family; importing this package registers them."""

from jax_flash.emulator.instructions import (
    atomics,
    barriers,
    bulk_copy,
    convert,
    fences,
    floating,
    integer,
    load_store,
    logic,
    matrix_move,
    mbarriers,
    moves,
    tcgen05_memory,
    tcgen05_mma,
    warp_level,
    wgmma,
)

__all__ = [
    "atomics",
    "barriers",
    "bulk_copy",
    "convert",
    "fences",
    "floating",
    "integer",
    "load_store",
    "logic",
    "matrix_move",
    "mbarriers",
    "moves",
    "tcgen05_memory",
    "tcgen05_mma",
    "warp_level",
    "wgmma",
]
