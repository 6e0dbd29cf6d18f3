"""Warpgroup matmuls (``wgmma``) of one consumer warpgroup, and views of their fragments.

Every consumer warpgroup works alone on 64 rows, so each tiled MMA here is one instruction wide in
M. An accumulator of 64 x N float32 gives each thread the rows ``r`` and ``r + 8`` of its quad and
columns ``2 * (lane % 4) + {0, 1} + 8 * j`` (PTX ISA, "wgmma register fragments").
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from jax_flash.spec.tile import WARPGROUP_ROWS as ROWS

K_MAJOR = OperandMajorMode.K
MN_MAJOR = OperandMajorMode.MN


def make_mma(dtype, n: int, a_major, b_major, *, a_in_registers: bool = False) -> cute.TiledMma:
    """Returns the tiled MMA of one warpgroup: 64 x ``n`` float32 from ``dtype`` operands."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (ROWS, n), source
    )


def shared_layout(dtype, rows: int, columns: int, stages: int):
    """Returns the swizzled row-major layout ``(rows, columns, stages)`` of TMA and wgmma."""
    atom = warpgroup.make_smem_layout_atom(
        hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns), dtype
    )
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def allocate(memory, dtype, rows: int, columns: int, stages: int) -> cute.Tensor:
    """Allocates a shared-memory tensor of that layout, aligned for the swizzle's repeat."""
    layout = shared_layout(dtype, rows, columns, stages)
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def first_columns(tensor: cute.Tensor, columns: int) -> cute.Tensor:
    """Views the first ``columns`` columns, a multiple of 64, of each stage of a tensor."""
    rows, stages = cute.size(tensor, mode=[0]), cute.size(tensor, mode=[2])
    return cute.composition(
        tensor,
        cute.make_layout(
            (rows, columns, stages), stride=(1, rows, rows * cute.size(tensor, mode=[1]))
        ),
    )


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """Swaps the first two modes of a shared-memory tensor without moving data."""
    shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
    order = (1, 0, *range(2, cute.rank(tensor)))
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=order))


def accumulator(mma: cute.TiledMma, n: int) -> cute.Tensor:
    """Returns an uninitialised 64 x ``n`` float32 accumulator in registers."""
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, n)), Float32)


@cute.jit
def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero_first: cutlass.Constexpr,
):
    """Issues ``acc = a @ b`` (``zero_first``) or ``acc += a @ b`` without committing the group."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_first)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """Views an accumulator as ``(2 rows, N / 4 columns)`` of this thread."""
    (pair, rows, groups), m, n = acc.layout.shape
    (pair_stride, row_stride, group_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((rows, m), (pair, groups, n)),
        stride=((row_stride, m_stride), (pair_stride, group_stride, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


def rows_and_columns_from(acc: cute.Tensor, first_group: int, groups: int) -> cute.Tensor:
    """Views some groups of 8 columns of an accumulator as ``(2 rows, 2 * groups columns)``."""
    layout = cute.make_layout((2, (2, groups)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator + 4 * first_group, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """Views a (converted) accumulator as the register A operand of a following matmul.

    Two neighbouring groups of 8 accumulator columns are one K step of 16.
    """
    divided = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    (pair, rows, (two, steps)), m, n = divided.shape
    (pair_stride, row_stride, (two_stride, step_stride)), m_stride, n_stride = divided.stride
    layout = cute.make_layout(
        ((pair, rows, two), m, (steps, n)),
        stride=((pair_stride, row_stride, two_stride), m_stride, (step_stride, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


_STEP_VALUES = 8
"""Values of a thread in one K step of a register operand."""


def converted(acc: cute.Tensor, dtype) -> cute.Tensor:
    """Returns a register copy of ``acc`` rounded to ``dtype``."""
    result = cute.make_rmem_tensor(acc.layout, dtype)
    convert(acc, result)
    return result


def convert(acc: cute.Tensor, result: cute.Tensor) -> None:
    """Rounds ``acc`` into ``result``, a register tensor of the same layout.

    One K step at a time: of a vector whose length is no power of two the compiler would keep
    two-byte values apart, and pack them after the fence that the matmul needs.
    """
    steps = cute.make_layout((_STEP_VALUES, cute.size(acc) // _STEP_VALUES))
    source = cute.make_tensor(acc.iterator, steps)
    target = cute.make_tensor(result.iterator, steps)
    for step in range(cute.size(steps, mode=[1])):
        target[None, step].store(source[None, step].load().to(result.element_type))


@cute.jit
def reduce_quad(value: Float32, operation: cutlass.Constexpr) -> Float32:
    """Combines a value over the four threads that hold one accumulator row."""
    value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return operation(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def store_rows(
    mma: cute.TiledMma, fragment: cute.Tensor, destination: cute.Tensor, thread: cutlass.Int32
):
    """Stores a two-byte fragment, laid out as ``mma``'s accumulator, to shared memory."""
    atom = cute.make_copy_atom(
        warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), fragment.element_type
    )
    tiled = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(tiled, tiled.retile(fragment), tiled.partition_D(destination))


def row_offset(row: int) -> int:
    """Distance of accumulator row ``row`` from a thread's first row."""
    return 8 * row


def column_offset(column: int) -> int:
    """Distance of accumulator column ``column`` from a thread's first column."""
    return 8 * (column // 2) + column % 2


@cute.jit
def first_row_and_column(thread: cutlass.Int32):
    """Returns row and column, within the tile, of the first accumulator element of a thread."""
    lane = thread % 32
    return (thread // 32) * 16 + lane // 4, 2 * (lane % 4)
