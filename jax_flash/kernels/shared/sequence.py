"""Facts of one batch element's sequences: lengths and the band's position.

All are optional operands of a call: an array of one value for each batch element, or a null
pointer, and then every sequence has the operands' own length and starts at key 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_flash.kernels.shared.tile_ranges import BandValues
from jax_flash.spec.band_mask import BandMask


class SequenceArrays(NamedTuple):
    """Where the facts come from: pointers to one value a batch element, or null."""

    query_offset: cute.Pointer
    query_lengths: cute.Pointer
    key_lengths: cute.Pointer


class SequenceDefaults(NamedTuple):
    """What holds without the arrays."""

    mask: BandMask
    lower: Int32
    upper: Int32
    query_length: Int32
    key_length: Int32
    ragged: bool
    """Whether the kernel supports lengths."""
    rows_per_query: Int32 | None = None
    """As in ``BandValues``."""


@cute.jit
def value_or(pointer: cute.Pointer, index: Int32, default):
    """Returns ``pointer[index]``, or ``default`` where the pointer is null."""
    value = default
    if pointer.toint() != Int64(0):
        value = cute.make_tensor(pointer + index, cute.make_layout(1))[0]
    return value


@cute.jit
def clipped_length(pointer: cute.Pointer, batch: Int32, length: Int32):
    """Returns the batch element's length, between 0 and the operand's own."""
    return cutlass.max(cutlass.min(value_or(pointer, batch, length), length), 0)


@cute.jit
def band_of_batch(arrays: cutlass.Constexpr, defaults: cutlass.Constexpr, batch: Int32):
    """Returns the band over the sequences of one batch element."""
    lower, upper = defaults.lower, defaults.upper
    if cutlass.const_expr(defaults.mask.lower or defaults.mask.upper):
        offset = value_or(arrays.query_offset, batch, Int32(0))
        lower += offset
        upper += offset
    query_length, key_length = defaults.query_length, defaults.key_length
    if cutlass.const_expr(defaults.ragged):
        query_length = clipped_length(arrays.query_lengths, batch, query_length)
        key_length = clipped_length(arrays.key_lengths, batch, key_length)
    return BandValues(
        defaults.mask,
        lower,
        upper,
        query_length,
        key_length,
        defaults.ragged,
        defaults.rows_per_query,
    )
