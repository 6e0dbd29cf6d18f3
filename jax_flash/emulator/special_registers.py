"""Values of special registers, constants and addresses; PTX ISA, "Special Registers"."""

from typing import TYPE_CHECKING

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import LANES

if TYPE_CHECKING:
    from jax_flash.emulator.registers import Fill
    from jax_flash.emulator.warp import Warp

_AXES = "xyz"


def fill_rows(warp: "Warp") -> None:
    """Sets the rows of constants, addresses and special registers."""
    for fill in warp.program.table.fills:
        if fill.special:
            warp.rows["u32"][fill.row][:] = special_value(warp, fill.special)
        elif fill.symbol is not None:
            value = _symbol_value(warp, fill) + fill.symbol.offset
            warp.rows[f"u{fill.file}"][fill.row][:] = value
        elif fill.file == "pred":
            warp.rows["pred"][fill.row][:] = bool(fill.bits)
        else:
            warp.rows[f"u{fill.file}"][fill.row][:] = fill.bits


def _symbol_value(warp: "Warp", fill: "Fill") -> int:
    table, symbol = warp.program.table, fill.symbol
    assert symbol is not None
    if symbol.name in table.shared_symbols:
        return warp.block.shared_address(table.shared_symbols[symbol.name])
    if symbol.name in table.global_symbols:
        return table.global_symbols[symbol.name]
    for parameter in table.entry.parameters:
        if parameter.name == symbol.name:
            return parameter.offset
    raise PtxError(f"unknown name {symbol.name}")


def special_value(warp: "Warp", name: str) -> np.ndarray | int:
    """Returns the value of a special register for each lane."""
    block = warp.block
    lane = np.arange(LANES, dtype=np.uint32)
    stem, _, axis = name[1:].partition(".")
    if axis:
        index = _AXES.index(axis)
        if stem == "tid":
            return thread_index(warp.index * LANES + lane, block.threads)[index]
        return {
            "ntid": block.threads,
            "ctaid": block.index_xyz,
            "nctaid": block.machine.grid,
            "cluster_nctaid": block.machine.cluster_shape,
            "cluster_ctaid": block.cluster_index_xyz,
            "clusterid": block.cluster.index_xyz,
            "nclusterid": block.machine.clusters_xyz,
        }[stem][index]
    masks = {
        "lanemask_eq": np.uint32(1) << lane,
        "lanemask_lt": (np.uint32(1) << lane) - 1,
        "lanemask_le": np.uint32(2) * (np.uint32(1) << lane) - 1,
        "lanemask_ge": ~((np.uint32(1) << lane) - 1),
        "lanemask_gt": ~(np.uint32(2) * (np.uint32(1) << lane) - 1),
    }
    if stem in masks:
        return masks[stem]
    return {
        "laneid": lane,
        "warpid": warp.index,
        "smid": block.index % 2**16,
        "cluster_ctarank": block.rank,
        "cluster_nctarank": len(block.cluster.blocks),
        "dynamic_smem_size": block.machine.dynamic_shared_bytes,
        "total_smem_size": block.shared.size,
    }[stem]


def thread_index(
    linear: np.ndarray, threads: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns x, y and z of threads by linear index, x fastest."""
    x, y, _ = threads
    return linear % x, linear // x % y, linear // (x * y)
