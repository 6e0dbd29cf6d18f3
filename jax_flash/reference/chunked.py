"""Attention in linear memory: the FlashAttention algorithm in plain JAX, with its own gradient.

It is the "xla" implementation (CPUs, and GPUs without a kernel), and it is the ideal that kernels
are measured against: softmax and sums in float32, P and dS rounded to the operands' dtype before
a matrix product, tiles of keys of a fixed width visited in ascending order from key 0.

    for each tile of queries                          for each tile of queries
        for each tile of keys it may see                  delta = rowsum(dO * O) - dLSE
            S = logits(Q K^T)                             for each tile of keys it may see
            m' = max(m, rowmax(S))                            P = exp(S - LSE)
            P = exp(S - m')                                   dV += P^T dO
            l = exp(m - m') l + rowsum(P)                     dS = P * (dO V^T - delta)
            O = exp(m - m') O + P V                           dK += scale dS^T Q
        O, LSE = O / l, m + log(l)                            dQ += scale dS K

No T x S array is made. Where a length is not a multiple of its tile, the last tile starts early
and overlaps the one before it, and the overlap is masked, so nothing is padded or copied either.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_flash.reference.batching import batch_alike
from jax_flash.reference.chunked_backward import Gradients, Results, chunked_backward
from jax_flash.reference.chunked_forward import chunked_forward
from jax_flash.reference.semantics import Semantics, check_operands

Tree = TypeVar("Tree")


def chunked_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> tuple[jax.Array, jax.Array]:
    """Attention in memory linear in T and S, differentiable in query, key, value, bias and sinks.

    The same contract as `attention_reference`, for padding and empty rows too. Both results may be
    differentiated in reverse mode; the gradient has the same bits on every run, and may itself be
    differentiated in forward mode (so `jax.hessian` works). The residuals are named flash_out and
    flash_lse for the policies of `jax.checkpoint`.

    Args:
        query: [..., T, N, D], any floating dtype.
        key: [..., S, K, D], N a multiple of K, of the dtype of query.
        value: [..., S, K, Dv], of the dtype of query.
        semantics: what else the call asks for. A bias or mask is read tile by tile; only the
            gradient of a bias takes further memory of its size.

    Returns:
        output [..., T, N, Dv] in the dtype of query, and natural log-sum-exp [..., T, N] in
        float32 (float64 for float64 operands).

    Raises:
        TypeError, ValueError: see `check_operands`.
    """
    check_operands(query, key, value, semantics)
    return _attention(*unify_varying_axes((query, key, value, semantics)))


def unify_varying_axes(tree: Tree) -> Tree:
    """Makes every array vary over each shard_map axis that any of them varies over.

    Inside shard_map, JAX then inserts the sum over devices that the gradient of a replicated
    operand needs, and loop carries made from any operand have the type of the results.

    Args:
        tree: a pytree of arrays and numbers.

    Returns:
        The tree, with all leaves arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    varying = [frozenset(jax.typeof(leaf).mat.varying) for leaf in leaves]
    everywhere = frozenset().union(*varying)
    return structure.unflatten(
        lax.pcast(leaf, tuple(sorted(everywhere - axes)), to="varying")
        if axes != everywhere
        else leaf
        for leaf, axes in zip(leaves, varying, strict=True)
    )


@jax.custom_vjp
def _attention(query, key, value, semantics):
    return batch_alike(*chunked_forward(query, key, value, semantics))


def _attention_fwd(query, key, value, semantics):
    output, lse = batch_alike(*chunked_forward(query, key, value, semantics))
    # Both names: a policy that saves only one of them would run the forward pass again.
    results = Results(checkpoint_name(output, "flash_out"), checkpoint_name(lse, "flash_lse"))
    return tuple(results), (query, key, value, semantics, results)


def _attention_bwd(residuals, cotangents):
    query, key, value, semantics, results = residuals
    gradients = chunked_backward(query, key, value, semantics, results, Results(*cotangents))
    return gradients.query, gradients.key, gradients.value, _cotangent_of(semantics, gradients)


def _cotangent_of(semantics: Semantics, gradients: Gradients) -> Semantics:
    """The record as a cotangent: gradients of bias and sinks, float0 zeros for the rest."""

    def no_gradient(array):
        return np.zeros(array.shape, jax.dtypes.float0)

    without = {
        field.name: no_gradient(getattr(semantics, field.name))
        for field in fields(semantics)
        if isinstance(getattr(semantics, field.name), jax.Array)
    }
    return replace(semantics, **(without | {"bias": gradients.bias, "sinks": gradients.sinks}))


_attention.defvjp(_attention_fwd, _attention_bwd)
