"""Attention with its gradient, on whichever implementation the dispatch chose.

One `jax.custom_vjp` serves all of them; its two rules choose per platform when lowered, so that a
gradient traced on a CPU and lowered for CUDA calls the kernels in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash.ops.arguments import Call
from jax_flash.ops.dispatch import KernelCall, Route
from jax_flash.ops.emulation import emulate_operation
from jax_flash.ops.ffi_calls import call_operation
from jax_flash.ops.primitives import kernels_only
from jax_flash.reference.batching import batch_alike, batch_as_leading_dimension
from jax_flash.reference.chunked import unify_varying_axes
from jax_flash.reference.chunked_backward import Gradients, Results, chunked_backward
from jax_flash.reference.chunked_forward import chunked_forward
from jax_flash.reference.semantics import Semantics

_Arrays = tuple[jax.Array, ...]


def attend(call: Call, route: Route) -> Results:
    """Returns output [..., T, N, Dv] in the dtype of query, and log-sum-exp float32 [..., T, N].

    Both may be differentiated, once and in reverse mode, with respect to query, key, value, bias
    and sinks. In `jax.checkpoint` policies they are named "flash_out" and "flash_lse": a policy
    that saves both names does not run the forward pass again.
    """
    operands = call.query, call.key, call.value, call.semantics
    return _attend(route, *unify_varying_axes(operands))


def forward_pass(call: Call, route: Route) -> Results:
    """Returns the results of `attend`, which may not be differentiated.

    With `backward_pass` it is for those who define a gradient of more than one call.
    """
    operands = call.query, call.key, call.value, call.semantics
    return _forward(*unify_varying_axes(operands), route=route)


def backward_pass(call: Call, route: Route, results: Results, cotangents: Results) -> Gradients:
    """Returns what the keys of one call contribute to the gradients.

    Args:
        call: its keys and values may be a part of those that the queries attend to.
        route: where it runs.
        results: output and log-sum-exp over all keys (and sinks) that the queries attend to.
        cotangents: of these results.

    Returns:
        The gradients of query (the part that goes through these keys), key, value and sinks.
    """
    operands = call.query, call.key, call.value, call.semantics, results, cotangents
    return _backward(*unify_varying_axes(operands), route=route)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    route: Route, query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> Results:
    return _forward(query, key, value, semantics, route=route)


def _attend_fwd(
    route: Route, query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> tuple[Results, Any]:
    output, lse = _forward(query, key, value, semantics, route=route)
    # XLA for GPUs fuses a custom call with the update of the buffer that `scan` stacks a residual
    # in, and clones the call where its result has other uses: the kernel would run twice a layer.
    # It does not look through a barrier.
    output, lse = jax.lax.optimization_barrier((output, lse))
    # Both names: a policy that saves only one of them would run the forward pass again.
    results = Results(checkpoint_name(output, "flash_out"), checkpoint_name(lse, "flash_lse"))
    return results, (query, key, value, semantics, results)


def _attend_bwd(route: Route, residuals: Any, cotangents: Results) -> tuple[Any, ...]:
    query, key, value, semantics, results = residuals
    gradients = _backward(query, key, value, semantics, results, cotangents, route=route)
    # None stands for the cotangent of an integer or bool array, which has no gradient.
    d_semantics = Semantics(
        scale=semantics.scale,
        is_causal=semantics.is_causal,
        window=semantics.window,
        soft_cap=semantics.soft_cap,
        bias=gradients.bias,
        sinks=gradients.sinks,
    )
    return gradients.query, gradients.key, gradients.value, d_semantics


_attend.defvjp(_attend_fwd, _attend_bwd)


@jax.custom_jvp
def _first_order_only(operands: Any) -> Any:
    """Returns its argument, and raises when differentiated."""
    return operands


@_first_order_only.defjvp
def _refuse_second_order(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "The gradient of jax_flash.attention was differentiated again, and there is no second "
        "derivative of it. For second derivatives use jax.nn.dot_product_attention(..., "
        'implementation="xla"), which takes T x S memory.'
    )


# Compiled as a whole when called eagerly, and traced once for equal layers of a model; inlined, so
# that what the caller's jit sees is the same either way.
@partial(jax.jit, static_argnames="route", inline=True)
def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics, *, route: Route
) -> Results:
    def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> _Arrays:
        return tuple(chunked_forward(query, key, value, _with_static_offset(semantics, route)))

    def kernels(call: KernelCall, *operands: jax.Array) -> _Arrays:
        named = dict(zip(call.forward.operand_names, operands, strict=True))
        run_operation = emulate_operation if route.emulated else call_operation
        buffers = run_operation(call.forward, call, named)
        return buffers["output"], buffers["lse"]

    query, key, value, semantics = _first_order_only((query, key, value, semantics))
    return Results(*batch_alike(*_on_route(route, plain, kernels, query, key, value)))


@partial(jax.jit, static_argnames="route", inline=True)
def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    results: Results,
    cotangents: Results,
    *,
    route: Route,
) -> Gradients:
    def plain(*operands: jax.Array) -> Gradients:
        query, key, value, *rows = operands
        offset_semantics = _with_static_offset(semantics, route)
        return chunked_backward(
            query, key, value, offset_semantics, Results(*rows[:2]), Results(*rows[2:])
        )

    def kernels(call: KernelCall, *operands: jax.Array) -> _Arrays:
        named = dict(zip(call.backward.operand_names, operands, strict=True))
        run_operation = emulate_operation if route.emulated else call_operation
        buffers = run_operation(call.backward, call, named)
        return buffers["d_query"], buffers["d_key"], buffers["d_value"]

    operands, semantics = _first_order_only(((query, key, value, *results, *cotangents), semantics))
    if route.kernels is None:
        return _on_route(route, plain, kernels, *operands)
    # Calls with bias or sinks have no kernels, so their gradients are no results here.
    d_query, d_key, d_value = _on_route(
        route, lambda *operands: tuple(plain(*operands)[:3]), kernels, *operands
    )
    return Gradients(query=d_query, key=d_key, value=d_value, bias=None, sinks=None)


def _on_route(
    route: Route,
    plain: Callable[..., Any],
    kernels: Callable[..., _Arrays],
    *operands: jax.Array,
) -> Any:
    """Runs `kernels` or `plain`, whichever the route says for the platform lowered for."""
    if route.cuda_only:
        # One operand carries the refusal; nothing runs without it.
        check = partial(kernels_only, platforms=route.platforms)
        (checked,) = batch_as_leading_dimension(lambda array: (check(array),))(operands[0])
        operands = (checked, *operands[1:])
    if route.kernels is None:
        return plain(*operands)
    run_kernels = partial(kernels, route.kernels)
    if route.cuda_only or route.emulated:
        return batch_as_leading_dimension(run_kernels)(*operands)

    def per_platform(*operands: jax.Array) -> _Arrays:
        on_kernels = dict.fromkeys(route.platforms, run_kernels)
        return jax.lax.platform_dependent(*operands, **on_kernels, default=plain)

    return batch_as_leading_dimension(per_platform)(*operands)


def _with_static_offset(semantics: Semantics, route: Route) -> Semantics:
    if not route.query_offset:
        return semantics
    return replace(semantics, query_offset=jnp.int32(route.query_offset))
