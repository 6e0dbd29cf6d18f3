"""Adapter that lets Flax's attention modules call `jax_flash.attention`.

    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.attention_fn())
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_flash.flax.attention_fn())

It needs nothing of Flax itself, so any version with that calling convention will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_flash.api import Window, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFn:
    """A function for the `attention_fn` argument of a Flax attention module; see `attention_fn`.

    Equal options make equal functions, so that jit keys that hold one compare well.
    """

    scale: float | None = None
    is_causal: bool = False
    query_offset: int | None = None
    local_window_size: Window | None = None
    logits_soft_cap: float | None = None
    deterministic_bwd: bool = False
    implementation: str | None = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attention as Flax's modules call it.

        The softmax is in float32, products have the full precision of their dtype and are summed in
        float32, and there is no dropout: `force_fp32_for_softmax`, `precision`, `dropout_rng` and
        `broadcast_dropout` ask for nothing beyond that.

        Args:
            query: [..., T, N, D].
            key: [..., S, K, D].
            value: [..., S, K, Dv].
            bias: broadcastable to [..., N, T, S].
            mask: likewise; bool, or numbers, nonzero where a query may attend.
            broadcast_dropout: of no effect.
            dropout_rng: of no effect.
            dropout_rate: must be 0 unless `deterministic`.
            deterministic: whether there is no dropout.
            dtype: of the computation and the result; default that of the operands.
            precision: of no effect.
            module: must be None: it would receive the attention weights.
            is_causal: causal in this call.
            force_fp32_for_softmax: of no effect.
            qk_attn_weights_einsum: must be None.
            attn_weights_value_einsum: must be None.
            input_positions: must be None.

        Returns:
            [..., T, N, Dv] of `dtype`.

        Raises:
            NotImplementedError, TypeError, ValueError: see `attention_fn`.
        """
        del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
        _refuse_weights(
            dropout=0.0 if deterministic else dropout_rate,
            sow=module is not None,
            einsum=qk_attn_weights_einsum or attn_weights_value_einsum,
        )
        _refuse_positions(input_positions)
        causal = is_causal or self.is_causal
        self._check_positions(causal, query.shape[-3], key.shape[-3])
        if dtype is None:
            dtype = jnp.result_type(query, key, value)
        return attention(
            query.astype(dtype),
            key.astype(dtype),
            value.astype(dtype),
            bias,
            None if mask is None else mask.astype(bool),
            scale=self.scale,
            is_causal=causal,
            query_offset=0 if self.query_offset is None else self.query_offset,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            deterministic_bwd=self.deterministic_bwd,
            implementation=self.implementation,
        )

    def _check_positions(self, causal: bool, queries: int, keys: int) -> None:
        has_band = causal or self.local_window_size is not None
        if has_band and self.query_offset is None and queries != keys:
            raise ValueError(
                f"A causal mask or window is asked for with T={queries} queries and S={keys} keys, "
                "so the position of the queries must be known. Build attention_fn with "
                "query_offset, or, to decode with a cache, without is_causal and "
                "local_window_size: the mask of the cache is causal already."
            )


def attention_fn(
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | None = None,
    local_window_size: Window | None = None,
    logits_soft_cap: float | None = None,
    deterministic_bwd: bool = False,
    implementation: str | None = None,
) -> AttentionFn:
    """Returns a function for the `attention_fn` argument of a Flax attention module.

    It works in `flax.nnx.MultiHeadAttention` and in `flax.linen.MultiHeadDotProductAttention`. The
    options are those of `jax_flash.attention`, for every call of the module. In nnx, a single call
    can ask for a causal mask, `module(x, is_causal=True)`; that suits a module that also decodes,
    where the mask of its cache is causal by itself.

    Masks may be bool or numbers, as `make_causal_mask` of nnx and linen returns them. A causal mask
    of that kind is a dense mask to us; `is_causal=True` says the same and is faster.

    Args:
        scale: factor on the products; default D ** -0.5, as in Flax.
        is_causal: every call is causal.
        query_offset: position of query 0 on the key axis, for causal masks and windows. With None
            it is 0, and such calls must have as many queries as keys.
        local_window_size: (left, right), or one integer for both.
        logits_soft_cap: bound of the logits.
        deterministic_bwd: gradients have the same bits on every run.
        implementation: None (choose), "cuda" or "xla".

    Returns:
        The function. It raises NotImplementedError for what needs the attention weights (dropout
        with deterministic=False, sow_weights, einsum overrides) and for input_positions, ValueError
        for a causal mask or window where the position of the queries is not known, and what
        `jax_flash.attention` raises.
    """
    return AttentionFn(**locals())


def _refuse_weights(*, dropout: float, sow: bool, einsum: Any) -> None:
    """Refuses what would need the T x S attention weights."""
    if dropout > 0:
        raise NotImplementedError(
            f"dropout_rate is {dropout} and deterministic is False, but there is no dropout of "
            "attention weights here. Build the module with dropout_rate=0.0 and apply dropout to "
            "its output, or call it with deterministic=True."
        )
    if sow:
        raise NotImplementedError(
            "The module asks for its attention weights (sow_weights=True), but they are never made "
            "here, as they take T x S memory. Leave sow_weights=False, or use Flax's own "
            "dot_product_attention to look at them."
        )
    if einsum is not None:
        raise NotImplementedError(
            "qk_attn_weights_einsum or attn_weights_value_einsum is given, but the products are "
            "fixed here. Leave both None, or use Flax's own dot_product_attention."
        )


def _refuse_positions(input_positions: Any) -> None:
    if input_positions is not None:
        raise NotImplementedError(
            "input_positions is given, but no rotary embedding is applied here. Wrap this function "
            "in one that rotates query and key first and does not pass the positions on."
        )
