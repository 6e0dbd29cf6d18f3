"""Online softmax over key tiles (FlashAttention 2, algorithm 1), one row at a time.

Scores are raw (unscaled) logits; the scale is folded into the base-2 exponent:
``p = 2^(s * scale_log2 - m * scale_log2)`` with ``scale_log2 = scale * log2(e)``, one fused
multiply-add and one ``ex2`` an element. A row that has seen no visible key yet has maximum -inf;
it is computed as if its maximum were 0, which makes every weight exactly 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
NEGATIVE_INFINITY = -float("inf")
NO_SINK = Float32(NEGATIVE_INFINITY)


@cute.jit
def finite_maximum(row_max: Float32) -> Float32:
    """Returns the maximum to subtract: 0 for a row that has seen no key."""
    return Float32(0.0) if row_max == NEGATIVE_INFINITY else row_max


class SoftmaxRows(NamedTuple):
    """Running maximum and sum of the rows that a thread holds.

    ``reduce_row(value, operation)`` combines a per-thread partial value over the threads that
    share a row; architectures differ in who they are. The sum is reduced once, at the end.
    """

    maximum: cute.Tensor
    total: cute.Tensor
    scale_log2: Float32
    reduce_row: Callable[[Float32, Callable], Float32]


def start_rows(rows: int, scale_log2: Float32, reduce_row) -> SoftmaxRows:
    """Returns ``rows`` rows that have seen no key."""
    state = SoftmaxRows(
        maximum=cute.make_rmem_tensor(cute.make_layout(rows), Float32),
        total=cute.make_rmem_tensor(cute.make_layout(rows), Float32),
        scale_log2=scale_log2,
        reduce_row=reduce_row,
    )
    state.maximum.fill(NEGATIVE_INFINITY)
    state.total.fill(0.0)
    return state


@cute.jit
def weigh(state: cutlass.Constexpr, scores: cute.Tensor, rescale: cute.Tensor):
    """Replaces masked scores ``(rows, columns)`` by weights and updates the rows.

    Writes to ``rescale`` the factor that earlier partial outputs of each row must be multiplied
    with: exactly 1 for a row whose maximum has not grown.

    FlashAttention 4 lets the maximum lag by up to 2^8 to rescale less often. Here that cost
    accuracy: the largest weight of a row is then no longer exactly 1 but rounded, and the error of
    the output grew by 16% on inputs with outliers (docs/numerics.md).
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row_scores = scores[row, None].load()
        previous = state.maximum[row]
        partial = row_scores.reduce(cute.ReductionOp.MAX, previous, 0)
        maximum = state.reduce_row(partial, cute.arch.fmax)
        offset = finite_maximum(maximum) * state.scale_log2
        factor = cute.math.exp2(previous * state.scale_log2 - offset, fastmath=True)
        factor = Float32(1.0) if maximum == previous else factor
        weights = cute.math.exp2(row_scores * state.scale_log2 - offset, fastmath=True)
        scores[row, None].store(weights)
        total = state.total[row] * factor
        state.total[row] = weights.reduce(cute.ReductionOp.ADD, total, 0)
        state.maximum[row] = maximum
        rescale[row] = factor


@cute.jit
def finish_rows(state: cutlass.Constexpr, sink: Float32, rescale: cute.Tensor, lse: cute.Tensor):
    """Writes each row's final factor ``1 / sum`` and natural log-sum-exp.

    The sum takes in ``exp(sink)``: nothing for a sink of -inf. A row that saw no key gets factor 0
    (its output is 0) and the sink as its log-sum-exp.
    """
    sink_log2 = sink * LOG2_E
    for row in cutlass.range_constexpr(cute.size(lse)):
        total = state.reduce_row(state.total[row], lambda a, b: a + b)
        maximum = state.maximum[row] * state.scale_log2
        offset = finite_maximum(cute.arch.fmax(maximum, sink_log2))
        factor = cute.math.exp2(maximum - offset, fastmath=True)
        # The compiler may fuse the product above, and the difference is then not exactly 0.
        factor = Float32(1.0) if sink_log2 <= maximum else factor
        total = total * factor + cute.math.exp2(sink_log2 - offset, fastmath=True)
        log2_total = cute.math.log2(total, fastmath=True)
        empty = total == 0.0
        rescale[row] = Float32(0.0) if empty else cute.arch.rcp_approx(total) * factor
        lse[row] = Float32(NEGATIVE_INFINITY) if empty else (offset + log2_total) * LN_2
