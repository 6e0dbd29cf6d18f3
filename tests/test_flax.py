"""The adapter inside Flax's attention modules, against Flax's own attention."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_flash

B, L, FEATURES, HEADS = 2, 7, 32, 4


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(3), (B, L, FEATURES))


def nnx_module(attention_fn: Any = None, **options: Any) -> nnx.MultiHeadAttention:
    functions: dict[str, Any] = {} if attention_fn is None else {"attention_fn": attention_fn}
    return nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=FEATURES,
        decode=False,
        rngs=nnx.Rngs(0),
        **functions,
        **options,
    )


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, expected
    )


MASKS = {
    "none": lambda x: None,
    "causal, as Flax makes it": lambda x: nnx.make_causal_mask(x[..., 0]),
    "causal, bool": lambda x: nnx.make_causal_mask(x[..., 0], dtype=jnp.bool_),
    "padding": lambda x: nnx.make_attention_mask(x[..., 0] > -9, jnp.arange(L)[None] < 5),
}


@pytest.mark.parametrize("case", MASKS)
def test_nnx(case: str, x: jax.Array) -> None:
    mask = MASKS[case](x)

    def loss(module: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(module(x, mask=mask)))

    results = [
        nnx.value_and_grad(loss)(nnx_module(function), x)
        for function in (jax_flash.flax.attention_fn(), None)
    ]
    assert_close(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]))


def test_nnx_causal_in_a_call_or_always(x: jax.Array) -> None:
    expected = nnx_module()(x, is_causal=True)
    assert_close(nnx_module(jax_flash.flax.attention_fn())(x, is_causal=True), expected)
    assert_close(nnx_module(jax_flash.flax.attention_fn(is_causal=True))(x), expected)


def test_nnx_under_jit_and_split(x: jax.Array) -> None:
    module = nnx_module(jax_flash.flax.attention_fn(is_causal=True))
    assert_close(nnx.jit(lambda module, x: module(x))(module, x), module(x))
    definition, state = nnx.split(module)
    same, _ = nnx.split(nnx_module(jax_flash.flax.attention_fn(is_causal=True)))
    other, _ = nnx.split(nnx_module(jax_flash.flax.attention_fn()))
    assert definition == same
    assert hash(definition) == hash(same)
    assert definition != other
    assert_close(nnx.merge(definition, state)(x), module(x))


def test_nnx_decoding_with_a_cache(x: jax.Array) -> None:
    ours, theirs = nnx_module(jax_flash.flax.attention_fn()), nnx_module()
    whole = theirs(x, is_causal=True)
    for module in (ours, theirs):
        module.init_cache((B, L + 3, FEATURES))
    for position in range(L):
        step = x[:, position : position + 1]
        output = ours(step, decode=True)
        assert_close(output, theirs(step, decode=True))
        assert_close(output, whole[:, position : position + 1])


def test_nnx_decoding_with_a_fixed_causal_mask_is_refused(x: jax.Array) -> None:
    module = nnx_module(jax_flash.flax.attention_fn(is_causal=True))
    module.init_cache((B, L + 3, FEATURES))
    with pytest.raises(ValueError, match="T=1 queries and S=10 keys") as caught:
        module(x[:, :1], decode=True)
    assert "the mask of the cache is causal already" in str(caught.value)


def test_a_query_offset_allows_other_lengths() -> None:
    query, key = jnp.ones((1, 2, 4, 8)), jax.random.normal(jax.random.key(0), (1, 5, 4, 8))
    function = jax_flash.flax.attention_fn(is_causal=True, query_offset=3)
    expected = jax_flash.attention(query, key, key, is_causal=True, query_offset=3)
    assert_close(function(query, key, key), expected)


@pytest.mark.parametrize("case", MASKS)
def test_linen(case: str, x: jax.Array) -> None:
    mask = MASKS[case](x)
    modules: list[Any] = [
        linen.MultiHeadDotProductAttention(
            num_heads=HEADS, attention_fn=jax_flash.flax.attention_fn()
        ),
        linen.MultiHeadDotProductAttention(num_heads=HEADS),
    ]
    parameters = modules[1].init(jax.random.key(1), x)

    def gradient(module: Any) -> Any:
        def loss(parameters: Any) -> jax.Array:
            return jnp.sum(jnp.sin(module.apply(parameters, x, mask=mask)))

        return jax.value_and_grad(loss)(parameters)

    assert_close(gradient(modules[0]), gradient(modules[1]))


def test_linen_passes_every_argument_by_name() -> None:
    """Linen drops arguments that the signature lacks, so none that it knows may be lacking."""
    theirs = set(inspect.signature(linen.dot_product_attention).parameters)
    ours = set(inspect.signature(jax_flash.flax.attention_fn()).parameters)
    # einsum_dot_general is an older spelling of the two overrides, which the module never passes.
    assert theirs - ours <= {"einsum_dot_general"}


def test_dtype_promotes_as_flax_does(x: jax.Array) -> None:
    options = {"dtype": jnp.bfloat16}
    ours = nnx_module(jax_flash.flax.attention_fn(), **options)(x)
    theirs = nnx_module(**options)(x)
    assert ours.dtype == theirs.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0.05, atol=0.02
    )


def test_options_reach_attention(x: jax.Array) -> None:
    query = x.reshape(B, L, HEADS, -1)
    function = jax_flash.flax.attention_fn(
        scale=0.4, local_window_size=(2, 0), logits_soft_cap=3.0, implementation="xla"
    )
    expected = jax_flash.attention(
        query, query, query, scale=0.4, local_window_size=(2, 0), logits_soft_cap=3.0
    )
    assert_close(function(query, query, query), expected)
    biased = function(query, query, query, bias=jnp.arange(7.0))
    assert float(jnp.max(jnp.abs(biased - expected))) > 0.01
    with pytest.raises((NotImplementedError, RuntimeError), match="cuda"):
        jax_flash.flax.attention_fn(implementation="cuda")(query, query, query)


def test_dropout_is_refused_unless_deterministic(x: jax.Array) -> None:
    module = nnx_module(jax_flash.flax.attention_fn(), dropout_rate=0.25)
    with pytest.raises(NotImplementedError, match=r"dropout_rate is 0\.25") as caught:
        module(x, deterministic=False)
    assert "dropout_rate=0.0" in str(caught.value)
    assert_close(module(x, deterministic=True), nnx_module()(x))
    dropping = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, attention_fn=jax_flash.flax.attention_fn(), dropout_rate=0.25
    )
    with pytest.raises(NotImplementedError, match=r"dropout_rate is 0\.25"):
        dropping.init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, deterministic=False
        )


def test_attention_weights_are_refused(x: jax.Array) -> None:
    function = jax_flash.flax.attention_fn()
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        nnx_module(function)(x, sow_weights=True)
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function)
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        module.init(jax.random.key(0), x, sow_weights=True)


def test_einsum_overrides_and_positions_are_refused(x: jax.Array) -> None:
    query = x.reshape(B, L, HEADS, -1)
    function = jax_flash.flax.attention_fn()
    with pytest.raises(NotImplementedError, match="products are fixed"):
        function(query, query, query, qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(NotImplementedError, match="products are fixed"):
        function(query, query, query, attn_weights_value_einsum=jnp.einsum)
    with pytest.raises(NotImplementedError, match="rotates query and key"):
        function(query, query, query, input_positions=jnp.arange(L))
