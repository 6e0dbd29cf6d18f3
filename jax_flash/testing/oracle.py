"""Results and gradients of an implementation, and of the float64 oracle, as plain numpy arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.semantics import Semantics
from jax_flash.testing.inputs import Inputs

Implementation = Callable[[jax.Array, jax.Array, jax.Array, Semantics], tuple[jax.Array, jax.Array]]


CompilerOptions = Mapping[str, str | int | bool]


def results_and_gradients(
    implementation: Implementation,
    inputs: Inputs,
    *,
    compiler_options: CompilerOptions | None = None,
) -> dict[str, np.ndarray]:
    """Runs an implementation, compiled, forward and backward.

    Args:
        implementation: (query, key, value, semantics) -> (output, log-sum-exp). Compiled once for
            each shape, so pass the same function, not a new lambda, each time.
        inputs: its operands and the cotangents of its results.
        compiler_options: of `jax.jit`.

    Returns:
        output, lse, d_query, d_key, d_value, and d_bias and d_sinks where these are given; each
        in the dtype that the implementation returned.
    """
    floats = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    for name in ("bias", "sinks"):
        if getattr(inputs.semantics, name) is not None:
            floats[name] = getattr(inputs.semantics, name)
    # By default XLA may keep a rounded value at the precision it had: an "ideal" that has rounded
    # less than the algorithm says would make every other implementation look worse.
    options = {"xla_allow_excess_precision": False} | dict(compiler_options or {})
    options = tuple(sorted(options.items()))
    run = _compiled(implementation, options)
    results = run(floats, inputs.semantics, inputs.d_output, inputs.d_lse)
    return {name: np.asarray(array) for name, array in results.items()}


@functools.lru_cache(maxsize=256)
def _compiled(implementation: Implementation, options: tuple) -> Callable[..., dict]:
    def run(floats, semantics, d_output, d_lse):
        def attention(floats):
            given = {name: floats[name] for name in floats if name in ("bias", "sinks")}
            return implementation(
                floats["query"], floats["key"], floats["value"], replace(semantics, **given)
            )

        (output, lse), pull_back = jax.vjp(attention, floats)
        (gradients,) = pull_back((d_output.astype(output.dtype), d_lse.astype(lse.dtype)))
        results = {"output": output, "lse": lse}
        return results | {f"d_{name}": gradients[name] for name in floats}

    return jax.jit(run, compiler_options=dict(options))


def float64_oracle(
    inputs: Inputs, *, compiler_options: CompilerOptions | None = None
) -> dict[str, np.ndarray]:
    """What `results_and_gradients` would return if arithmetic were exact, very nearly.

    Runs `attention_reference` in float64 on the default device: quadratic memory, slow on GPUs.

    Args:
        inputs: of any dtype; their values are taken as exact.
        compiler_options: of `jax.jit`.

    Returns:
        The same names, all in float64.
    """

    def widen(array):
        array = np.asarray(array)
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.asarray(array.astype(np.float64) if is_float else array)

    with jax.enable_x64(True):
        wide = Inputs(
            query=widen(inputs.query),
            key=widen(inputs.key),
            value=widen(inputs.value),
            semantics=jax.tree.map(widen, inputs.semantics),
            d_output=widen(inputs.d_output),
            d_lse=widen(inputs.d_lse),
        )
        return results_and_gradients(_float64_reference, wide, compiler_options=compiler_options)


def _float64_reference(
    query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
) -> tuple[jax.Array, jax.Array]:
    return attention_reference(query, key, value, semantics, precision_dtype=jnp.float64)
