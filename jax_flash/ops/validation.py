"""Checks of every public argument: what was given, what is required, what to do.

Everything is decided from shapes, dtypes and Python values, so that errors appear while tracing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_flash.ops.arguments import IMPLEMENTATIONS, Arguments, Array, Call
from jax_flash.reference.semantics import Semantics

DTYPES = ("bfloat16", "float16", "float32")
"""Element types of query, key and value that some implementation takes."""

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8

POSITION_LIMIT = 2**29
"""Positions and offsets stay below this, so that what is computed from them fits in int32."""


def check_call(arguments: Arguments, *, allow_shapes: bool = False) -> Call:
    """Checks the arguments of one call.

    Args:
      arguments: as the user gave them.
      allow_shapes: accept `jax.ShapeDtypeStruct` where arrays are expected.

    Returns:
      The checked call, every array argument a `jax.Array` (or a `jax.ShapeDtypeStruct`).

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: a shape or a value does not fit.
    """
    arrays = {
        name: _array(name, getattr(arguments, name), allow_shapes)
        for name in ("query", "key", "value")
    }
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    _check_dtypes(query, key, value)
    _check_shapes(query, key, value)
    for name in ("is_causal", "deterministic_bwd", "return_residual"):
        _check_bool(name, getattr(arguments, name))
    window = _window(arguments.local_window_size)
    offset = _query_offset(arguments.query_offset, query.shape[:-3], allow_shapes)
    is_causal = bool(arguments.is_causal)
    static_offset = offset if isinstance(offset, int) else 0
    has_band = is_causal or window != (None, None)
    semantics = Semantics(
        scale=_scale(arguments.scale, query.shape[-1]),
        is_causal=is_causal,
        window=window,
        soft_cap=_soft_cap(arguments.logits_soft_cap),
        query_offset=None if isinstance(offset, int) or not has_band else offset,
        **_optional_arrays(arguments, query, key, allow_shapes),
    )
    return Call(
        query=query,
        key=key,
        value=value,
        semantics=semantics,
        query_offset=static_offset,
        deterministic_bwd=bool(arguments.deterministic_bwd),
        return_residual=bool(arguments.return_residual),
        implementation=_implementation(arguments.implementation),
    )


def _array(name: str, value: Any, allow_shapes: bool) -> Any:
    """Returns an array argument as JAX sees it."""
    if allow_shapes and isinstance(value, jax.ShapeDtypeStruct):
        return value
    # Flax variables stand for their array through __jax_array__.
    if isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(
        type(value), "__jax_array__"
    ):
        return jnp.asarray(value)
    accepted = "an array or a jax.ShapeDtypeStruct" if allow_shapes else "a JAX or numpy array"
    raise TypeError(
        f"{name} is a {type(value).__name__}; it must be {accepted}. Convert it with "
        f"jnp.asarray({name})."
    )


def _check_dtypes(query: Array, key: Array, value: Array) -> None:
    dtypes = tuple(jnp.dtype(array.dtype).name for array in (query, key, value))
    given = f"query is {dtypes[0]}, key is {dtypes[1]} and value is {dtypes[2]}"
    if len(set(dtypes)) != 1:
        raise TypeError(f"{given}; they must have one dtype. Convert them with .astype(dtype).")
    if dtypes[0] not in DTYPES:
        raise TypeError(
            f"{given}; the dtype must be one of {', '.join(DTYPES)}. Convert them with "
            ".astype(jnp.bfloat16), or another of these."
        )


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    given = f"query is {query.shape}, key is {key.shape} and value is {value.shape}"
    layout = "they must be [..., T, N, D], [..., S, K, D] and [..., S, K, Dv]"
    if min(len(array.shape) for array in (query, key, value)) < 3:
        raise ValueError(
            f"{given}; {layout}, at least rank 3. Add the missing axes, for example with "
            "query[:, None, :] for a single head."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"{given}; {layout} with equal leading (batch) dimensions, but these are "
            f"{query.shape[:-3]}, {key.shape[:-3]} and {value.shape[:-3]}. Broadcast them with "
            "jnp.broadcast_to, or use jax.vmap with in_axes=None for what is shared."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{given}; {layout}, but the head dimension D is {query.shape[-1]} in query and "
            f"{key.shape[-1]} in key. Project both to the same D."
        )
    if key.shape[-3] != value.shape[-3] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"{given}; {layout}, but key has S={key.shape[-3]}, K={key.shape[-2]} and value has "
            f"S={value.shape[-3]}, K={value.shape[-2]}. Give every key one value."
        )
    query_heads, key_heads = query.shape[-2], key.shape[-2]
    if not isinstance(query_heads, int) or not isinstance(key_heads, int):
        raise TypeError(
            f"query has N={query_heads} heads and key has K={key_heads}; both must be known while "
            "tracing. Only batch dimensions, T and S may be symbolic in jax.export."
        )
    if key_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"query has N={query_heads} heads and key has K={key_heads}; N must be a multiple of "
            "K, and K at least 1. Query head n reads key head n // (N // K): repeat the key and "
            "value heads until they divide the query heads."
        )
    for name, axis, size in (("query", "D", query.shape[-1]), ("value", "Dv", value.shape[-1])):
        _check_head_dim(name, axis, size)


def _check_head_dim(name: str, axis: str, size: Any) -> None:
    if not isinstance(size, int):
        raise TypeError(
            f"{name} has head dimension {axis}={size}; it must be known while tracing. Only batch "
            "dimensions, T and S may be symbolic in jax.export."
        )
    if size % HEAD_DIM_MULTIPLE or not 0 < size <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head dimension {axis}={size}; it must be a multiple of "
            f"{HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}. Pad it with zeros "
            "(and pass scale for the unpadded D), or split it into more heads."
        )


def _static_remedy(name: str) -> str:
    return (
        f"It must be known while tracing: pass a Python value, and under jax.jit mark it static "
        f'with static_argnames=("{name}",).'
    )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{name} is {_described(value)}; it must be a Python bool. {_static_remedy(name)}"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tracer):
        return f"a traced value ({value.aval})"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    if not (_is_int(value) or isinstance(value, float | np.floating)):
        raise TypeError(
            f"{name} is {_described(value)}; it must be a Python number or None. "
            f"{_static_remedy(name)}"
        )
    return float(value)


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    number = _number("scale", scale)
    if not math.isfinite(number):
        raise ValueError(
            f"scale is {number}; it must be finite. Leave it None for D ** -0.5 = {head_dim**-0.5}."
        )
    return number


def _soft_cap(soft_cap: Any) -> float | None:
    if soft_cap is None:
        return None
    number = _number("logits_soft_cap", soft_cap)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(
            f"logits_soft_cap is {number}; it must be finite and greater than 0. Use None for no "
            "cap."
        )
    return number


def _window(window: Any) -> tuple[int | None, int | None]:
    """Returns (left, right), None where unbounded."""
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(side is None or _is_int(side) for side in sides):
        raise TypeError(
            f"local_window_size is {_described(window)}; it must be an integer, a pair (left, "
            f"right) of integers or None, or None. {_static_remedy('local_window_size')}"
        )
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(
            f"local_window_size is {window}; a side must be at least 0 (0 is the position itself "
            "alone). Use None for a side without a bound, not -1."
        )
    # No two positions are this far apart; larger numbers are a way of saying "unbounded".
    left, right = (
        None if side is None or side >= 2 * POSITION_LIMIT else int(side) for side in sides
    )
    return left, right


def _query_offset(offset: Any, leading: tuple[Any, ...], allow_shapes: bool) -> Any:
    if _is_int(offset):
        if not -POSITION_LIMIT < offset < POSITION_LIMIT:
            raise ValueError(
                f"query_offset is {offset}; its magnitude must be below 2**29 = {POSITION_LIMIT}. "
                "Number positions from the first key."
            )
        return int(offset)
    if offset is None or isinstance(offset, bool | float | str | list | tuple):
        raise TypeError(
            f"query_offset is {_described(offset)}; it must be an integer, or an int32 array with "
            f"the leading dimensions of query {leading}. Pass 0 for no offset."
        )
    array = _array("query_offset", offset, allow_shapes)
    _check_integers("query_offset", array)
    if array.shape not in ((), leading):
        raise ValueError(
            f"query_offset has shape {array.shape}; it must be an integer, a scalar array, or have "
            f"the leading dimensions of query {leading}: one offset for each sequence."
        )
    return array


def _check_integers(name: str, array: Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{name} is {array.dtype}; it must be an array of integers (int32). Convert it with "
            ".astype(jnp.int32)."
        )


def _optional_arrays(
    arguments: Arguments, query: Array, key: Array, allow_shapes: bool
) -> dict[str, Any]:
    """Returns the checked array fields of `Semantics`, but for the query offset."""
    given = {
        name: _array(name, value, allow_shapes)
        for name in (
            "bias",
            "mask",
            "query_seq_lengths",
            "key_value_seq_lengths",
            "query_segment_ids",
            "key_value_segment_ids",
            "sinks",
        )
        if (value := getattr(arguments, name)) is not None
    }
    leading, queries, keys = query.shape[:-3], query.shape[-3], key.shape[-3]
    segments = "query_segment_ids", "key_value_segment_ids"
    if len([name for name in segments if name in given]) == 1:
        present, absent = segments if segments[0] in given else segments[::-1]
        raise ValueError(
            f"{present} is given and {absent} is None; a query attends where both ids are equal, "
            "so both are required. Pass both (the same array for self-attention) or neither."
        )
    _check_integer_array(given, "query_seq_lengths", leading, "one length for each sequence")
    _check_integer_array(given, "key_value_seq_lengths", leading, "one length for each sequence")
    _check_integer_array(given, segments[0], (*leading, queries), "[..., T]: one id for each query")
    _check_integer_array(given, segments[1], (*leading, keys), "[..., S]: one id for each key")
    logits = (*leading, query.shape[-2], queries, keys)
    _check_logits_array(given, "bias", logits)
    _check_logits_array(given, "mask", logits)
    _check_sinks(given.get("sinks"), query.shape[-2])
    return {
        "bias": given.get("bias"),
        "mask": given.get("mask"),
        "query_lengths": given.get("query_seq_lengths"),
        "key_lengths": given.get("key_value_seq_lengths"),
        "query_segment_ids": given.get(segments[0]),
        "key_segment_ids": given.get(segments[1]),
        "sinks": given.get("sinks"),
    }


def _check_integer_array(
    given: dict[str, Any], name: str, shape: tuple[Any, ...], meaning: str
) -> None:
    if name not in given:
        return
    array = given[name]
    _check_integers(name, array)
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}; it must have shape {shape}, {meaning}. Broadcast it "
            "with jnp.broadcast_to if one value serves several."
        )


def _check_logits_array(given: dict[str, Any], name: str, logits: tuple[Any, ...]) -> None:
    if name not in given:
        return
    array = given[name]
    if name == "mask" and array.dtype != jnp.bool_:
        raise TypeError(
            f"mask is {array.dtype}; it must be bool, True where a query may attend. Pass mask != "
            "0, or as bias if it holds numbers to add to the logits."
        )
    if name == "bias" and jnp.dtype(array.dtype).name not in DTYPES:
        raise TypeError(
            f"bias is {array.dtype}; it must be one of {', '.join(DTYPES)}. Convert it with "
            ".astype(jnp.float32), or pass it as mask if it says where to attend."
        )
    missing = len(logits) - len(array.shape)
    fits = missing >= 0 and all(
        size == 1 or size == full
        for size, full in zip(array.shape, logits[max(missing, 0) :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {array.shape}; it must be broadcastable to [..., N, T, S] = "
            f"{logits}: the last axes are N={logits[-3]} query heads, T={logits[-2]} queries and "
            f"S={logits[-1]} keys. Reshape it, with 1 where it does not vary."
        )


def _check_sinks(sinks: Any, query_heads: int) -> None:
    if sinks is None:
        return
    if jnp.dtype(sinks.dtype).name not in DTYPES:
        raise TypeError(
            f"sinks is {sinks.dtype}; it must be one of {', '.join(DTYPES)}. Convert it with "
            ".astype(jnp.float32)."
        )
    if sinks.shape != (query_heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}; it must have shape [N] = ({query_heads},), one logit "
            "for each query head. Broadcast it with jnp.broadcast_to."
        )


def _implementation(implementation: Any) -> str | None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; it must be None (choose) or one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}. Leave it None unless you need one of them."
        )
    return implementation
