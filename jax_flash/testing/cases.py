"""Named attention problems: shapes, dtype and features, with tags to choose them by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

TAGS = frozenset({"quick", "full", "bench"})
FEATURES = frozenset(
    {
        "bias",  # float [N, T, S], so broadcast over the batch
        "mask",  # bool [batch, 1, T, S]
        "query_offset",  # int32 [batch]
        "query_lengths",  # int32 [batch], among them 0 where there are two or more
        "key_lengths",  # int32 [batch], likewise
        "segment_ids",  # int32 [batch, T] and [batch, S], with padding at the end
        "sinks",  # float32 [N]
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention problem, without its values.

    Attributes:
        name: unique, made of words joined by hyphens.
        tags: of TAGS. quick: small enough for every run on a CPU. full: the edges (odd lengths,
            T != S, every head grouping, every feature), for a GPU or a patient CPU. bench: the
            sizes to time.
        batch: size of the one leading dimension.
        queries: T.
        keys: S.
        heads: N.
        key_heads: K, a divisor of N.
        head_dim: D.
        value_dim: Dv.
        dtype: of query, key and value: "bfloat16", "float16" or "float32".
        is_causal: as in `Semantics`.
        window: as in `Semantics`.
        soft_cap: as in `Semantics`.
        features: of FEATURES, the array fields of `Semantics` that are given.

    Raises:
        ValueError: if a tag or feature is unknown or N is not a multiple of K.
    """

    name: str
    tags: frozenset[str]
    queries: int
    keys: int
    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    features: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = (self.tags - TAGS) | (self.features - FEATURES)
        if unknown:
            raise ValueError(
                f"case {self.name} has {sorted(unknown)}; tags are {sorted(TAGS)} and features "
                f"{sorted(FEATURES)}."
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"case {self.name} has {self.heads} query heads and {self.key_heads} key heads; "
                "the first must be a multiple of the second."
            )


def cases_tagged(*tags: str) -> list[Case]:
    """The cases that have any of these tags, in the order of `CASES`.

    Raises:
        ValueError: if a tag is not one of TAGS.
    """
    unknown = set(tags) - TAGS
    if unknown:
        raise ValueError(f"tags {sorted(unknown)} do not exist; use some of {sorted(TAGS)}.")
    return [case for case in CASES if case.tags & set(tags)]


def _length_cases() -> list[Case]:
    """Lengths around the tile sizes, and T != S both ways."""
    pairs = [(length, length) for length in (1, 63, 64, 65, 127, 129, 257, 1000)]
    pairs += [(1, 300), (65, 200), (200, 65), (300, 1), (129, 1000), (1000, 129)]
    quick = {(1, 1), (65, 65), (129, 129), (65, 200), (200, 65)}
    return [
        Case(
            name=f"{'causal' if is_causal else 'full'}-{queries}x{keys}",
            tags=frozenset({"quick", "full"} if (queries, keys) in quick else {"full"}),
            queries=queries,
            keys=keys,
            is_causal=is_causal,
        )
        for queries, keys in pairs
        for is_causal in (False, True)
    ]


def _head_cases() -> list[Case]:
    """Head groupings, head sizes and dtypes."""
    base = Case(name="base", tags=frozenset({"full"}), queries=129, keys=193, is_causal=True)
    groups = [
        replace(base, name=f"heads-{heads}-over-{key_heads}", heads=heads, key_heads=key_heads)
        for heads, key_heads in ((4, 4), (6, 2), (4, 1), (8, 1))
    ]
    sizes = [
        replace(base, name=f"head-dim-{size}-{value_size}", head_dim=size, value_dim=value_size)
        for size, value_size in ((32, 32), (40, 40), (128, 128), (192, 128), (64, 96), (256, 256))
    ]
    dtypes = [
        replace(base, name=f"dtype-{dtype}", dtype=dtype, tags=frozenset({"quick", "full"}))
        for dtype in ("float16", "float32")
    ]
    long = replace(base, name="causal-4097x4097", queries=4097, keys=4097, batch=1, heads=4)
    return [*groups, *sizes, *dtypes, long]


def _feature_cases() -> list[Case]:
    """Each feature by itself, and the combinations that models use."""
    base = Case(
        name="base",
        tags=frozenset({"quick", "full"}),
        queries=130,
        keys=150,
        batch=3,
        heads=4,
        key_heads=2,
        head_dim=32,
        value_dim=32,
    )

    def case(name: str, features: Iterable[str] = (), **changes: Any) -> Case:
        return replace(base, name=name, features=frozenset(features), **changes)

    alone = [case(f"feature-{name.replace('_', '-')}", {name}) for name in sorted(FEATURES)]
    return [
        *alone,
        case("feature-soft-cap", soft_cap=5.0),
        case("window-left", window=(17, None), is_causal=True),
        case("window-two-sided", window=(40, 9)),
        case("window-diagonal", window=(0, 0)),
        case("padded-causal", {"query_lengths", "key_lengths"}, is_causal=True),
        case("packed-causal", {"segment_ids"}, is_causal=True, window=(50, 0)),
        case("decode-offset", {"query_offset", "key_lengths"}, queries=3, is_causal=True),
        case("gemma-2", {"key_lengths"}, is_causal=True, window=(64, 0), soft_cap=20.0),
        case("gpt-oss", {"sinks"}, is_causal=True, window=(32, 0), heads=8, key_heads=1),
        case("padded-sinks", {"sinks", "query_lengths", "key_lengths"}),
        case("everything", FEATURES, window=(60, 30), soft_cap=10.0),
    ]


def _bench_cases() -> list[Case]:
    """16384 tokens in sequences of 512 to 16384, 2048 channels: the grid of FlashAttention-3."""
    return [
        Case(
            name=f"bench-{'causal' if is_causal else 'full'}-{length}-head-dim-{head_dim}",
            tags=frozenset({"bench"}),
            batch=16384 // length,
            queries=length,
            keys=length,
            heads=2048 // head_dim,
            key_heads=2048 // head_dim,
            head_dim=head_dim,
            value_dim=head_dim,
            is_causal=is_causal,
        )
        for head_dim in (64, 128, 256)
        for is_causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    ]


CASES: tuple[Case, ...] = (
    *_length_cases(),
    *_head_cases(),
    *_feature_cases(),
    *_bench_cases(),
)
