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


GENERAL_FEATURES = frozenset(
    {
        Feature.QUERY_LENGTHS,
        Feature.KEY_LENGTHS,
        Feature.SEGMENT_IDS,
        Feature.SOFT_CAP,
        Feature.BIAS,
        Feature.MASK,
    }
)
"""Features that need a general kernel (``variant.KernelVariant.general``)."""


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
