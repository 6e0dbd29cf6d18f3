"""What is timed: the grid of the FlashAttention-3 paper, and two calls with grouped heads."""

from __future__ import annotations

from dataclasses import replace

from jax_flash.testing import Case, cases_tagged

BACKWARD_FLOPS_RATIO = 2.5
"""Five matrix products in the backward pass for two in the forward one."""


def problems(*, quick: bool = False) -> list[Case]:
    """Returns the problems in the order of their results, or a quarter of them."""
    grid = [case for case in cases_tagged("bench") if case.head_dim in (64, 128)]
    example = next(case for case in grid if case.head_dim == 128 and case.is_causal)
    grouped = [
        replace(
            example,
            name=f"bench-grouped-{length}-heads-32-over-{key_heads}",
            batch=16384 // length,
            queries=length,
            keys=length,
            heads=32,
            key_heads=key_heads,
        )
        for length, key_heads in ((4096, 8), (16384, 4))
    ]
    everything = [*grid, *grouped]
    return [case for case in everything if case.queries in (1024, 8192)] if quick else everything


def forward_flops(case: Case) -> float:
    """Floating-point operations of the forward pass as the FlashAttention papers count them.

    Two for each of the multiplications of the two matrix products; a causal mask halves that.
    """
    products = case.batch * case.heads * case.queries * case.keys * (case.head_dim + case.value_dim)
    return 2.0 * products / (2 if case.is_causal else 1)
