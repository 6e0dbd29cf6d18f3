"""A function with its own gradient, from a forward and a backward pass that communicate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_flash.context_parallel.local_calls import Operands, Options
from jax_flash.reference.chunked_backward import Results

Attend = Callable[[Options, Operands], Results]


def join_passes(
    forward: Attend, backward: Callable[[Options, Operands, Results, Results], Operands]
) -> Attend:
    """Makes of two passes a function that may be differentiated, once and in reverse mode.

    What is kept for the backward pass are the operands and the results, nothing that was
    communicated. In `jax.checkpoint` policies the results are named as those of
    `jax_flash.ops.attention`, and for its reasons come from outside of the custom_vjp.

    Args:
        forward: returns the results of the operands.
        backward: takes the results and their cotangents, too, and returns the operands' cotangents.

    Returns:
        The function.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def hand_on(options: Options, operands: Operands, results: Results) -> Results:
        del options, operands
        return results

    def keep(options: Options, operands: Operands, results: Results) -> tuple[Results, Any]:
        del options
        return results, (operands, results)

    def pull_back(options: Options, residuals: Any, cotangents: Results) -> tuple[Any, None]:
        # XLA would find that both passes communicate the same keys, and would keep what the forward
        # pass received until now. It does not look through a barrier.
        operands, results, cotangents = jax.lax.optimization_barrier((*residuals, cotangents))
        return backward(options, operands, results, cotangents), None

    hand_on.defvjp(keep, pull_back)

    def attend(options: Options, operands: Operands) -> Results:
        results = forward(options, jax.lax.stop_gradient(operands))
        output, lse = jax.lax.optimization_barrier(tuple(results))
        named = checkpoint_name(output, "flash_out"), checkpoint_name(lse, "flash_lse")
        return Results(*jax.tree.leaves(hand_on(options, operands, _constant(*named))))

    return attend


def _constant(output: jax.Array, lse: jax.Array) -> Results:
    return Results(jax.lax.stop_gradient(output), jax.lax.stop_gradient(lse))
