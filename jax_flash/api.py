"""The public functions."""

from __future__ import annotations

from typing import Literal, overload

import jax
from jax.typing import ArrayLike

from jax_flash.ops.arguments import Arguments
from jax_flash.ops.attention import attend
from jax_flash.ops.dispatch import choose, decide
from jax_flash.ops.explanation import Explanation, explanation_of
from jax_flash.ops.exporting import export_checks
from jax_flash.ops.validation import check_call

__all__ = ["Explanation", "attention", "explain", "export_checks"]

Window = int | tuple[int | None, int | None]
"""Type of `local_window_size`."""


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic_bwd: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention in linear memory, with FlashAttention kernels on NVIDIA GPUs.

    For query head n, with positions counted from 0 within a sequence:

        logits[t, s] = scale * (query[t, n] . key[s, n // (N // K)])
        logits = logits_soft_cap * tanh(logits / logits_soft_cap)        if given
        logits = logits + bias                                           if given
        output[t, n] = sum over s of softmax(logits)[t, s] value[s, n // (N // K)]

    where the softmax runs over the keys that the query may attend to: those that `is_causal`,
    `local_window_size`, the lengths, the segment ids and `mask` all allow. A query that may attend
    to nothing gets output 0, log-sum-exp -inf (with a sink: the sink) and gradients 0. Padding
    (positions past a length, negative segment ids) may hold anything, NaN too: it reaches no valid
    row and no gradient, and padded queries give output 0.

    The algorithm is that of FlashAttention-2 (arXiv:2307.08691): softmax and sums in float32, the
    weights rounded to the dtype of value for the second product. Names and layouts are those of
    `jax.nn.dot_product_attention`. It works under jit, grad, vmap (a mapped axis becomes a leading
    dimension), scan, checkpoint and shard_map. Gradients are of first order and reverse mode. In
    `jax.checkpoint` policies the residuals are named "flash_out" and "flash_lse"; save both.

    Args:
        query: [..., T, N, D]: T queries, N heads, head dimension D (a multiple of 8, at most 256);
            bfloat16, float16 or float32. Any number of leading (batch) dimensions, also none.
        key: [..., S, K, D], of the dtype of query; N a multiple of K (grouped-query attention).
        value: [..., S, K, Dv], of the dtype of query.
        bias: floating, broadcastable to [..., N, T, S]; added to the logits, differentiable.
        mask: bool, broadcastable to [..., N, T, S]; True where a query may attend.
        scale: factor on the products; default D ** -0.5.
        is_causal: attend only to keys at position <= query position + query_offset.
        query_offset: position of query 0 on the key axis, for `is_causal` and `local_window_size`:
            an integer, or an integer array, scalar or [...], one for each sequence. For decoding or
            chunked prefill it is S - T.
        local_window_size: (left, right): attend only to keys at most `left` before and `right`
            after the query's position (plus query_offset), itself not counted; None is unbounded. A
            single integer is both. 0 is a real bound: (0, None) hides every earlier key.
        query_seq_lengths: integer [...]: valid queries of each sequence; the rest is padding.
        key_value_seq_lengths: integer [...]: valid keys of each sequence; the rest is padding.
        query_segment_ids: integer [..., T], for packed sequences; attend only where it equals the
            key's id. Negative is padding. Given with key_value_segment_ids.
        key_value_segment_ids: integer [..., S].
        logits_soft_cap: bound of the logits, before the bias (Gemma 2); greater than 0.
        sinks: floating [N]: one more logit for each head in the softmax's denominator, without a
            value (GPT-OSS); differentiable.
        deterministic_bwd: gradients have the same bits on every run. Implied by
            `--xla_gpu_deterministic_ops` in XLA_FLAGS; plain JAX is always deterministic here.
        return_residual: also return the log-sum-exp of the logits.
        implementation: None: kernels where the computation is lowered for CUDA and a kernel covers
            the call, else plain JAX; `explain` tells. "cuda": kernels or an error, never anything
            else (a call with a dimension of size 0 has nothing to compute and launches none).
            "xla": plain JAX in linear memory, on every platform. "emulate": the kernels' own code
            on an emulated GPU, for small problems on any machine; slow, to check kernels.

    Returns:
        Output [..., T, N, Dv] in the dtype of query. With `return_residual`, also the natural
        log-sum-exp, float32 [..., T, N], differentiable.

    Raises:
        TypeError: an argument or dtype of the wrong type.
        ValueError: a shape or value that does not fit.
        NotImplementedError: `implementation` names one that does not cover the call or, when
            lowered, the platform.
        RuntimeError: implementation="cuda" or "emulate" and the kernels are not installed.
    """
    call = check_call(Arguments(**locals()))
    output, lse = attend(call, choose(call))
    return (output, lse) if call.return_residual else output


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
    mask: ArrayLike | jax.ShapeDtypeStruct | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike | jax.ShapeDtypeStruct = 0,
    local_window_size: Window | None = None,
    query_seq_lengths: ArrayLike | jax.ShapeDtypeStruct | None = None,
    key_value_seq_lengths: ArrayLike | jax.ShapeDtypeStruct | None = None,
    query_segment_ids: ArrayLike | jax.ShapeDtypeStruct | None = None,
    key_value_segment_ids: ArrayLike | jax.ShapeDtypeStruct | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | jax.ShapeDtypeStruct | None = None,
    deterministic_bwd: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Explanation:
    """Says which implementation `attention` would use for these arguments, and why not another.

    Computes nothing. Takes the arguments of `attention`; arrays may be `jax.ShapeDtypeStruct`s.

    >>> print(jax_flash.explain(query, key, value, is_causal=True))  # doctest: +SKIP

    Returns:
        A record; `print` it. Where `attention` would refuse because no kernel covers
        implementation="cuda", it says so instead of raising.

    Raises:
        TypeError, ValueError: as `attention` does, for arguments that no implementation takes.
    """
    call = check_call(Arguments(**locals()), allow_shapes=True)
    return explanation_of(call, decide(call))
