"""The public functions."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jax_flash.ops.arguments import Arguments
from jax_flash.ops.attention import attend
from jax_flash.ops.validation import check_call


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
):
    """Attention."""
    call = check_call(Arguments(**locals()))
    output, lse = attend(call)
    return (output, lse) if call.return_residual else output
