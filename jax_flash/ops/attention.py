"""Attention with its gradient, on whichever implementation the dispatch chose.

One `jax.custom_vjp` serves all of them; its two rules choose per platform when lowered, so that a
gradient traced on a CPU and lowered for CUDA calls the kernels in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash.ops.arguments import Call
from jax_flash.ops.dense import (
    DENSE_NAMES,
    bias_gradient_shape,
    dense_operands,
    sum_to_shape,
)
from jax_flash.ops.dispatch import KernelCall, Route
from jax_flash.ops.emulation import emulate_operation
from jax_flash.ops.explicit_sharding import on_each_device, on_each_part
from jax_flash.ops.partitioning import call_operation
from jax_flash.ops.primitives import kernels_only
from jax_flash.ops.segments import segment_operands
from jax_flash.reference.batching import batch_alike, batch_as_leading_dimension
from jax_flash.reference.chunked import unify_varying_axes
from jax_flash.reference.chunked_backward import Gradients, Results, chunked_backward
from jax_flash.reference.chunked_forward import chunked_forward
from jax_flash.reference.semantics import Semantics, align_leading_dimensions
from jax_flash.spec.buffers import OPTIONAL_OPERANDS, SEGMENT_IDS
from jax_flash.spec.launch_plan import Operation

_Arrays = tuple[jax.Array, ...]
_Named = dict[str, Any]

_OFFSET_LIMIT = 2**29


def attend(call: Call, route: Route) -> Results:
    """Returns output [..., T, N, Dv] in the dtype of query, and log-sum-exp float32 [..., T, N].

    Both may be differentiated, once and in reverse mode, with respect to query, key, value, bias
    and sinks. In `jax.checkpoint` policies they are named "flash_out" and "flash_lse": a policy
    that saves both names does not run the forward pass again.
    """

    def on_this_device(*operands: Any) -> tuple[jax.Array, jax.Array]:
        results = _attend(route, *unify_varying_axes(operands))
        return results.output, results.lse

    operands: tuple[Any, ...] = call.query, call.key, call.value, call.semantics
    return Results(*on_each_device(on_this_device, *operands))


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


def _attend(
    route: Route, query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> Results:
    # The forward pass runs outside of the function with the gradient, which hands its results on:
    # JAX's next remat (jax_remat3) does not look for names inside of a custom_vjp's rule.
    without_gradient = jax.lax.stop_gradient((query, key, value, semantics))
    results = _forward(*without_gradient, route=route)
    # XLA for GPUs fuses a custom call with the update of the buffer that `scan` stacks a residual
    # in, and clones the call where its result has other uses: the kernel would run twice a layer.
    # It does not look through a barrier.
    output, lse = jax.lax.optimization_barrier(tuple(results))
    # Both names: a policy that saves only one of them would run the forward pass again.
    results = Results(checkpoint_name(output, "flash_out"), checkpoint_name(lse, "flash_lse"))
    return _with_gradient(route, query, key, value, semantics, jax.lax.stop_gradient(results))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
    route: Route,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    results: Results,
) -> Results:
    """Returns `results`, those of the other arguments, with their gradient."""
    del route, query, key, value, semantics
    return results


def _with_gradient_fwd(
    route: Route,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    semantics: Semantics,
    results: Results,
) -> tuple[Results, Any]:
    del route
    return results, (query, key, value, semantics, results)


def _with_gradient_bwd(route: Route, residuals: Any, cotangents: Results) -> tuple[Any, ...]:
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
    return gradients.query, gradients.key, gradients.value, d_semantics, None


_with_gradient.defvjp(_with_gradient_fwd, _with_gradient_bwd)


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
    query, key, value, semantics = _first_order_only((query, key, value, semantics))
    inputs = _Named(query=query, key=key, value=value)

    def plain(named: _Named, semantics: Semantics) -> _Named:
        results = chunked_forward(named["query"], named["key"], named["value"], semantics)
        return _Named(zip(("output", "lse"), results, strict=True))

    def kernels(call: KernelCall, named: _Named) -> _Named:
        return _run(call.forward, call, named, route)

    results = _on_route(route, plain, kernels, inputs, semantics, ("output", "lse"))
    return Results(*batch_alike(results["output"], results["lse"]))


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
    operands, semantics = _first_order_only(((query, key, value, *results, *cotangents), semantics))
    names = ("query", "key", "value", "output", "lse", "d_output", "d_lse")
    inputs = _Named(zip(names, operands, strict=True))
    wanted = ["d_query", "d_key", "d_value"]
    wanted += [f"d_{name}" for name in ("bias", "sinks") if getattr(semantics, name) is not None]

    def whole_bias(named: _Named, bias: jax.Array) -> jax.Array:
        leading = named["query"].shape[:-3]
        mapped = len(leading) - (query.ndim - 3)
        return jnp.broadcast_to(bias, bias_gradient_shape(bias.shape, leading, mapped))

    def plain(named: _Named, semantics: Semantics) -> _Named:
        if semantics.bias is not None:
            semantics = replace(semantics, bias=whole_bias(named, semantics.bias))
        gradients = chunked_backward(
            named["query"],
            named["key"],
            named["value"],
            semantics,
            Results(named["output"], named["lse"]),
            Results(named["d_output"], named["d_lse"]),
        )
        return _Named({f"d_{name}": array for name, array in gradients._asdict().items()})

    def kernels(call: KernelCall, named: _Named) -> _Named:
        buffers = _run(call.backward, call, named, route)
        if "sinks" in named:
            buffers["d_sinks"] = _sinks_gradient(named["sinks"], buffers)
        if call.backward_bias is not None:
            bias = whole_bias(named, named["bias"])
            operands = {**buffers, **named, "bias": bias}
            results = _run(call.backward_bias, call, operands, route)
            buffers["d_bias"] = sum_to_shape(results["d_bias"], bias.shape)
        return buffers

    gradients = _on_route(route, plain, kernels, inputs, semantics, tuple(wanted))
    d_sinks = gradients.get("d_sinks")
    if d_sinks is not None and semantics.sinks is not None:
        # Kernels have one for each batch element.
        d_sinks = jnp.sum(d_sinks, axis=tuple(range(d_sinks.ndim - semantics.sinks.ndim)))
        d_sinks = d_sinks.astype(semantics.sinks.dtype)
    d_bias = gradients.get("d_bias")
    if d_bias is not None and semantics.bias is not None:
        d_bias = d_bias.reshape(semantics.bias.shape).astype(semantics.bias.dtype)
    return Gradients(
        query=gradients["d_query"],
        key=gradients["d_key"],
        value=gradients["d_value"],
        bias=d_bias,
        sinks=d_sinks,
    )


def _on_route(
    route: Route,
    plain: Callable[[_Named, Semantics], _Named],
    kernels: Callable[[KernelCall, _Named], _Named],
    inputs: _Named,
    semantics: Semantics,
    wanted: tuple[str, ...],
) -> _Named:
    """Runs `plain` or `kernels`, whichever the route says for the platform lowered for.

    Args:
        route: which.
        plain: takes arrays by name and the semantics.
        kernels: takes the kernels' part of the route and arrays by name, those of the semantics
            among them.
        inputs: arrays by name, with equal leading dimensions.
        semantics: what the call asks for.
        wanted: names of the results.
    """
    if route.cuda_only:
        # One operand carries the refusal; nothing runs without it.
        check = partial(kernels_only, platforms=route.platforms)
        (checked,) = batch_as_leading_dimension(lambda array: (check(array),))(inputs["query"])
        inputs = inputs | {"query": checked}
    if route.kernels is None:
        return plain(inputs, _with_static_offset(semantics, route))
    named = inputs | _operands_of(semantics, inputs["query"].shape[:-3])

    def run_kernels(*arrays: jax.Array) -> _Arrays:
        assert route.kernels is not None
        results = kernels(route.kernels, _Named(zip(named, arrays, strict=True)))
        return tuple(results[name] for name in wanted)

    def run_plain(*arrays: jax.Array) -> _Arrays:
        of_arrays = _Named(zip(named, arrays, strict=True))
        others = {name: array for name, array in of_arrays.items() if name not in inputs}
        results = plain(of_arrays, _with_static_offset(replace(semantics, **others), route))
        return tuple(results[name] for name in wanted)

    def per_platform(*arrays: jax.Array) -> _Arrays:
        on_kernels = dict.fromkeys(route.platforms, run_kernels)
        return jax.lax.platform_dependent(*arrays, **on_kernels, default=run_plain)

    only_kernels = route.cuda_only or route.emulated
    run_pass = run_kernels if only_kernels else per_platform

    def run_parts(*arrays: jax.Array) -> _Arrays:
        def on_part(part: Mapping[str, jax.Array]) -> _Named:
            return _Named(zip(wanted, run_pass(*(part[name] for name in named)), strict=True))

        of_arrays = _Named(zip(named, arrays, strict=True))
        bias_shape = ()
        if "d_bias" in wanted:
            leading = of_arrays["query"].shape[:-3]
            mapped = len(leading) - (inputs["query"].ndim - 3)
            bias_shape = bias_gradient_shape(of_arrays["bias"].shape, leading, mapped)
        results = on_each_part(on_part, of_arrays, wanted, bias_shape)
        return tuple(results[name] for name in wanted)

    run = batch_as_leading_dimension(
        run_parts, [index for index, name in enumerate(named) if name in DENSE_NAMES]
    )
    return _Named(zip(wanted, run(*named.values()), strict=True))


def _run(operation: Operation, call: KernelCall, named: _Named, route: Route) -> _Named:
    if "query_segment_ids" in named:
        named = named | segment_operands(operation, named)
    named = named | dense_operands(named)
    run_operation = emulate_operation if route.emulated else call_operation
    return run_operation(
        operation, call, _Named((name, named[name]) for name in operation.operand_names)
    )


def _operands_of(semantics: Semantics, leading: tuple[Any, ...]) -> _Named:
    """Returns the arrays of the semantics that kernels take, with all leading dimensions.

    Those of bias and mask may be 1, as may their other dimensions.
    """
    named = _Named()
    aligned = align_leading_dimensions(semantics, len(leading))
    for operand in (*OPTIONAL_OPERANDS.values(), *SEGMENT_IDS):
        array = getattr(aligned, operand.name)
        if array is not None:
            trailing = array.shape[array.ndim - len(operand.axes) :]
            array = array.astype(operand.dtype)
            if not operand.broadcast:
                array = jnp.broadcast_to(array, (*leading, *trailing))
            named[operand.name] = array
    if "query_offset" in named:
        # No position is as large, and sums with positions and bounds fit int32.
        named["query_offset"] = jnp.clip(named["query_offset"], -_OFFSET_LIMIT, _OFFSET_LIMIT)
    return named


def _sinks_gradient(sinks: jax.Array, rows: _Named) -> jax.Array:
    """Returns the gradient of sinks [..., N], from the row statistics [..., N, padded T].

    A sink is a logit whose value vector is 0: its gradient is -P * delta, with P its weight.
    """
    weights = jnp.exp2(sinks[..., None] * math.log2(math.e) - rows["lse_log2"])
    return -jnp.sum(weights * rows["delta"], axis=-1)


def _with_static_offset(semantics: Semantics, route: Route) -> Semantics:
    if not route.query_offset:
        return semantics
    return replace(semantics, query_offset=jnp.int32(route.query_offset))
