"""Dense biases and masks: a number, or whether to attend, for each query and key.

Both are ``[B, N, T, S]`` arrays whose axes may each be 1 where they do not vary. A thread reads the
elements of its own scores, straight from global memory: nothing of the size of T x S is ever made.
Absent ones are null pointers.

Scores are ``q . k``, before the scale (see ``soft_cap``), so a bias is divided by the scale.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, Uint64

from jax_flash.kernels.shared.hoisting import here
from jax_flash.kernels.shared.online_softmax import NEGATIVE_INFINITY

_LOWEST_SCORE = -float(2**100)
"""The score of a bias that is finite, but so low that it would not be when divided by the scale."""


class DenseArray(NamedTuple):
    """One operand: its address or null, and which axes it has (``spec.buffers.dense_axes``)."""

    pointer: cute.Pointer
    axes: Int32


class Dense(NamedTuple):
    """What a kernel knows of both: parameters alone, which take no registers."""

    bias: DenseArray
    mask: DenseArray
    inverse_scale: Float32
    query_heads: Int32
    query_length: Int32
    key_length: Int32


class DenseTile(NamedTuple):
    """The ``(T, S)`` elements of one batch element and head; strides are in bytes.

    All unsigned, so that an address takes one instruction, a 32-bit product added to 64 bits.
    """

    start: Uint64
    query_stride: Uint32
    key_stride: Uint32
    last_query: Int32
    last_key: Int32


@cute.jit
def exponent_limit(dense: cutlass.Constexpr):
    """Returns what the exponents of weights, given the log-sum-exp, are to be limited to.

    They are at most 0. Where a bias of a large magnitude covers a whole row, as of a padded query,
    the log-sum-exp in float32 cannot tell its weights apart; they must not become infinite then, as
    0 * inf would reach the gradients of other rows. Without a bias nothing is limited.
    """
    has_bias = dense.bias.pointer.toint() != Int64(0)
    return Float32(0.0) if has_bias else Float32(float("inf"))


@cute.jit
def has_axis(axes: Int32, axis: cutlass.Constexpr):
    """Whether an operand has a batch (0), head (1), query (2) or key (3) axis."""
    return (axes & Int32(1 << axis)) != 0


@cute.jit
def _tile_of(dense: cutlass.Constexpr, array: cutlass.Constexpr, batch: Int32, head: Int32):
    """Returns the elements of a batch element and a head."""
    element_bytes = array.pointer.dtype.width // 8
    head = here(head)
    heads = dense.query_heads if has_axis(array.axes, 1) else Int32(1)
    queries = dense.query_length if has_axis(array.axes, 2) else Int32(1)
    keys = dense.key_length if has_axis(array.axes, 3) else Int32(1)
    index = (batch if has_axis(array.axes, 0) else Int32(0)) * heads
    index += head if has_axis(array.axes, 1) else Int32(0)
    return DenseTile(
        start=Uint64(array.pointer.toint()) + Uint64(index) * queries * keys * element_bytes,
        query_stride=Uint32(keys * element_bytes if has_axis(array.axes, 2) else Int32(0)),
        key_stride=Uint32(element_bytes if has_axis(array.axes, 3) else Int32(0)),
        last_query=dense.query_length - 1,
        last_key=dense.key_length - 1,
    )


@cute.jit
def _query_offset(tile: cutlass.Constexpr, query: Int32):
    """Returns the bytes from query 0; past the last query, those of the last."""
    return Uint64(Uint32(cutlass.min(query, tile.last_query))) * Uint64(tile.query_stride)


@cute.jit
def _key_offset(tile: cutlass.Constexpr, key: Int32):
    return Uint64(Uint32(cutlass.min(key, tile.last_key))) * Uint64(tile.key_stride)


def _row_starts(tile, scores: cute.Tensor, position, keys_in_rows: bool) -> list:
    """Returns the address of each row of a fragment."""
    offset = _key_offset if keys_in_rows else _query_offset
    first = here(position.first_row)
    rows = range(cute.size(scores, mode=[0]))
    return [tile.start + offset(tile, first + position.row_offset(row)) for row in rows]


def _column_offset(tile, position, column, keys_in_rows: bool) -> Uint64:
    """Returns the distance of a column of a fragment from the start of its row."""
    offset = _query_offset if keys_in_rows else _key_offset
    return offset(tile, position.first_column + position.column_offset(column))


def _load(array: DenseArray, address: Uint64):
    pointer = cute.make_ptr(array.pointer.dtype, address, array.pointer.memspace)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@cute.jit
def apply_dense(
    dense: cutlass.Constexpr,
    batch: Int32,
    head: Int32,
    scores: cute.Tensor,
    position: cutlass.Constexpr,
    keys_in_rows: cutlass.Constexpr,
):
    """Adds the bias to a fragment of scores, and hides what it or the mask hide.

    What other masks hide must be hidden after this: bias and mask may hold anything there.
    """
    if dense.bias.pointer.toint() != Int64(0):
        add_bias(dense, _tile_of(dense, dense.bias, batch, head), scores, position, keys_in_rows)
    if dense.mask.pointer.toint() != Int64(0):
        hide_masked(dense, _tile_of(dense, dense.mask, batch, head), scores, position, keys_in_rows)


@cute.jit
def add_bias(
    dense: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    scores: cute.Tensor,
    position: cutlass.Constexpr,
    keys_in_rows: cutlass.Constexpr,
):
    """Adds the bias; -inf stays -inf, and a finite bias stays above it."""
    starts = _row_starts(tile, scores, position, keys_in_rows)
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        offset = _column_offset(tile, position, column, keys_in_rows)
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            bias = _load(dense.bias, starts[row] + offset)
            score = scores[row, column] + bias * dense.inverse_scale
            score = cute.arch.fmax(score, Float32(_LOWEST_SCORE), nan=True)
            scores[row, column] = NEGATIVE_INFINITY if bias == NEGATIVE_INFINITY else score


@cute.jit
def hide_masked(
    dense: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    scores: cute.Tensor,
    position: cutlass.Constexpr,
    keys_in_rows: cutlass.Constexpr,
):
    """Sets to -inf the scores whose mask is False.

    As in ``segments.hide_other_segments``, one bit a column is collected first, in a loop.
    """
    columns = cute.size(scores, mode=[1])
    assert columns <= Uint32.width, "a row's columns of one thread must fit a word"
    starts = _row_starts(tile, scores, position, keys_in_rows)
    stays = cute.make_rmem_tensor(cute.make_layout(cute.size(scores, mode=[0])), Uint32)
    stays.fill(0)
    for column in cutlass.range(columns, unroll=4):
        offset = _column_offset(tile, position, column, keys_in_rows)
        bit = Uint32(1) << Uint32(column)
        for row in cutlass.range_constexpr(cute.size(stays)):
            is_seen = _load(dense.mask, starts[row] + offset) != Uint8(0)
            stays[row] = stays[row] | (bit if is_seen else Uint32(0))
    for row in cutlass.range_constexpr(cute.size(stays)):
        for column in cutlass.range_constexpr(columns):
            score = scores[row, column]
            is_seen = (stays[row] & Uint32(1 << column)) != Uint32(0)
            scores[row, column] = score if is_seen else NEGATIVE_INFINITY
