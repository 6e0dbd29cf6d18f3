"""Clears rows of a tile in shared memory that lie past a sequence's end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.shared.segments import id_at

_VECTOR = 8  # two-byte elements of a 16-byte store


@cute.jit
def clear_rows(tile: cute.Tensor, first: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Zeroes rows ``first`` and on of ``(rows, columns)``; ``threads`` threads share the work.

    The caller must fence the async proxy and synchronise before a matmul reads the tile.
    """
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vectors_of_row = columns // _VECTOR
    first = cutlass.max(first, 0)
    vectors = cute.logical_divide(tile, (None, cute.make_layout(_VECTOR)))
    zeros = cute.make_rmem_tensor(cute.make_layout(_VECTOR), tile.element_type)
    zeros.fill(0.0)
    remaining = (rows - first) * vectors_of_row
    steps = (remaining - thread + threads - 1) // threads
    for step in cutlass.range(steps, unroll=1):
        index = step * threads + thread
        row = index // vectors_of_row
        target = vectors[first + row, (None, index - row * vectors_of_row)]
        cute.autovec_copy(zeros, target)


@cute.jit
def clear_padded_rows(
    tile: cute.Tensor,
    ids: cutlass.Constexpr,
    first: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Zeroes the rows whose segment id is negative; row 0 is at position ``first``.

    See ``clear_rows``.
    """
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vectors_of_row = columns // _VECTOR
    vectors = cute.logical_divide(tile, (None, cute.make_layout(_VECTOR)))
    zeros = cute.make_rmem_tensor(cute.make_layout(_VECTOR), tile.element_type)
    zeros.fill(0.0)
    steps = (rows * vectors_of_row - thread + threads - 1) // threads
    for step in cutlass.range(steps, unroll=1):
        index = step * threads + thread
        row = index // vectors_of_row
        if id_at(ids, first + row) < 0:
            target = vectors[row, (None, index - row * vectors_of_row)]
            cute.autovec_copy(zeros, target)
