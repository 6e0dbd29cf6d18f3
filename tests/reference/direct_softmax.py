"""Attention by its definition, one query at a time in numpy: what the oracle is tested against.

Nothing is shared with `jax_flash.reference`: rules are spelled out pair by pair.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_flash.reference.semantics import Semantics


def direct_attention(
    query: Any, key: Any, value: Any, semantics: Semantics
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, Dv] and log-sum-exp [B, T, N] in float64, for one leading dimension."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, queries, heads, _ = query.shape
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    lse = np.full((batch, queries, heads), -np.inf)
    for b in range(batch):
        for t in range(queries):
            for n in range(heads):
                output[b, t, n], lse[b, t, n] = _row(query, key, value, semantics, (b, t, n))
    return output, lse


def _row(query, key, value, semantics: Semantics, place: tuple[int, int, int]):
    b, t, n = place
    nothing = np.zeros(value.shape[-1]), -math.inf
    if semantics.query_lengths is not None and t >= semantics.query_lengths[b]:
        return nothing
    if semantics.query_segment_ids is not None and semantics.query_segment_ids[b, t] < 0:
        return nothing
    key_head = n // (query.shape[2] // key.shape[2])
    logits, values = [], []
    for s in range(key.shape[1]):
        if _may_attend(query, key, semantics, place, s):
            logit = semantics.scale * float(query[b, t, n] @ key[b, s, key_head])
            if semantics.soft_cap is not None:
                logit = semantics.soft_cap * math.tanh(logit / semantics.soft_cap)
            if semantics.bias is not None:
                logit += _pair(semantics.bias, query, key, place, s)
            logits.append(logit)
            values.append(value[b, s, key_head])
    if semantics.sinks is not None:
        logits.append(float(semantics.sinks[n]))
        values.append(np.zeros(value.shape[-1]))
    if not logits or max(logits) == -math.inf:
        return nothing
    weights = np.exp(np.array(logits) - max(logits))
    lse = max(logits) + math.log(weights.sum())
    return (weights / weights.sum()) @ np.array(values), lse


def _pair(array, query, key, place: tuple[int, int, int], s: int):
    b, t, n = place
    full = np.broadcast_to(array, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    return full[b, n, t, s]


def _may_attend(query, key, semantics: Semantics, place: tuple[int, int, int], s: int) -> bool:
    b, t, _ = place
    offset = 0 if semantics.query_offset is None else int(semantics.query_offset[b])
    left, right = semantics.window
    if semantics.is_causal and s > t + offset:
        return False
    if left is not None and s < t + offset - left:
        return False
    if right is not None and s > t + offset + right:
        return False
    if semantics.key_lengths is not None and s >= semantics.key_lengths[b]:
        return False
    if semantics.query_segment_ids is not None and semantics.key_segment_ids is not None:
        if semantics.key_segment_ids[b, s] < 0:
            return False
        if semantics.query_segment_ids[b, t] != semantics.key_segment_ids[b, s]:
            return False
    return semantics.mask is None or bool(_pair(semantics.mask, query, key, place, s))
