"""Chunked attention under JAX's transformations, its memory, and its compilations."""

import functools
import logging
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash.reference.attention import attention_reference
from jax_flash.reference.chunked import chunked_attention
from jax_flash.reference.semantics import Semantics
from jax_flash.testing import assert_bitwise_equal

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, DIM = 4, 270, 300, 4, 2, 8
FIELDS = ("query_offset", "key_lengths", "bias", "sinks")


def _operands(*, leading: tuple[int, ...] = (BATCH,)) -> dict[str, jax.Array]:
    random = np.random.default_rng(8)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape).astype(np.float32))

    return {
        "query": normal(*leading, QUERIES, HEADS, DIM),
        "key": normal(*leading, KEYS, KEY_HEADS, DIM),
        "value": normal(*leading, KEYS, KEY_HEADS, DIM),
        "query_offset": jnp.asarray(random.integers(-9, 40, leading), jnp.int32),
        "key_lengths": jnp.asarray(random.integers(0, KEYS, leading), jnp.int32),
        "bias": normal(*leading, 1, QUERIES, KEYS),
        "sinks": normal(HEADS),
    }


def _attention(implementation: Any, operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    semantics = Semantics(
        scale=0.4, is_causal=True, window=(200, None), **{name: operands[name] for name in FIELDS}
    )
    return implementation(operands["query"], operands["key"], operands["value"], semantics)


def _chunked(operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return _attention(chunked_attention, operands)


def _oracle(operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return _attention(attention_reference, operands)


def _loss(attention: Any) -> Any:
    def loss(operands):
        output, lse = attention(operands)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse**2)

    return loss


def _gradient(attention: Any) -> Any:
    return jax.grad(_loss(attention), allow_int=True)


def _assert_close(actual: Any, expected: Any) -> None:
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if left.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


# Which operands vary over the mapped axis.
SUBSETS = [
    ("query",),
    ("key", "value"),
    ("bias",),
    ("sinks",),
    ("query_offset", "key_lengths"),
    ("query", "key", "value", "query_offset", "key_lengths", "bias"),
]


@pytest.mark.parametrize("mapped", SUBSETS, ids="+".join)
def test_vmap_over_any_operands_is_a_loop(mapped):
    one, many = _operands(leading=()), _operands()
    many["sinks"] = jnp.stack([one["sinks"], one["sinks"] + 1])
    operands = one | {name: many[name][:2] for name in mapped}
    axes = {name: 0 if name in mapped else None for name in operands}

    def results(attention, operands):
        gradients = _gradient(attention)(operands)
        assert gradients["key_lengths"].dtype == jax.dtypes.float0
        floats = {name: x for name, x in gradients.items() if x.dtype == jnp.float32}
        return attention(operands), floats

    actual = jax.jit(jax.vmap(functools.partial(results, _chunked), in_axes=(axes,)))(operands)
    for index in range(2):
        single = operands | {name: operands[name][index] for name in mapped}
        expected = results(_oracle, single)
        _assert_close(jax.tree.map(operator.itemgetter(index), actual), expected)


def test_gradient_through_nested_vmaps():
    """Heads and batch mapped apart, as unbatched libraries do, with keys shared by the heads."""
    operands = _operands()
    query, key, value = operands["query"], operands["key"][:, :, :1], operands["value"][:, :, :1]
    semantics = Semantics(scale=0.4, is_causal=True)

    def mapped(query, key, value):
        def head(query, key, value):
            output, lse = chunked_attention(query[:, None], key, value, semantics)
            return output[:, 0], lse[:, 0]

        over_heads = jax.vmap(head, in_axes=(1, None, None), out_axes=1)
        return jax.vmap(over_heads)(query, key, value)

    def loss(attention):
        return lambda *x: jnp.sum(jnp.sin(attention(*x)[0])) + jnp.sum(attention(*x)[1])

    def oracle(query, key, value):
        return attention_reference(query, key, value, semantics)

    expected = jax.grad(loss(oracle), (0, 1, 2))
    actual = jax.jit(jax.grad(loss(mapped), (0, 1, 2)))
    _assert_close(actual(query, key, value), expected(query, key, value))


def test_scan_over_layers_with_checkpoint():
    operands = _operands()

    def network(attention):
        @jax.checkpoint
        def layer(x, _):
            return attention(operands | {"query": x})[0] + x, None

        return lambda x: jnp.sum(jax.lax.scan(layer, x, length=3)[0] ** 2)

    actual = jax.jit(jax.grad(network(_chunked)))(operands["query"])
    _assert_close(actual, jax.jit(jax.grad(network(_oracle)))(operands["query"]))


@pytest.mark.parametrize(
    ("names", "forwards"), [((), 2), (("flash_out",), 2), (("flash_out", "flash_lse"), 1)]
)
def test_named_residuals_save_the_forward_pass(names, forwards):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    attention = jax.checkpoint(_chunked, policy=policy)
    program = str(jax.make_jaxpr(_gradient(attention))(_operands()))
    assert program.count("name=chunked_forward") == forwards
    assert program.count("name=chunked_backward") == 1


def _mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("d",), axis_types=(axis_type,), devices=jax.devices()[:2])


@pytest.mark.parametrize("sharded", ["batch", "heads"])
def test_shard_map_with_replicated_operands(sharded):
    """With checks of varying axes on; replicated operands get the sum of all devices' gradients."""
    operands = _operands()
    if sharded == "batch":
        operands["bias"] = operands["bias"][0]
        specs = {name: P("d") for name in operands} | {"bias": P(), "sinks": P()}
        results = (P("d"), P("d"))
    else:
        operands |= {name: operands[name][:, :, :1] for name in ("key", "value")}
        specs = {name: P() for name in operands} | {"query": P(None, None, "d"), "sinks": P("d")}
        results = (P(None, None, "d"),) * 2
    attention = jax.shard_map(
        _chunked, mesh=_mesh(AxisType.Auto), in_specs=(specs,), out_specs=results
    )
    _assert_close(jax.jit(attention)(operands), _oracle(operands))
    _assert_close(jax.jit(_gradient(attention))(operands), _gradient(_oracle)(operands))


def test_batch_sharded_over_an_explicit_axis():
    operands = _operands()
    expected = _gradient(_oracle)(operands)
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharded = {
            name: jax.device_put(x, NamedSharding(mesh, P() if name == "sinks" else P("d")))
            for name, x in operands.items()
        }
        actual = jax.jit(_gradient(_chunked))(sharded)
        assert jax.typeof(actual["key"]).sharding.spec[0] == "d"
        _assert_close(jax.device_get(actual), expected)


def test_two_runs_have_the_same_bits():
    gradient = jax.jit(_gradient(_chunked))
    first, second = (
        {name: np.asarray(x) for name, x in gradient(_operands()).items() if x.dtype == np.float32}
        for _ in range(2)
    )
    assert_bitwise_equal(first, second)


def test_second_call_compiles_nothing(caplog):
    operands = _operands()

    def compilations(operands: dict[str, jax.Array]) -> list[str]:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            jax.block_until_ready(_chunked(operands))
        return [message for message in caplog.messages if "chunked_forward" in message]

    assert compilations(operands)
    assert not compilations(operands | {"query_offset": operands["query_offset"] + 1})


def _peak_temporary_bytes(implementation: Any, *, differentiate: bool) -> int:
    operand = jax.ShapeDtypeStruct((32768, 1, 64), jnp.float32)
    semantics = Semantics(scale=0.125, is_causal=True)

    def forward(query, key, value):
        return implementation(query, key, value, semantics)

    def loss(query, key, value):
        return jnp.sum(forward(query, key, value)[0])

    function = jax.grad(loss, (0, 1, 2)) if differentiate else forward
    compiled = jax.jit(function).lower(operand, operand, operand).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not tell"
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("differentiate", [False, True], ids=["forward", "gradient"])
def test_memory_is_linear(differentiate):
    """At T = S = 32768 the logits of one head alone are 4 GiB."""
    assert _peak_temporary_bytes(chunked_attention, differentiate=differentiate) < 64 * 2**20
    assert _peak_temporary_bytes(attention_reference, differentiate=differentiate) > 4 * 2**30


@pytest.mark.parametrize("mapped", ["query", "key", "value"])
def test_shared_operands_get_the_sum_of_their_uses(mapped: str) -> None:
    """With only value mapped, the log-sum-exp is not: JAX then hands its cotangent to every use."""
    random = np.random.default_rng(9)
    shapes = {"query": (5, 2, 8), "key": (7, 2, 8), "value": (7, 2, 8)}
    operands = {
        name: jnp.asarray(
            random.standard_normal((3, *shape) if name == mapped else shape).astype(np.float32)
        )
        for name, shape in shapes.items()
    }
    axes = {name: 0 if name == mapped else None for name in shapes}

    def loss(implementation: Any, operands: dict[str, jax.Array]) -> jax.Array:
        def one(operands: dict[str, jax.Array]) -> jax.Array:
            output, lse = implementation(
                operands["query"], operands["key"], operands["value"], Semantics(scale=0.3)
            )
            return jnp.sum(output) + jnp.sum(jnp.sin(lse))

        return jnp.sum(jax.vmap(one, in_axes=(axes,))(operands))

    got, want = (
        jax.grad(functools.partial(loss, implementation))(operands)
        for implementation in (chunked_attention, attention_reference)
    )
    for name in shapes:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, err_msg=name)
