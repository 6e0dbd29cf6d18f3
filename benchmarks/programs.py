"""The compiled programs that are timed: one for each problem, implementation and direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.problems import BACKWARD, BOTH, FORWARD, MATRIX_SIZE, directions_of
from jax_flash.testing import Case

Call = Callable[[], Any]
"""Starts the work and returns its results, which may not be finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What one implementation has to do for one problem, compiled.

    Attributes:
        extras: operands that every forward pass takes after query, key and value.
        forward: (query, key, value) -> output.
        forward_for_backward: the same -> output and what the backward pass needs of it.
        backward: (what it needs, d_output) -> d_query, d_key, d_value.
        both: (d_output, query, key, value) -> output and gradients, as a training step computes
            them; None where that is not timed.
    """

    extras: tuple[jax.Array, ...]
    forward: Callable[..., Any] | None
    forward_for_backward: Callable[..., Any]
    backward: Callable[..., Any]
    both: Callable[..., Any] | None

    def calls(self, operands: tuple[jax.Array, ...]) -> dict[str, Call]:
        """Returns the calls to time, by direction.

        What the backward pass needs of the forward pass is computed here, once.

        Args:
            operands: query, key, value, d_output.
        """
        *inputs, d_output = operands
        inputs = *inputs, *self.extras
        needed = self.forward_for_backward(*inputs)[1]
        calls = {BACKWARD: lambda: self.backward(needed, d_output)}
        if (forward := self.forward) is not None:
            calls = {FORWARD: lambda: forward(*inputs), **calls}
        if (both := self.both) is not None:
            calls[BOTH] = lambda: both(d_output, *inputs)
        return calls


def compile_programs(
    case: Case,
    attention: Callable[..., jax.Array],
    *,
    extras: tuple[jax.Array, ...] = (),
    with_forward: bool = True,
) -> Programs:
    """Compiles for the default device, in any thread.

    Args:
        case: says which operands there are.
        attention: (query, key, value, *extras) -> output.
        extras: operands without gradients, such as segment ids: not constants of the program, so
            that what is computed of them is timed.
        with_forward: whether the forward pass alone is wanted, too.
    """
    *inputs, d_output = operand_shapes(case)

    def first_half(query: jax.Array, key: jax.Array, value: jax.Array, *extras: jax.Array) -> Any:
        return jax.vjp(lambda *arrays: attention(*arrays, *extras), query, key, value)

    def both(d_output: jax.Array, *operands: jax.Array) -> Any:
        output, pull_back = first_half(*operands)
        return output, pull_back(d_output)

    traced = jax.jit(first_half).trace(*inputs, *extras)
    needed = traced.out_info[1]
    second_half = jax.jit(lambda pull_back, d_output: pull_back(d_output))
    both_halves = jax.jit(both) if BOTH in directions_of(case) else None
    return Programs(
        extras=extras,
        forward=jax.jit(attention).lower(*inputs, *extras).compile() if with_forward else None,
        forward_for_backward=traced.lower().compile(),
        backward=second_half.lower(needed, d_output).compile(),
        both=both_halves and both_halves.lower(d_output, *inputs, *extras).compile(),
    )


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of query, key, value and the output's cotangent."""
    rows, keys = (case.batch, case.queries, case.heads), (case.batch, case.keys, case.key_heads)
    shapes = (
        (*rows, case.head_dim),
        (*keys, case.head_dim),
        (*keys, case.value_dim),
        (*rows, case.value_dim),
    )
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in shapes]


def make_operands(case: Case) -> tuple[jax.Array, ...]:
    """Returns query, key, value and the output's cotangent: normal numbers."""
    shapes = operand_shapes(case)
    seeds = jax.random.split(jax.random.key(0), len(shapes))
    # Of one dimension when they are drawn, so that problems of one size share a compiled program.
    return tuple(
        jax.random.normal(seed, (shape.size,), shape.dtype).reshape(shape.shape)
        for seed, shape in zip(seeds, shapes, strict=True)
    )


def matrix_product_call() -> Call:
    """Returns a call of XLA's product of two square bfloat16 matrices, compiled."""
    matrices = jax.random.normal(
        jax.random.key(1), (2, MATRIX_SIZE, MATRIX_SIZE), jnp.dtype("bfloat16")
    )
    left, right = matrices
    program = jax.jit(jnp.matmul).lower(left, right).compile()
    return lambda: program(left, right)
