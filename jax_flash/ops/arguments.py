"""Records of one call: its arguments as given, and what validation makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_flash.reference.semantics import Semantics

Array: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""An array argument; only `explain` takes shapes without values."""

IMPLEMENTATIONS = ("cuda", "xla", "emulate")
"""Names that `implementation` takes, besides None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `jax_flash.attention` as its caller gave them, under their public names."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: Any = False
    query_offset: Any = 0
    local_window_size: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    deterministic_bwd: Any = False
    return_residual: Any = False
    implementation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that has been checked.

    Attributes:
        query: [..., T, N, D].
        key: [..., S, K, D].
        value: [..., S, K, Dv].
        semantics: what the call asks for; its `query_offset` is set only for an array offset that
            matters (with a causal mask or a window).
        query_offset: the offset when it is a Python integer, else 0.
        deterministic_bwd: whether gradients must be bitwise reproducible.
        return_residual: whether the log-sum-exp is wanted.
        implementation: one of `IMPLEMENTATIONS`, or None to choose.
    """

    query: Array
    key: Array
    value: Array
    semantics: Semantics
    query_offset: int = 0
    deterministic_bwd: bool = False
    return_residual: bool = False
    implementation: str | None = None
