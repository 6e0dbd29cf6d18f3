"""One attention call as the kernels see it: shapes, dtype and which features it uses."""

from dataclasses import dataclass
from enum import Enum

from jax_flash.spec.band_mask import FULL, BandMask


class Feature(Enum):
    """A feature of a call beyond its band mask; the value is the phrase used in messages."""

    QUERY_OFFSET_ARRAY = "query_offset as an array"
    QUERY_LENGTHS = "query_seq_lengths"
    KEY_LENGTHS = "key_value_seq_lengths"
    SEGMENT_IDS = "segment ids"
    SOFT_CAP = "logits_soft_cap"
    SINKS = "sinks"
    BIAS = "a dense bias"
    MASK = "a dense mask"


class Support(Enum):
    """Which features a kernel supports beyond a band, offsets and sinks.

    Each costs registers and time also where a call lacks it. The value is a word of the kernel's
    name; those of a band alone have the name of the band there.
    """

    BAND = "band"
    """None."""
    RAGGED = "ragged"
    """Lengths and segments."""
    GENERAL = "general"
    """These, and what changes scores: a soft cap, dense biases and masks."""


RAGGED_FEATURES = frozenset({Feature.QUERY_LENGTHS, Feature.KEY_LENGTHS, Feature.SEGMENT_IDS})
"""Features that ragged kernels support."""

GENERAL_FEATURES = RAGGED_FEATURES | {Feature.SOFT_CAP, Feature.BIAS, Feature.MASK}
"""Features that general kernels support; those of a band alone have none of them."""


def support_of(features: frozenset[Feature]) -> Support:
    """Returns the least support that a call with ``features`` needs."""
    if features & (GENERAL_FEATURES - RAGGED_FEATURES):
        return Support.GENERAL
    return Support.RAGGED if features & RAGGED_FEATURES else Support.BAND


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """Everything static about one call that decides which kernel, if any, runs it.

    The lengths may be symbolic dimensions (``jax.export``), which no number may be compared with.
    """

    dtype: str
    """Element type of query, key and value as numpy names it, e.g. ``bfloat16``."""
    query_length: int
    key_length: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int
    band: BandMask = FULL
    features: frozenset[Feature] = frozenset()
    deterministic_bwd: bool = False

    def __post_init__(self) -> None:
        """Checks what holds for every attention call."""
        if self.key_heads <= 0 or self.query_heads % self.key_heads:
            raise ValueError(
                f"query_heads={self.query_heads} is not a multiple of key_heads={self.key_heads}"
            )

    @property
    def head_dims(self) -> tuple[int, int]:
        """``(D, Dv)``."""
        return self.head_dim, self.value_head_dim

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key head."""
        return self.query_heads // self.key_heads
