"""Ordered parameters of every kernel: the contract between kernels, launcher and emulator.

The kernels declare their parameters in this order, the build checks the compiled entry against
it, the manifest carries it, and the C++ launcher and the emulator pack arguments from it. Changing
anything here means raising :data:`ABI_VERSION`.
"""

from dataclasses import dataclass

from jax_flash.spec.buffers import (
    DENSE_FEATURES,
    OPTIONAL_OPERANDS,
    SEGMENT_OPERANDS,
    SEQUENCE_FEATURES,
)
from jax_flash.spec.problem import Feature
from jax_flash.spec.tile import WARPGROUP_ROWS, BackwardTile
from jax_flash.spec.variant import (
    KernelRole,
    KernelVariant,
    backward_bias_tile_of,
    backward_tile_of,
    forward_tile_of,
    fused_backward_tile_of,
    split_backward_tile_of,
)

ABI_VERSION = 1
"""Version of the meaning of a manifest row; the extension refuses any other."""

SWIZZLE_BYTES = 128
"""Shared-memory swizzle of every tensor map: 64 two-byte elements a row segment."""

BOX_COLUMNS = SWIZZLE_BYTES // 2
"""Columns of one tensor-map box; a wider tile is copied as several boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMapArgument:
    """A 128-byte ``CUtensorMap`` by value over a ``[..., length, heads, columns]`` operand.

    Its dimensions are ``(columns, length, heads, batch)`` and its box is
    ``(box_columns, box_rows, 1, 1)``; out-of-bounds elements read as zero.
    """

    operand: str
    dtype: str
    box_columns: int
    box_rows: int
    swizzle_bytes: int = SWIZZLE_BYTES

    def as_row(self) -> tuple[str | int, ...]:
        """The manifest's form."""
        return (
            "tensor_map",
            self.operand,
            self.dtype,
            self.box_columns,
            self.box_rows,
            self.swizzle_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerArgument:
    """The 8-byte address of an operand."""

    operand: str
    dtype: str
    optional: bool = False
    """Whether a call may lack the operand; the address is then 0, and the kernel checks it."""

    def as_row(self) -> tuple[str | int, ...]:
        """The manifest's form."""
        return ("optional_pointer" if self.optional else "pointer", self.operand, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarArgument:
    """A 4-byte scalar: a dimension of the problem or a named attribute of the call."""

    name: str
    dtype: str = "int32"
    """``int32`` or ``float32``."""

    def as_row(self) -> tuple[str | int, ...]:
        """The manifest's form."""
        return (self.dtype, self.name)


KernelArgument = TensorMapArgument | PointerArgument | ScalarArgument

_LENGTHS_AND_HEADS = (
    ScalarArgument(name="query_length"),
    ScalarArgument(name="key_length"),
    ScalarArgument(name="query_heads"),
    ScalarArgument(name="key_heads"),
)

# Always passed, so that every band shares one parameter list; an absent bound's value is unused.
_BAND = (ScalarArgument(name="band_lower"), ScalarArgument(name="band_upper"))

_SCALES = (
    ScalarArgument(name="scale_log2", dtype="float32"),
    ScalarArgument(name="scale", dtype="float32"),
)

_ROW_STATISTICS = (
    PointerArgument(operand="lse_log2", dtype="f32"),
    PointerArgument(operand="delta", dtype="f32"),
)


def _optional(feature: Feature) -> PointerArgument:
    operand = OPTIONAL_OPERANDS[feature]
    dtype = {"int32": "s32", "float32": "f32", "bool": "pred"}[operand.dtype]
    return PointerArgument(operand=operand.name, dtype=dtype, optional=True)


_SEQUENCES = tuple(_optional(feature) for feature in SEQUENCE_FEATURES)

# Null, or 0, but in calls that ragged or general kernels run.
_GENERAL = (
    *(
        PointerArgument(operand=operand.name, dtype="s32", optional=True)
        for operand in SEGMENT_OPERANDS
    ),
    ScalarArgument(name="soft_cap", dtype="float32"),
    *(_optional(feature) for feature in DENSE_FEATURES),
    # Which axes they have (`buffers.dense_axes`), from their shapes; 0 where a call lacks them.
    ScalarArgument(name="bias_axes"),
    ScalarArgument(name="mask_axes"),
    ScalarArgument(name="inverse_scale", dtype="float32"),
)


def _map(operand: str, dtype: str, rows: int) -> TensorMapArgument:
    return TensorMapArgument(operand=operand, dtype=dtype, box_columns=BOX_COLUMNS, box_rows=rows)


def _forward_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    tile = forward_tile_of(variant)
    dtype = variant.dtype.value
    return (
        _map("query", dtype, WARPGROUP_ROWS),
        _map("key", dtype, tile.tile_kv),
        _map("value", dtype, tile.tile_kv),
        _map("output", dtype, WARPGROUP_ROWS),
        PointerArgument(operand="lse", dtype="f32"),
        _optional(Feature.SINKS),
        *_SEQUENCES,
        *_GENERAL,
        ScalarArgument(name="scale_log2", dtype="float32"),
        *_LENGTHS_AND_HEADS,
        *_BAND,
        ScalarArgument(name="batch"),
        # 1, but where query heads are packed (ops.packed_heads).
        ScalarArgument(name="rows_per_query"),
    )


def _row_statistics_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    dtype = variant.dtype.value
    zeroed = (
        PointerArgument(operand="dq_accumulator", dtype="f32"),
        PointerArgument(operand="dq_semaphores", dtype="s32"),
        PointerArgument(operand="tile_counter", dtype="s32"),
    )
    return (
        PointerArgument(operand="output", dtype=dtype),
        PointerArgument(operand="d_output", dtype=dtype),
        PointerArgument(operand="lse", dtype="f32"),
        PointerArgument(operand="d_lse", dtype="f32"),
        *_ROW_STATISTICS,
        ScalarArgument(name="query_length"),
        ScalarArgument(name="query_heads"),
        ScalarArgument(name="value_head_dim"),
        *(zeroed if isinstance(backward_tile_of(variant), BackwardTile) else ()),
    )


def _backward_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    tile = fused_backward_tile_of(variant)
    dtype = variant.dtype.value
    return (
        _map("query", dtype, tile.tile_q),
        _map("key", dtype, WARPGROUP_ROWS),
        _map("value", dtype, WARPGROUP_ROWS),
        _map("d_output", dtype, tile.tile_q),
        _map("d_key", dtype, WARPGROUP_ROWS),
        _map("d_value", dtype, WARPGROUP_ROWS),
        *_ROW_STATISTICS,
        PointerArgument(operand="dq_accumulator", dtype="f32"),
        PointerArgument(operand="dq_semaphores", dtype="s32"),
        PointerArgument(operand="tile_counter", dtype="s32"),
        *_SEQUENCES,
        *_GENERAL,
        *_SCALES,
        *_LENGTHS_AND_HEADS,
        *_BAND,
        ScalarArgument(name="batch"),
    )


def _backward_kv_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    tile = split_backward_tile_of(variant)
    dtype = variant.dtype.value
    return (
        _map("query", dtype, tile.tile_q),
        _map("key", dtype, tile.tile_kv),
        _map("value", dtype, tile.tile_kv),
        _map("d_output", dtype, tile.tile_q),
        _map("d_key", dtype, tile.tile_kv),
        _map("d_value", dtype, tile.tile_kv),
        *_ROW_STATISTICS,
        *_SEQUENCES,
        *_GENERAL,
        *_SCALES,
        *_LENGTHS_AND_HEADS,
        *_BAND,
    )


def _backward_q_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    tile = split_backward_tile_of(variant)
    dtype = variant.dtype.value
    return (
        _map("query", dtype, WARPGROUP_ROWS),
        _map("key", dtype, tile.tile_kv),
        _map("value", dtype, tile.tile_kv),
        _map("d_output", dtype, WARPGROUP_ROWS),
        _map("d_query", dtype, WARPGROUP_ROWS),
        *_ROW_STATISTICS,
        *_SEQUENCES,
        *_GENERAL,
        *_SCALES,
        *_LENGTHS_AND_HEADS,
        *_BAND,
    )


def _finish_dq_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    return (
        PointerArgument(operand="dq_accumulator", dtype="f32"),
        _map("d_query", variant.dtype.value, WARPGROUP_ROWS),
        ScalarArgument(name="scale", dtype="float32"),
        ScalarArgument(name="query_length"),
        ScalarArgument(name="query_heads"),
    )


def _backward_bias_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    tile = backward_bias_tile_of(variant)
    dtype = variant.dtype.value
    return (
        _map("query", dtype, WARPGROUP_ROWS),
        _map("key", dtype, tile.tile_kv),
        _map("value", dtype, tile.tile_kv),
        _map("d_output", dtype, WARPGROUP_ROWS),
        PointerArgument(operand="lse_log2", dtype="f32"),
        PointerArgument(operand="delta", dtype="f32"),
        PointerArgument(operand="d_bias", dtype="f32"),
        *_SEQUENCES,
        *_GENERAL,
        ScalarArgument(name="scale_log2", dtype="float32"),
        *_LENGTHS_AND_HEADS,
        *_BAND,
        ScalarArgument(name="batch"),
        ScalarArgument(name="padded_query_length"),
    )


_ARGUMENTS = {
    KernelRole.FORWARD: _forward_arguments,
    KernelRole.ROW_STATISTICS: _row_statistics_arguments,
    KernelRole.BACKWARD: _backward_arguments,
    KernelRole.FINISH_DQ: _finish_dq_arguments,
    KernelRole.BACKWARD_BIAS: _backward_bias_arguments,
    KernelRole.BACKWARD_KV: _backward_kv_arguments,
    KernelRole.BACKWARD_Q: _backward_q_arguments,
}


def kernel_arguments(variant: KernelVariant) -> tuple[KernelArgument, ...]:
    """Returns the parameters of a kernel, in order."""
    return _ARGUMENTS[variant.role](variant)


def argument_bytes(argument: KernelArgument) -> tuple[int, int]:
    """Returns ``(size, alignment)`` in bytes of one parameter in the kernel's parameter space."""
    if isinstance(argument, TensorMapArgument):
        return 128, 64
    if isinstance(argument, PointerArgument):
        return 8, 8
    return 4, 4
