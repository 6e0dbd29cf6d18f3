"""Operands that TMA moves: copy atom, global coordinates and shared-memory tensor in one record.

Every operand is a row-major ``(B, L, H, C)`` array. Its tensor map has dimensions
``(C, L, H, B)`` (``spec.kernel_args.TensorMapArgument``), so that rows past ``L`` read as zero and
are never written, for each batch element and head separately.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from jax_flash.kernels.sm90 import wgmma

MAX_EXTENT = 1 << 30
"""Nominal extent of run-time axes of a coordinate tensor: coordinates need no true extents."""


def tma_atom(
    pointer: cute.Pointer,
    operation,
    rows: int,
    columns: int,
    length_and_heads: tuple[Int32, Int32],
) -> cute.CopyAtom:
    """Returns the copy atom of ``(rows, columns)`` tiles; host side.

    Args:
      pointer: the operand.
      operation: TMA load, store or reduce.
      rows: rows of a tile, along ``L``.
      columns: ``C``, all copied.
      length_and_heads: ``(L, H)``. The batch is taken as 1: the launcher encodes the tensor map
        that the kernel uses, and only the shape of the box reaches the compiled code.
    """
    length, heads = length_and_heads
    tensor = cute.make_tensor(
        pointer,
        cute.make_layout(
            (length, columns, heads, 1),
            stride=(heads * columns, 1, columns, length * heads * columns),
        ),
    )
    layout = wgmma.shared_layout(pointer.dtype, rows, columns, 1)
    atom, _ = cpasync.make_tiled_tma_atom(
        operation, tensor, cute.select(layout, mode=[0, 1]), (rows, columns)
    )
    return atom


class TmaOperand:
    """An operand inside a kernel; tiles are ``rows`` long."""

    def __init__(self, atom: cute.CopyAtom, shared: cute.Tensor) -> None:
        """Binds the copy atom to its shared-memory tensor ``(rows, columns, stages)``."""
        self.atom = atom
        self.shared = shared
        self.rows = cute.size(shared, mode=[0])
        self.columns = cute.size(shared, mode=[1])

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile, as TMA counts them on the barrier."""
        return self.rows * self.columns * self.shared.element_type.width // 8

    def _partition(self, stage: Int32, tile: Int32, head: Int32, batch: Int32):
        extents = (self.columns, MAX_EXTENT, MAX_EXTENT, MAX_EXTENT)
        identity = cute.make_identity_tensor(extents)
        coordinates = cute.make_tensor(
            identity.iterator, cute.select(identity.layout, mode=[1, 0, 2, 3])
        )
        tiles = cute.local_tile(
            coordinates[None, None, head, batch], (self.rows, self.columns), (tile, 0)
        )
        return cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared[None, None, stage], 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    def load(
        self, stage: Int32, tile: Int32, head: Int32, batch: Int32, barrier: cute.Pointer
    ) -> None:
        """Issues the load of a tile into ``stage``; one warp calls it, ``barrier`` counts bytes."""
        shared, coordinates = self._partition(stage, tile, head, batch)
        cute.copy(self.atom, coordinates, shared, tma_bar_ptr=barrier)

    def store(self, stage: Int32, tile: Int32, head: Int32, batch: Int32) -> None:
        """Issues the store of ``stage`` to a tile and commits it; one warp calls it."""
        shared, coordinates = self._partition(stage, tile, head, batch)
        cute.copy(self.atom, shared, coordinates)
        cute.arch.cp_async_bulk_commit_group()
