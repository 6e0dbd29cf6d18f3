"""Attention with its gradient, on whichever implementation the dispatch chose."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_flash.ops.arguments import Call
from jax_flash.reference.attention import attention_reference


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns output [..., T, N, Dv] in the dtype of query, and log-sum-exp float32 [..., T, N]."""
    semantics = call.semantics
    if call.query_offset and semantics.query_offset is None:
        semantics = replace(semantics, query_offset=jnp.int32(call.query_offset))
    output, lse = attention_reference(call.query, call.key, call.value, semantics)
    return output.astype(call.query.dtype), lse
