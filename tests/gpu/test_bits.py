"""Which bits of the kernels' results can be relied on (docs/numerics.md)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.testing import Case, Inputs, assert_bitwise_equal, make_inputs, results_and_gradients

from .conftest import kernels

REPEATS = int(os.environ.get("JAX_FLASH_TEST_REPEATS", "20"))
"""Runs that must agree; raise it for a soak test."""

BASE = Case(
    name="bits",
    tags=frozenset({"full"}),
    queries=900,
    keys=900,
    batch=3,
    heads=8,
    key_heads=2,
    head_dim=128,
    value_dim=128,
    is_causal=True,
)
SIZES = {
    "causal-d128": BASE,
    "full-d128": replace(BASE, is_causal=False),
    "window-d128": replace(BASE, window=(200, 0)),
    "causal-d64": replace(BASE, head_dim=64, value_dim=64),
    "full-d64-float16": replace(BASE, head_dim=64, value_dim=64, is_causal=False, dtype="float16"),
    "causal-d192-dv128": replace(BASE, head_dim=192, value_dim=128),
    "full-d256": replace(BASE, head_dim=256, value_dim=256, is_causal=False),
}
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "local_window_size": (300, 0)},
)
each_size = pytest.mark.parametrize("case", SIZES.values(), ids=SIZES.keys())


def run(inputs: Inputs, query_offset: int = 0) -> dict[str, np.ndarray]:
    return results_and_gradients(kernels(deterministic=True, query_offset=query_offset), inputs)


def part(inputs: Inputs, batch: Any = slice(None), rows: Any = slice(None)) -> Inputs:
    """The inputs of some batch elements, or of some positions (of queries and keys)."""
    names = ("query", "key", "value", "d_output", "d_lse")
    return replace(inputs, **{name: getattr(inputs, name)[batch, rows] for name in names})


@pytest.mark.parametrize("length", [900, 4096])
@each_size
def test_deterministic_gradients_are_the_same_on_every_run(case: Case, length: int) -> None:
    inputs = make_inputs(replace(case, queries=length, keys=length))
    d_output = inputs.d_output

    @jax.jit
    def gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return kernels(deterministic=True)(query, key, value, inputs.semantics)[0]

        return jax.vjp(attention, query, key, value)[1](d_output)

    @jax.jit
    def count_differences(left: Any, right: Any) -> jax.Array:
        bits = [
            jnp.sum(a.view(jnp.uint16) != b.view(jnp.uint16))
            for a, b in zip(left, right, strict=True)
        ]
        return jnp.stack(bits)

    operands = inputs.query, inputs.key, inputs.value
    first = gradients(*operands)
    for _ in range(REPEATS - 1):
        assert count_differences(first, gradients(*operands)).tolist() == [0, 0, 0]


@each_size
def test_without_deterministic_only_dq_may_vary(case: Case) -> None:
    inputs = make_inputs(case)
    first = results_and_gradients(kernels(), inputs)
    for _ in range(REPEATS // 4):
        again = results_and_gradients(kernels(), inputs)
        for name in ("output", "lse", "d_key", "d_value"):
            assert_bitwise_equal({name: again[name]}, {name: first[name]})


@pytest.mark.parametrize("name", ["causal-d192-dv128", "full-d256"])
def test_large_head_dimensions_have_one_result_in_both_modes(name: str) -> None:
    inputs = make_inputs(SIZES[name])
    assert_bitwise_equal(results_and_gradients(kernels(), inputs), run(inputs))


@each_size
def test_a_batch_element_alone_has_the_same_bits(case: Case) -> None:
    inputs = make_inputs(case)
    together = run(inputs)
    for element in range(case.batch):
        chosen = slice(element, element + 1)
        assert_bitwise_equal(
            run(part(inputs, batch=chosen)),
            {name: array[chosen] for name, array in together.items()},
        )


@each_size
def test_a_group_of_heads_alone_has_the_same_bits(case: Case) -> None:
    inputs = make_inputs(case)
    together = run(inputs)
    alone = replace(
        inputs,
        query=inputs.query[:, :, 4:],
        key=inputs.key[:, :, 1:],
        value=inputs.value[:, :, 1:],
        d_output=inputs.d_output[:, :, 4:],
        d_lse=inputs.d_lse[:, :, 4:],
    )
    first = {"key": 1, "value": 1}
    expected = {
        name: array[:, :, first.get(name.removeprefix("d_"), 4) :]
        for name, array in together.items()
    }
    assert_bitwise_equal(run(alone), expected)


@pytest.mark.parametrize("length", [1, 64, 129, 500])
@each_size
def test_forward_rows_do_not_depend_on_the_rows_after_them(case: Case, length: int) -> None:
    inputs = make_inputs(replace(case, is_causal=True))
    long = run(inputs)
    short = run(part(inputs, rows=slice(length)))
    for name in ("output", "lse"):
        assert_bitwise_equal({name: short[name]}, {name: long[name][:, :length]})


@each_size
def test_forward_rows_do_not_depend_on_the_other_queries(case: Case) -> None:
    inputs = make_inputs(replace(case, is_causal=False))
    names = ("query", "d_output", "d_lse")
    some = replace(inputs, **{name: getattr(inputs, name)[:, 301:333] for name in names})
    # Where positions matter (windows), the rows keep theirs.
    all_rows, some_rows = run(inputs), run(some, query_offset=301)
    for name in ("output", "lse", "d_query"):
        assert_bitwise_equal({name: some_rows[name]}, {name: all_rows[name][:, 301:333]})


def test_offsets_beyond_two_to_the_31() -> None:
    """The last rows of a query of more than 2**31 elements, against those rows alone."""
    heads, head_dim, keys = 128, 128, 200
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32)).astype(jnp.bfloat16)

    block = normal(1, 1024, heads, head_dim)
    query = jnp.tile(block, (1, 129, 1, 1))
    assert query.size > 2**31
    key, value = normal(1, keys, 1, head_dim), normal(1, keys, 1, head_dim)

    @jax.jit
    def output_and_gradient(query: jax.Array) -> tuple[jax.Array, jax.Array]:
        def attention(query: jax.Array) -> jax.Array:
            return jax_flash.attention(
                query, key, value, deterministic_bwd=True, implementation="cuda"
            )

        output, pull_back = jax.vjp(attention, query)
        return output, pull_back(output)[0]

    long, short = output_and_gradient(query), output_and_gradient(block)
    for name, of_all, of_last in zip(("output", "d_query"), long, short, strict=True):
        assert_bitwise_equal({name: np.asarray(of_all[:, -1024:])}, {name: np.asarray(of_last)})


@pytest.mark.parametrize("length", [130, 1100])
@each_size
def test_many_tiles_a_block(case: Case, length: int) -> None:
    """Blocks that work through several tiles, of odd numbers of heads, give the bits of few."""
    wide = replace(case, batch=5, heads=33, key_heads=33, queries=length, keys=length)
    inputs = make_inputs(wide)
    attention = kernels(deterministic=False)
    whole = results_and_gradients(attention, inputs)
    for batch in range(wide.batch):
        alone = results_and_gradients(attention, part(inputs, slice(batch, batch + 1)))
        for name, array in alone.items():
            ours = whole[name][batch : batch + 1]
            if name == "d_query":  # parts of other blocks are added in any order
                np.testing.assert_allclose(
                    ours.astype(np.float32), array.astype(np.float32), rtol=0.05, atol=0.01
                )
            else:
                assert_bitwise_equal({name: ours}, {name: array})


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_queries_have_the_bits_of_many(dtype: str, options: dict[str, Any]) -> None:
    """Up to D=64 they run on a kernel of their own."""
    random = np.random.default_rng(0)
    shape, rows = (2, 1300, 3, 64), slice(1100, 1300)
    query, key, value = (
        jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype) for _ in range(3)
    )
    of_rows: dict[str, Any] = {"query_offset": 1100} if options else {}
    calls = (query, options), (query[:, rows], options | of_rows)
    kernels = [
        jax_flash.explain(queries, key, value, **given).forward[0].name for queries, given in calls
    ]
    assert [name.endswith("_short") for name in kernels] == [False, True]
    many, few = (
        jax_flash.attention(
            queries, key, value, **given, return_residual=True, implementation="cuda"
        )
        for queries, given in calls
    )
    for all_rows, last_rows in zip(many, few, strict=True):
        assert_bitwise_equal({"": np.asarray(all_rows[:, rows])}, {"": np.asarray(last_rows)})
