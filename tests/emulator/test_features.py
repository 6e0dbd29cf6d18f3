"""Every feature on the kernels' own code: results and gradients against the float64 oracle.

Padding holds NaN: nothing of it may reach a valid row or a gradient.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jax_flash.reference.chunked import chunked_attention
from jax_flash.spec.problem import Support
from jax_flash.testing import (
    CASES,
    Case,
    Inputs,
    assert_close_to_oracle,
    float64_oracle,
    make_inputs,
    poison_padding,
    public_attention,
    results_and_gradients,
)

BY_NAME = {case.name: case for case in CASES}
NAMES = [
    name
    for name, case in BY_NAME.items()
    if name.startswith(("feature-", "window-", "padded-", "packed-", "decode-", "gemma", "gpt-"))
]


def small(case: Case, **changes: object) -> Case:
    """Returns a case of fewer heads and sequences, which the emulator runs in seconds."""
    group = min(case.heads // case.key_heads, 2)
    return replace(case, batch=2, heads=group, key_heads=1, **changes)


def everything(support: Support, **changes: object) -> Case:
    """Returns a case of all features that kernels support, small."""
    case = BY_NAME["everything"]
    if support is Support.RAGGED:
        case = replace(case, soft_cap=None, features=case.features - {"bias", "mask"})
    return small(case, **changes)


def compare(case: Case, *, deterministic_bwd: bool, seed: int = 0) -> None:
    """Compares a case whose padding holds NaN."""
    inputs = poison_padding(make_inputs(case, seed=seed))
    compare_inputs(inputs, deterministic_bwd=deterministic_bwd)


def compare_inputs(inputs: Inputs, *, deterministic_bwd: bool = False) -> None:
    """Asserts that emulated kernels are as close to the oracle as the ideal algorithm is."""
    attention = public_attention(implementation="emulate", deterministic_bwd=deterministic_bwd)
    assert_close_to_oracle(
        results_and_gradients(attention, inputs),
        oracle=float64_oracle(inputs),
        ideal=results_and_gradients(chunked_attention, inputs),
    )


@pytest.mark.parametrize("name", NAMES)
def test_feature(name: str, kernel_directory: object) -> None:
    deterministic_bwd = NAMES.index(name) % 2 == 0
    compare(small(BY_NAME[name]), deterministic_bwd=deterministic_bwd)


@pytest.mark.parametrize("support", [Support.RAGGED, Support.GENERAL], ids=lambda s: s.value)
@pytest.mark.parametrize("deterministic_bwd", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(48, 64), (128, 128), (72, 40), (16, 104)])
def test_everything_with_other_head_dimensions(
    head_dim: int,
    value_dim: int,
    deterministic_bwd: bool,
    support: Support,
    kernel_directory: object,
) -> None:
    case = everything(
        support,
        head_dim=head_dim,
        value_dim=value_dim,
        keys=300,
        dtype="float16" if value_dim == 40 else "bfloat16",
    )
    compare(case, deterministic_bwd=deterministic_bwd)


@pytest.mark.parametrize("support", [Support.RAGGED, Support.GENERAL], ids=lambda s: s.value)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(192, 128), (256, 256), (136, 200), (104, 192)]
)
def test_everything_with_large_head_dimensions(
    head_dim: int, value_dim: int, support: Support, kernel_directory: object
) -> None:
    case = everything(
        support,
        head_dim=head_dim,
        value_dim=value_dim,
        keys=230,
        dtype="float16" if value_dim == 200 else "bfloat16",
    )
    compare(case, deterministic_bwd=head_dim == 256)


# Ragged kernels, and with a soft cap general ones; gradients above D = 128 are general in any case.
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "soft_cap"),
    [(64, 64, None), (64, 64, 4.0), (128, 128, None), (192, 128, None)],
)
def test_segments_in_any_order(
    head_dim: int, value_dim: int, soft_cap: float | None, kernel_directory: object
) -> None:
    """Ids that are not sorted, so that a tile's range holds tiles of other segments alone."""
    case = small(
        BY_NAME["feature-segment-ids"],
        queries=330,
        keys=420,
        head_dim=head_dim,
        value_dim=value_dim,
        soft_cap=soft_cap,
    )
    inputs = make_inputs(case)
    random = np.random.default_rng(0)

    def blocks(length: int) -> np.ndarray:
        ids = np.repeat(random.integers(-1, 3, (2, length // 30 + 1)), 30, axis=1)
        return ids[:, :length].astype(np.int32)

    semantics = replace(
        inputs.semantics, query_segment_ids=blocks(330), key_segment_ids=blocks(420)
    )
    inputs = poison_padding(replace(inputs, semantics=semantics))
    for deterministic_bwd in (False, True):
        assert_close_to_oracle(
            results_and_gradients(
                public_attention(implementation="emulate", deterministic_bwd=deterministic_bwd),
                inputs,
            ),
            oracle=float64_oracle(inputs),
            ideal=results_and_gradients(chunked_attention, inputs),
        )


def test_a_row_has_the_bits_it_has_without_its_padding(kernel_directory: object) -> None:
    """Lengths and segment ids change nothing but what they hide (docs/numerics.md)."""
    case = small(BY_NAME["full-65x200"], queries=70, keys=200)
    inputs = make_inputs(case)
    attention = public_attention(implementation="emulate")
    lengths = np.array([150, 200], np.int32)
    padded = poison_padding(
        replace(inputs, semantics=replace(inputs.semantics, key_lengths=lengths))
    )
    output, lse = attention(padded.query, padded.key, padded.value, padded.semantics)
    alone, alone_lse = attention(
        inputs.query[:1], inputs.key[:1, :150], inputs.value[:1, :150], inputs.semantics
    )
    assert (np.asarray(output[:1]) == np.asarray(alone)).all()
    assert (np.asarray(lse[:1]) == np.asarray(alone_lse)).all()
