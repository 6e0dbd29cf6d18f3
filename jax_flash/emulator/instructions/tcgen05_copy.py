"""Copies from shared to tensor memory: PTX ISA, "TensorCore 5th Generation Family: tcgen05.cp".

They are queued with the matmuls of the warp that issues them, and execute in order with those.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_flash.emulator.clocks import TENSOR
from jax_flash.emulator.errors import PtxError, TensorMemoryFault
from jax_flash.emulator.instructions.tcgen05_mma import one_lane, pair_of_blocks, push
from jax_flash.emulator.instructions.wgmma import read_operand_bits, shared_operand
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.tensor_memory import TENSOR_LANES, split_address

_SECTION = "TensorCore 5th Generation Family Instructions: tcgen05.cp"
_U32, _U64 = ptx_type("u32"), ptx_type("u64")
_WORD_BITS = 32
_QUARTER = TENSOR_LANES // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """What one copy moves."""

    rows: int
    """Rows of the matrix in shared memory, as its descriptor lays them out."""
    words: int
    """32-bit words of a row, each of which goes to one column."""
    row_of_lane: np.ndarray
    """Row that each written lane receives."""
    lanes: np.ndarray
    """Lanes written, from that of the address on."""


def copy_shape(shape: str, multicast: str) -> CopyShape:
    """Returns what ``.shape{.multicast}`` moves.

    Warps stand for the quarters of the lanes: ``.warpx2::02_13`` gives rows 0 to 31 to the first
    and third quarter and rows 32 to 63 to the others, ``.warpx2::01_23`` rows 0 to 31 to the first
    two, ``.warpx4`` the same 32 rows to all. The ISA does not say which lanes ``.4x256b`` fills;
    CUTLASS's layout of it (``Copy_Traits<SM100_UTCCP_4dp256bit_1cta>``) has one in each quarter.

    Raises:
      PtxError: a multicast that the shape does not go with.
    """
    rows, bits = (int(part) for part in shape[:-1].split("x"))
    required = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}
    if multicast not in required.get(shape, ("",)):
        wanted = " or .".join(required[shape]) if shape in required else "no multicast"
        raise PtxError(f"tcgen05.cp.{shape} needs .{wanted}")
    lanes = np.arange(TENSOR_LANES)
    if shape == "4x256b":
        lanes, row_of_lane = _QUARTER * np.arange(4), np.arange(4)
    elif multicast == "warpx2::01_23":
        row_of_lane = lanes % _QUARTER + _QUARTER * (lanes // (2 * _QUARTER))
    else:
        row_of_lane = lanes % rows
    return CopyShape(rows=rows, words=bits // _WORD_BITS, row_of_lane=row_of_lane, lanes=lanes)


@instruction("tcgen05.cp", section=_SECTION, category="tensor memory")
def copy(context: Context) -> Run:
    """``tcgen05.cp.cta_group.shape{.multicast} [taddr], s-desc``: asynchronous.

    With ``cta_group::2`` each block of the pair copies from its own shared memory, at the same
    offsets, to its own tensor memory: CUTLASS's block-scaled matmuls of pairs rely on it.
    """
    pair = context.take("cta_group::1", "cta_group::2") == "cta_group::2"
    shape_name = context.take("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = context.take("warpx2::02_13", "warpx2::01_23", "warpx4", default="")
    packed = [word for word in context.modifiers if word in ("b6x16_p32", "b4x16_p64")]
    if packed:
        raise PtxError(f"decompression from the source format .{packed[0]} is not implemented")
    shape = copy_shape(shape_name, multicast)
    context.expect(2)
    row, offset, _ = context.address(context.operands[0], "32")
    source = context.source(context.operands[1], _U64)

    def run(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes, "tcgen05.cp")
        address = (int(warp.rows["u32"][row][lane]) + offset) % 2**32
        start(warp, shape, address, int(warp.rows["u64"][source][lane]), pair=pair)

    return run


def start(warp: Any, shape: CopyShape, address: int, bits: int, *, pair: bool) -> None:
    """Checks a copy's accesses and puts it into the warp's queue.

    Raises:
      TensorMemoryFault: the lane of the address leaves no room for the shape.
    """
    first_lane, first_column = split_address(address)
    lanes = shape.lanes[:, None] + first_lane
    if int(lanes.max()) >= TENSOR_LANES:
        raise TensorMemoryFault(
            f"tcgen05.cp to lane {first_lane}: the shape reaches lane {int(lanes.max())} of "
            f"{TENSOR_LANES}"
        )
    columns = np.broadcast_to(first_column + np.arange(shape.words), (len(lanes), shape.words))
    lanes = np.broadcast_to(lanes, columns.shape)
    operand = shared_operand(bits, shape.rows, shape.words, 4, k_major=True, tcgen05=True)
    blocks = pair_of_blocks(warp) if pair else (warp.block,)
    if warp.clock is not None:
        agent, time = warp.clock.agent(TENSOR), warp.block.tensor_memory.queue(warp).commits + 1
        for block in blocks:
            block.on_async_read(warp, operand.all_words, agent, time)
            block.tensor_memory.note(warp, lanes, columns, agent, time, writes=True)

    def execute() -> None:
        traffic = warp.machine.statistics.traffic
        for block in blocks:
            words = read_operand_bits(block, operand, 4)
            memory = block.tensor_memory
            memory.write(lanes, columns, words[shape.row_of_lane], "tcgen05.cp")
            traffic["shared read by tensor cores"] += 4 * words.size
            traffic["tensor memory write by tensor cores"] += 4 * columns.size

    push(warp, execute, "tcgen05.cp")
