"""Operands and results of the operations: names, element types and axes."""

from dataclasses import dataclass

from jax_flash.spec.problem import Feature


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named operand or result of an operation; ``axes`` follow the leading batch dimensions."""

    name: str
    dtype: str
    """``input`` (the dtype of query), ``float32`` or ``int32``."""
    axes: tuple[str, ...]
    """Axis names: ``query_length``, ``key_length``, ``query_heads``, ``key_heads``, ``head_dim``,
    ``value_head_dim``, and of workspaces and records ``padded_query_length``, ``query_tiles``,
    ``key_tiles``, ``padded_head_dim``, ``segment_record``."""


QUERY_AXES = ("query_length", "query_heads", "head_dim")
KEY_AXES = ("key_length", "key_heads", "head_dim")
VALUE_AXES = ("key_length", "key_heads", "value_head_dim")
OUTPUT_AXES = ("query_length", "query_heads", "value_head_dim")
ROW_AXES = ("query_length", "query_heads")

INPUTS = (
    Buffer(name="query", dtype="input", axes=QUERY_AXES),
    Buffer(name="key", dtype="input", axes=KEY_AXES),
    Buffer(name="value", dtype="input", axes=VALUE_AXES),
)
RESULTS = (
    Buffer(name="output", dtype="input", axes=OUTPUT_AXES),
    Buffer(name="lse", dtype="float32", axes=ROW_AXES),
)

# What a call may have or lack, each with the leading dimensions of query.
OPTIONAL_OPERANDS = {
    Feature.QUERY_OFFSET_ARRAY: Buffer(name="query_offset", dtype="int32", axes=()),
    Feature.QUERY_LENGTHS: Buffer(name="query_lengths", dtype="int32", axes=()),
    Feature.KEY_LENGTHS: Buffer(name="key_lengths", dtype="int32", axes=()),
    Feature.SINKS: Buffer(name="sinks", dtype="float32", axes=("query_heads",)),
}
SEGMENT_RECORD = 4
"""Integers of a tile's segment record: see ``kernels.shared.segments``."""

SEGMENT_IDS = (
    Buffer(name="query_segment_ids", dtype="int32", axes=("query_length",)),
    Buffer(name="key_segment_ids", dtype="int32", axes=("key_length",)),
)
SEGMENT_OPERANDS = (
    *SEGMENT_IDS,
    Buffer(name="query_tile_segments", dtype="int32", axes=("query_tiles", "segment_record")),
    Buffer(name="key_tile_segments", dtype="int32", axes=("key_tiles", "segment_record")),
)
"""What kernels take of a call with segments."""

SEQUENCE_FEATURES = (Feature.QUERY_OFFSET_ARRAY, Feature.QUERY_LENGTHS, Feature.KEY_LENGTHS)
"""What a kernel must know of a batch element's sequences."""
