"""`jax_flash.attention` in the form that this package's comparisons take."""

from __future__ import annotations

from functools import cache

import jax

from jax_flash.api import attention
from jax_flash.reference.semantics import Semantics
from jax_flash.testing.oracle import Implementation


@cache
def public_attention(
    *,
    implementation: str | None = None,
    deterministic_bwd: bool = False,
    query_offset: int = 0,
) -> Implementation:
    """Returns `jax_flash.attention` as (query, key, value, semantics) -> (output, log-sum-exp).

    Args:
        implementation: as in `jax_flash.attention`.
        deterministic_bwd: as in `jax_flash.attention`.
        query_offset: likewise, where the semantics have none: as a number, it is part of the
            compiled program and needs no general kernel.
    """

    def call(
        query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> tuple[jax.Array, jax.Array]:
        offset = semantics.query_offset
        return attention(
            query,
            key,
            value,
            semantics.bias,
            semantics.mask,
            scale=semantics.scale,
            is_causal=semantics.is_causal,
            query_offset=query_offset if offset is None else offset,
            local_window_size=semantics.window,
            query_seq_lengths=semantics.query_lengths,
            key_value_seq_lengths=semantics.key_lengths,
            query_segment_ids=semantics.query_segment_ids,
            key_value_segment_ids=semantics.key_segment_ids,
            logits_soft_cap=semantics.soft_cap,
            sinks=semantics.sinks,
            deterministic_bwd=deterministic_bwd,
            return_residual=True,
            implementation=implementation,
        )

    return call
