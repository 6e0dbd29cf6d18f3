"""Operands and results of the operations: names, element types and axes."""

from dataclasses import dataclass

from jax_flash.spec.problem import Feature


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named operand or result of an operation; ``axes`` follow the leading batch dimensions."""

    name: str
    dtype: str
    """``input`` (the dtype of query), ``float32``, ``int32`` or ``bool``."""
    axes: tuple[str, ...]
    """Axis names: ``query_length``, ``key_length``, ``query_heads``, ``key_heads``, ``head_dim``,
    ``value_head_dim``, and of workspaces and records ``padded_query_length``, ``query_tiles``,
    ``key_tiles``, ``tile_q``, ``tile_kv``, ``padded_head_dim``, ``segment_record``."""
    broadcast: bool = False
    """Whether each axis may be 1 where it does not vary, and the leading dimensions likewise, all
    of them together."""
    like: str = ""
    """The operand whose shape a result has, where its axes alone do not say it."""


QUERY_AXES = ("query_length", "query_heads", "head_dim")
KEY_AXES = ("key_length", "key_heads", "head_dim")
VALUE_AXES = ("key_length", "key_heads", "value_head_dim")
OUTPUT_AXES = ("query_length", "query_heads", "value_head_dim")
ROW_AXES = ("query_length", "query_heads")
DENSE_AXES = ("query_heads", "query_length", "key_length")

INPUTS = (
    Buffer(name="query", dtype="input", axes=QUERY_AXES),
    Buffer(name="key", dtype="input", axes=KEY_AXES),
    Buffer(name="value", dtype="input", axes=VALUE_AXES),
)
RESULTS = (
    Buffer(name="output", dtype="input", axes=OUTPUT_AXES),
    Buffer(name="lse", dtype="float32", axes=ROW_AXES),
)
D_OUTPUT = Buffer(name="d_output", dtype="input", axes=OUTPUT_AXES)

_PADDED_ROW_AXES = ("query_heads", "padded_query_length")
ROW_STATISTICS = (
    Buffer(name="lse_log2", dtype="float32", axes=_PADDED_ROW_AXES),
    Buffer(name="delta", dtype="float32", axes=_PADDED_ROW_AXES),
)
"""What backward kernels need of each query row: see ``kernels.shared.row_statistics``."""

# What a call may have or lack, each with the leading dimensions of query.
OPTIONAL_OPERANDS = {
    Feature.QUERY_OFFSET_ARRAY: Buffer(name="query_offset", dtype="int32", axes=()),
    Feature.QUERY_LENGTHS: Buffer(name="query_lengths", dtype="int32", axes=()),
    Feature.KEY_LENGTHS: Buffer(name="key_lengths", dtype="int32", axes=()),
    Feature.SINKS: Buffer(name="sinks", dtype="float32", axes=("query_heads",)),
    Feature.BIAS: Buffer(name="bias", dtype="float32", axes=DENSE_AXES, broadcast=True),
    Feature.MASK: Buffer(name="mask", dtype="bool", axes=DENSE_AXES, broadcast=True),
}
SEGMENT_RECORD = 5
"""Integers of a tile's segment record: see ``kernels.shared.segments``."""

SEGMENT_IDS = (
    Buffer(name="query_segment_ids", dtype="int32", axes=("query_length",)),
    Buffer(name="key_segment_ids", dtype="int32", axes=("key_length",)),
)
"""What a call has."""
SEGMENT_OPERANDS = (
    Buffer(name="query_tile_ids", dtype="int32", axes=("query_tiles", "tile_q")),
    Buffer(name="key_tile_ids", dtype="int32", axes=("key_tiles", "tile_kv")),
    Buffer(name="query_tile_segments", dtype="int32", axes=("query_tiles", "segment_record")),
    Buffer(name="key_tile_segments", dtype="int32", axes=("key_tiles", "segment_record")),
)
"""What kernels take of a call with segments."""

D_BIAS = Buffer(name="d_bias", dtype="float32", axes=DENSE_AXES, broadcast=True, like="bias")

DENSE_FEATURES = (Feature.BIAS, Feature.MASK)
"""Features with a value for each query and key, or for as many as vary."""

SEQUENCE_FEATURES = (Feature.QUERY_OFFSET_ARRAY, Feature.QUERY_LENGTHS, Feature.KEY_LENGTHS)
"""What a kernel must know of a batch element's sequences."""


def dense_axes(shape: tuple[int, ...]) -> int:
    """Returns which axes a dense operand ``[batch, heads, T, S]`` has, as the bits of an integer.

    Bit i is set where axis i is not 1. An axis of size 1 is never stepped along, so it does not
    matter that it may be all there is.
    """
    return sum(1 << axis for axis, size in enumerate(shape) if size != 1)
