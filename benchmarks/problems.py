"""What is timed: the grid of the FlashAttention-3 paper, and a few calls that models make."""

from __future__ import annotations

from dataclasses import replace

from jax_flash.testing import Case, cases_tagged

FORWARD, BACKWARD, BOTH = DIRECTIONS = ("forward", "backward", "forward and backward")

MATRIX_PRODUCT = "8192^3 matrix product"
"""Not attention, but the speed to compare it with: XLA's product of two matrices in bfloat16."""
MATRIX_SIZE = 8192

LAYER = "bench-layer"
"""The problem that is also timed in both directions as one program, as in a training step."""

_FLOPS_RATIOS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}
"""Five matrix products in the backward pass for two in the forward one."""


def problems(*, quick: bool = False) -> list[Case]:
    """Returns the problems in the order of their results, or a quarter of them."""
    grid = cases_tagged("bench")
    example = next(case for case in grid if case.head_dim == 128 and case.is_causal)

    def causal(name: str, batch: int, length: int, heads: tuple[int, int], head_dim: int) -> Case:
        return replace(
            example,
            name=name,
            batch=batch,
            queries=length,
            keys=length,
            heads=heads[0],
            key_heads=heads[1],
            head_dim=head_dim,
        )

    models = [
        causal("bench-grouped-4096-heads-32-over-8", 4, 4096, (32, 8), 128),
        causal("bench-grouped-16384-heads-32-over-4", 1, 16384, (32, 4), 128),
        causal("bench-causal-8192-head-dim-192-128", 2, 8192, (16, 16), 192),
        causal(LAYER, 2, 8192, (32, 8), 128),
    ]
    everything = [*grid, *models]
    return [case for case in everything if case.queries in (1024, 8192)] if quick else everything


def directions_of(case: Case) -> tuple[str, ...]:
    """Returns the directions in which a problem is timed."""
    return DIRECTIONS if case.name == LAYER else (FORWARD, BACKWARD)


def is_beside_matrix_product(case: Case) -> bool:
    """Returns whether the matrix product is timed in turns with the forward pass of a case."""
    return case.queries >= 16384 and not case.is_causal


def forward_flops(case: Case) -> float:
    """Floating-point operations of the forward pass as the FlashAttention papers count them.

    Two for each of the multiplications of the two matrix products; a causal mask halves that.
    """
    products = case.batch * case.heads * case.queries * case.keys * (case.head_dim + case.value_dim)
    return 2.0 * products / (2 if case.is_causal else 1)


def flops(case: Case, implementation: str, direction: str) -> float:
    """Floating-point operations of what is timed under an implementation's name."""
    if implementation == MATRIX_PRODUCT:
        return 2.0 * MATRIX_SIZE**3
    return _FLOPS_RATIOS[direction] * forward_flops(case)
