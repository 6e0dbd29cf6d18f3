"""What else JAX does with a function: donation, NaN checks, abstract evaluation, threads."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_flash

from .programs import (
    BATCH_AND_HEADS,
    attention,
    expect_equal,
    make_mesh,
    make_operands,
    put,
    text_of,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_donated_operands() -> None:
    """The query's memory becomes the output's, which has its shape."""
    operands = make_operands(2)
    expected = jax.jit(attention)(*operands)
    donating = jax.jit(attention, donate_argnums=0)
    program = donating.lower(*operands).compile()
    assert "input_output_alias={ {0}: (0, {}" in text_of(program)
    query = jnp.array(operands[0])
    expect_equal(program(query, *operands[1:]), expected)
    assert query.is_deleted()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_operands_of_a_gradient_on_a_mesh() -> None:
    mesh = make_mesh(AxisType.Explicit)
    operands = make_operands(8)
    expected = jax.jit(with_gradients(attention))(*operands)
    with jax.set_mesh(mesh):
        sharded = put(mesh, operands, (BATCH_AND_HEADS,) * 3)
        actual = jax.jit(with_gradients(attention), donate_argnums=(0, 1, 2))(*sharded)
    expect_equal(actual, expected)


def test_nan_checks_find_nothing_in_padding() -> None:
    """Padding may hold NaN, and rows without keys have log-sum-exp -inf: no result is NaN."""
    query, key, value = (x.at[:, 6:].set(jnp.nan) for x in make_operands(2))
    lengths = np.array([6, 0], np.int32)

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        output, _ = attention(
            query, key, value, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )
        return jnp.sum(output.astype(jnp.float32) ** 2)

    with jax.debug_nans(True):
        gradients = jax.jit(jax.grad(function, (0, 1, 2)))(query, key, value)
        for gradient in gradients:
            assert np.isfinite(np.asarray(gradient, np.float32)).all()
            assert not np.asarray(gradient[1], np.float32).any()


def test_nan_checks_find_a_nan() -> None:
    query, key, value = make_operands(2)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(attention)(query.at[0, 0, 0, 0].set(jnp.nan), key, value)


def test_abstract_evaluation_runs_nothing(cpu_kernels: Any) -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_operands(2)]
    before = cpu_kernels.calls()
    (output, lse), gradients = jax.eval_shape(with_gradients(attention), *shapes)
    assert (output.shape, output.dtype) == ((2, 8, 8, 16), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 8, 8), jnp.float32)
    assert [(g.shape, g.dtype) for g in gradients] == [(s.shape, s.dtype) for s in shapes]
    jax.jit(with_gradients(attention)).lower(*shapes).compile()
    assert cpu_kernels.calls() == before


def test_threads_that_trace_and_run_at_once(cpu_kernels: Any) -> None:
    """Eight threads, each with another shape or scale, a compilation of its own and three runs."""
    jax.clear_caches()
    cases = [(make_operands(1 + index % 4), 0.1 * (1 + index // 4)) for index in range(8)]
    results: dict[int, Any] = {}
    ready = threading.Barrier(len(cases))

    def work(index: int) -> None:
        operands, scale = cases[index]
        function = jax.jit(with_gradients(lambda *x: attention(*x, scale=scale)))
        ready.wait()
        for _ in range(3):
            results[index] = jax.block_until_ready(function(*operands))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    before = cpu_kernels.calls()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = cpu_kernels.calls()
    assert [b - a for a, b in zip(before, after, strict=True)] == [24, 24]
    for index, (operands, scale) in enumerate(cases):
        function = with_gradients(lambda *x, scale=scale: attention(*x, scale=scale))
        expect_equal(results[index], function(*operands))


def test_equal_calls_are_one_and_unused_ones_none(cpu_kernels: Any) -> None:
    operands = make_operands(2)

    def twice(*operands: jax.Array) -> Any:
        return attention(*operands)[0] + attention(*operands)[0]

    def unused(*operands: jax.Array) -> Any:
        attention(*operands)
        return operands[0]

    assert cpu_kernels.calls_of(jax.jit(unused), *operands) == (0, 0)
    expect_equal(jax.jit(twice)(*operands), 2 * attention(*operands)[0])


def test_a_named_implementation_is_part_of_the_jit_key(cpu_kernels: Any) -> None:
    operands = make_operands(2)
    function = jax.jit(jax_flash.attention, static_argnames=("implementation", "is_causal"))
    for implementation, calls in (("xla", 0), ("cuda", 1), ("xla", 0)):
        run = partial(function, implementation=implementation, is_causal=True)
        assert cpu_kernels.calls_of(run, *operands) == (calls, 0)


@pytest.mark.parametrize("asked_for", [True, False])
def test_the_gradient_of_a_bias_is_computed_where_it_is_asked_for(asked_for: bool) -> None:
    def loss(query: jax.Array, bias: jax.Array) -> jax.Array:
        output, _ = attention(query, *others, bias=bias)
        return jnp.sum(output.astype(jnp.float32))

    query, *others = make_operands(2)
    bias = jnp.ones((query.shape[-3], others[0].shape[-3]), jnp.float32)
    gradient = jax.grad(loss, (0, 1) if asked_for else 0)
    text = text_of(jax.jit(gradient).lower(query, bias).compile())
    assert text.count('custom_call_target="jax_flash_backward_v1"') == 1
    assert text.count('custom_call_target="jax_flash_backward_bias_v1"') == asked_for
