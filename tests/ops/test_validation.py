"""Every bad argument is an error that gives the values, the requirement and the remedy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

B, T, S, N, K, D, DV = 2, 5, 7, 4, 2, 16, 8


def _good() -> dict:
    return {
        "query": jnp.zeros((B, T, N, D)),
        "key": jnp.zeros((B, S, K, D)),
        "value": jnp.zeros((B, S, K, DV)),
    }


def _zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


# name of the case: (arguments that replace good ones, error, what its text says)
BAD = {
    "list for query": (
        {"query": [[[1.0]]]},
        TypeError,
        ["query is a list", "must be a JAX or numpy array", "jnp.asarray(query)"],
    ),
    "list for a mask": (
        {"mask": [True]},
        TypeError,
        ["mask is a list", "must be a JAX or numpy array", "jnp.asarray(mask)"],
    ),
    "shape for an array": (
        {"key": jax.ShapeDtypeStruct((B, S, K, D), jnp.float32)},
        TypeError,
        ["key is a ShapeDtypeStruct", "must be a JAX or numpy array", "jnp.asarray"],
    ),
    "mixed dtypes": (
        {"key": _zeros(B, S, K, D, dtype=jnp.bfloat16)},
        TypeError,
        ["query is float32, key is bfloat16", "one dtype", "astype"],
    ),
    "integers": (
        {
            "query": _zeros(B, T, N, D, dtype=jnp.int32),
            "key": _zeros(B, S, K, D, dtype=jnp.int32),
            "value": _zeros(B, S, K, DV, dtype=jnp.int32),
        },
        TypeError,
        ["query is int32", "bfloat16, float16, float32", "astype"],
    ),
    "eight-bit floats": (
        {
            "query": _zeros(B, T, N, D, dtype=jnp.float8_e4m3fn),
            "key": _zeros(B, S, K, D, dtype=jnp.float8_e4m3fn),
            "value": _zeros(B, S, K, DV, dtype=jnp.float8_e4m3fn),
        },
        TypeError,
        ["float8_e4m3fn", "bfloat16, float16, float32", "astype"],
    ),
    "rank 2": (
        {"query": _zeros(T, D)},
        ValueError,
        ["query is (5, 16)", "[..., T, N, D]", "at least rank 3", "Add the missing axes"],
    ),
    "batch": (
        {"query": _zeros(3, T, N, D)},
        ValueError,
        ["(3,), (2,) and (2,)", "equal leading (batch) dimensions", "jnp.broadcast_to"],
    ),
    "batch rank": (
        {"query": _zeros(T, N, D)},
        ValueError,
        ["(), (2,) and (2,)", "equal leading (batch) dimensions", "jax.vmap"],
    ),
    "head dimension": (
        {"key": _zeros(B, S, K, 24)},
        ValueError,
        ["D is 16 in query and 24 in key", "[..., S, K, D]", "same D"],
    ),
    "keys without values": (
        {"value": _zeros(B, S + 1, K, DV)},
        ValueError,
        ["key has S=7, K=2 and value has S=8, K=2", "one value"],
    ),
    "value heads": (
        {"value": _zeros(B, S, 4, DV)},
        ValueError,
        ["key has S=7, K=2 and value has S=7, K=4", "one value"],
    ),
    "heads": (
        {"key": _zeros(B, S, 3, D), "value": _zeros(B, S, 3, DV)},
        ValueError,
        ["N=4", "K=3", "multiple", "repeat the key and value heads"],
    ),
    "no key heads": (
        {"key": _zeros(B, S, 0, D), "value": _zeros(B, S, 0, DV)},
        ValueError,
        ["N=4", "K=0", "at least 1", "repeat the key and value heads"],
    ),
    "D not a multiple of 8": (
        {"query": _zeros(B, T, N, 20), "key": _zeros(B, S, K, 20)},
        ValueError,
        ["D=20", "multiple of 8", "Pad it with zeros"],
    ),
    "D above 256": (
        {"query": _zeros(B, T, N, 264), "key": _zeros(B, S, K, 264)},
        ValueError,
        ["D=264", "to 256", "split it into more heads"],
    ),
    "D of 0": (
        {"query": _zeros(B, T, N, 0), "key": _zeros(B, S, K, 0)},
        ValueError,
        ["D=0", "from 8 to 256", "Pad"],
    ),
    "Dv not a multiple of 8": (
        {"value": _zeros(B, S, K, 9)},
        ValueError,
        ["value has head dimension Dv=9", "multiple of 8", "Pad it with zeros"],
    ),
    "negative window": (
        {"local_window_size": (-1, 0)},
        ValueError,
        ["(-1, 0)", "at least 0", "Use None"],
    ),
    "negative window of one number": (
        {"local_window_size": -2},
        ValueError,
        ["-2", "at least 0", "Use None"],
    ),
    "window of three": (
        {"local_window_size": (1, 2, 3)},
        TypeError,
        ["(1, 2, 3)", "(left, right)", "static_argnames"],
    ),
    "window of a float": (
        {"local_window_size": 4.0},
        TypeError,
        ["4.0 (float)", "integer", "Python value"],
    ),
    "window as a bool": (
        {"local_window_size": True},
        TypeError,
        ["True (bool)", "integer", "Python value"],
    ),
    "lengths of the wrong shape": (
        {"query_seq_lengths": _zeros(3, dtype=jnp.int32)},
        ValueError,
        ["query_seq_lengths has shape (3,)", "must have shape (2,)", "jnp.broadcast_to"],
    ),
    "key lengths of the wrong rank": (
        {"key_value_seq_lengths": _zeros(2, 1, dtype=jnp.int32)},
        ValueError,
        ["key_value_seq_lengths has shape (2, 1)", "must have shape (2,)", "jnp.broadcast_to"],
    ),
    "lengths as floats": (
        {"key_value_seq_lengths": _zeros(2)},
        TypeError,
        ["key_value_seq_lengths is float32", "integers", "astype(jnp.int32)"],
    ),
    "one of the segment ids": (
        {"query_segment_ids": _zeros(B, T, dtype=jnp.int32)},
        ValueError,
        ["query_segment_ids is given", "key_value_segment_ids is None", "Pass both"],
    ),
    "other one of the segment ids": (
        {"key_value_segment_ids": _zeros(B, S, dtype=jnp.int32)},
        ValueError,
        ["key_value_segment_ids is given", "query_segment_ids is None", "Pass both"],
    ),
    "segment ids of the wrong shape": (
        {
            "query_segment_ids": _zeros(B, S, dtype=jnp.int32),
            "key_value_segment_ids": _zeros(B, S, dtype=jnp.int32),
        },
        ValueError,
        ["query_segment_ids has shape (2, 7)", "must have shape (2, 5), [..., T]", "Broadcast"],
    ),
    "segment ids as floats": (
        {"query_segment_ids": _zeros(B, T), "key_value_segment_ids": _zeros(B, S)},
        TypeError,
        ["query_segment_ids is float32", "integers", "astype(jnp.int32)"],
    ),
    "sinks of the wrong shape": (
        {"sinks": _zeros(K)},
        ValueError,
        ["sinks has shape (2,)", "[N] = (4,)", "jnp.broadcast_to"],
    ),
    "sinks as integers": (
        {"sinks": _zeros(N, dtype=jnp.int32)},
        TypeError,
        ["sinks is int32", "bfloat16, float16, float32", "astype"],
    ),
    "bias of the wrong shape": (
        {"bias": _zeros(B, N, S, T)},
        ValueError,
        ["bias has shape (2, 4, 7, 5)", "[..., N, T, S] = (2, 4, 5, 7)", "Reshape it"],
    ),
    "bias of too many axes": (
        {"bias": _zeros(1, B, N, T, S)},
        ValueError,
        ["bias has shape (1, 2, 4, 5, 7)", "[..., N, T, S] = (2, 4, 5, 7)", "Reshape it"],
    ),
    "bias as bool": (
        {"bias": _zeros(T, S, dtype=jnp.bool_)},
        TypeError,
        ["bias is bool", "float32", "pass it as mask"],
    ),
    "mask as float": (
        {"mask": _zeros(T, S)},
        TypeError,
        ["mask is float32", "must be bool", "mask != 0"],
    ),
    "causal with a contradictory mask": (
        {"is_causal": True, "mask": _zeros(T, T, dtype=jnp.bool_)},
        ValueError,
        ["mask has shape (5, 5)", "T=5 queries and S=7 keys", "Reshape it"],
    ),
    "float offset": (
        {"query_offset": 1.5},
        TypeError,
        ["query_offset is 1.5 (float)", "an integer", "Pass 0"],
    ),
    "offset of None": (
        {"query_offset": None},
        TypeError,
        ["query_offset is None", "an integer", "Pass 0"],
    ),
    "offsets as floats": (
        {"query_offset": _zeros(B)},
        TypeError,
        ["query_offset is float32", "integers", "astype(jnp.int32)"],
    ),
    "offsets of the wrong shape": (
        {"query_offset": _zeros(B, T, dtype=jnp.int32)},
        ValueError,
        ["query_offset has shape (2, 5)", "leading dimensions of query (2,)", "each sequence"],
    ),
    "huge offset": (
        {"query_offset": -(2**29)},
        ValueError,
        ["-536870912", "below 2**29", "from the first key"],
    ),
    "soft cap of 0": (
        {"logits_soft_cap": 0.0},
        ValueError,
        ["logits_soft_cap is 0.0", "greater than 0", "Use None"],
    ),
    "negative soft cap": (
        {"logits_soft_cap": -3},
        ValueError,
        ["logits_soft_cap is -3.0", "greater than 0", "Use None"],
    ),
    "soft cap as a string": (
        {"logits_soft_cap": "30"},
        TypeError,
        ["'30' (str)", "Python number", "static_argnames"],
    ),
    "scale as an array": (
        {"scale": _zeros()},
        TypeError,
        ["scale is an array of shape ()", "Python number", 'static_argnames=("scale",)'],
    ),
    "infinite scale": (
        {"scale": float("inf")},
        ValueError,
        ["scale is inf", "finite", "Leave it None"],
    ),
    "is_causal as an integer": (
        {"is_causal": 1},
        TypeError,
        ["is_causal is 1 (int)", "Python bool", "Python value"],
    ),
    "deterministic_bwd as None": (
        {"deterministic_bwd": None},
        TypeError,
        ["deterministic_bwd is None", "Python bool", "Python value"],
    ),
    "unknown implementation": (
        {"implementation": "cudnn"},
        ValueError,
        ["'cudnn'", "None (choose)", "'cuda', 'xla', 'emulate'", "Leave it None"],
    ),
    "implementation of another type": (
        {"implementation": _zeros(2)},
        ValueError,
        ["implementation is", "None (choose)", "Leave it None"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case: str) -> None:
    changes, error, fragments = BAD[case]
    with pytest.raises(error) as caught:
        jax_flash.attention(**(_good() | changes))
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("case", sorted(set(BAD) - {"shape for an array"}))
def test_explain_refuses_the_same_arguments(case: str) -> None:
    changes, error, _ = BAD[case]
    with pytest.raises(error):
        jax_flash.explain(**(_good() | changes))


@pytest.mark.parametrize("name", ["is_causal", "scale", "logits_soft_cap", "local_window_size"])
def test_a_traced_value_is_refused_where_a_static_one_is_needed(name: str) -> None:
    call = jax.jit(lambda value: jax_flash.attention(**_good(), **{name: value}))
    with pytest.raises(TypeError, match=re.escape(f"{name} is a traced value")) as caught:
        call(1)
    assert f'static_argnames=("{name}",)' in str(caught.value)


def test_float64_is_refused_and_not_computed_in_float32() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match="query is float64"):
        jax_flash.attention(**{name: x.astype(jnp.float64) for name, x in _good().items()})


def test_symbolic_heads_are_refused() -> None:
    (heads,) = jax.export.symbolic_shape("h")
    shape = jax.ShapeDtypeStruct((B, T, heads, D), jnp.float32)
    with pytest.raises(TypeError, match="both must be known while tracing"):
        jax_flash.explain(shape, shape, shape)


def test_symbolic_head_dimension_is_refused() -> None:
    (size,) = jax.export.symbolic_shape("d")
    shape = jax.ShapeDtypeStruct((B, T, N, size), jnp.float32)
    with pytest.raises(TypeError, match="head dimension D=d"):
        jax_flash.explain(shape, shape, shape)


def test_numpy_arrays_and_numbers_are_taken() -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=x.shape).astype(np.float32) for x in _good().values())
    plain = jax_flash.attention(query, key, value, scale=0.5, local_window_size=2)
    numpy_options: dict[str, Any] = {
        "scale": np.float32(0.5),
        "is_causal": np.bool_(False),
        "local_window_size": [np.int64(2), 2],
        "query_offset": np.int32(0),
    }
    same = jax_flash.attention(
        jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), **numpy_options
    )
    np.testing.assert_array_equal(plain, same)


def test_a_window_beyond_every_position_is_no_window() -> None:
    explanation = jax_flash.explain(**_good(), local_window_size=2**62)
    unbounded = jax_flash.explain(**_good())
    assert explanation == unbounded
