"""Soft cap of the logits: ``cap * tanh(logits / cap)``.

Scores are ``q . k``, before the scale, as everywhere in the kernels. ``tanh(x)`` is computed as
``1 - 2 / (1 + 2^(2 x log2 e))``: to about 1e-7, where the hardware's own tanh errs by 5e-4.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_flash.kernels.shared.online_softmax import LOG2_E


class SoftCap(NamedTuple):
    """A cap in units of scores; ``bound`` is 0 for none."""

    bound: Float32
    rate: Float32
    """``2 log2(e) / bound``."""


def make_soft_cap(cap: Float32, scale_log2: Float32) -> SoftCap:
    """Returns the cap for logits ``scale * scores``; ``cap`` 0 is none."""
    return SoftCap(
        bound=cap * LOG2_E * cute.arch.rcp_approx(scale_log2),
        rate=Float32(2.0) * scale_log2 * cute.arch.rcp_approx(cap),
    )


@cute.jit
def cap_scores(cap: cutlass.Constexpr, scores: cute.Tensor):
    """Caps every score of a fragment ``(rows, columns)``."""
    if cap.bound > 0.0:
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                power = cute.math.exp2(scores[row, column] * cap.rate, fastmath=True)
                inverse = cute.arch.rcp_approx(power + 1.0)
                scores[row, column] = cap.bound - (cap.bound + cap.bound) * inverse


@cute.jit
def slope_at(cap: cutlass.Constexpr, capped: Float32, inverse_bound: Float32):
    """Returns d capped / d score at a capped score; 0 for one that a mask has made -inf."""
    tanh = cute.arch.fmax(capped, -cap.bound) * inverse_bound
    return Float32(1.0) - tanh * tanh
