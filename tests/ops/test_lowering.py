"""What a call becomes when lowered for CUDA, which needs no GPU."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.ops import ffi_calls

pytestmark = pytest.mark.usefixtures("all_kernels")

Operands = Callable[..., dict[str, Any]]
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "cuda"])


def lower(function: Callable[..., Any], *operands: Any, platforms: Any = ("cuda",)) -> str:
    """Returns the program that `function` becomes."""
    return jax.jit(function).trace(*operands).lower(lowering_platforms=platforms).as_text()


def calls(text: str) -> list[tuple[str, dict[str, str], list[str], list[str]]]:
    """Returns (target, attributes, operand types, result types) of each FFI call in a program."""
    pattern = (
        r"custom_call @(jax_flash\w+)\(.*?mhlo\.backend_config = \{(.*?)\}, operand_layouts"
        r".*? : \(([^()]*)\) -> \(([^()]*)\)"
    )
    found = []
    for target, attributes, operands, results in re.findall(pattern, text):
        pairs = re.findall(r'(\w+) = ("[^"]*"|[^,]+)', attributes)
        found.append(
            (target, dict(pairs), *(re.findall(r"tensor<([^>]*)>", t) for t in (operands, results)))
        )
    return found


def loss(implementation: str | None, **arguments: Any) -> Callable[..., jax.Array]:
    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        output = jax_flash.attention(query, key, value, implementation=implementation, **arguments)
        return jnp.sum(output, dtype=jnp.float32)

    return total


@IMPLEMENTATIONS
def test_forward(implementation: str | None, make_operands: Operands) -> None:
    operands = make_operands((2, 3), queries=9, keys=5)
    text = lower(loss(implementation), *operands.values())
    ((target, attributes, operand_types, result_types),) = calls(text)
    assert target == "jax_flash_forward_v1"
    assert attributes == {
        "version": "1 : i32",
        "kernels": '"sm_90a/forward_bf16_d64_full_short"',
        "operands": '"query,key,value"',
        "results": '"output,lse"',
        "scale": "1.250000e-01 : f32",
        "scale_log2": "0.180336878 : f32",
        "inverse_scale": "8.000000e+00 : f32",
        "soft_cap": "0.000000e+00 : f32",
        "band_lower": f"{-(2**30)} : i32",
        "band_upper": f"{2**30} : i32",
        "rows_per_query": "2 : i32",
    }
    # The two query heads of each key head are packed.
    assert operand_types == ["2x3x18x2x64xbf16", "2x3x5x2x64xbf16", "2x3x5x2x64xbf16"]
    assert result_types == ["2x3x18x2x64xbf16", "2x3x18x2xf32"]
    assert "while" not in text  # nothing of the chunked implementation is left


@IMPLEMENTATIONS
def test_backward(implementation: str | None, make_operands: Operands) -> None:
    operands = make_operands((2,), queries=70, keys=5, dims=(128, 128), dtype=jnp.float16)
    gradient = jax.grad(
        loss(implementation, is_causal=True, deterministic_bwd=True, query_offset=-3, scale=2.0),
        (0, 1, 2),
    )
    text = lower(gradient, *operands.values())
    forward, (target, attributes, operand_types, result_types) = calls(text)
    assert forward[0] == "jax_flash_forward_v1"
    assert forward[1]["kernels"] == '"sm_90a/forward_f16_d128_causal"'
    assert target == "jax_flash_backward_v1"
    assert attributes == {
        "version": "1 : i32",
        "kernels": '"sm_90a/row_statistics_f16_d128,'
        'sm_90a/backward_f16_d128_causal_deterministic,sm_90a/finish_dq_f16_d128"',
        "operands": '"query,key,value,output,lse,d_output,d_lse"',
        "results": '"d_query,d_key,d_value,lse_log2,delta,'
        'dq_accumulator,dq_semaphores,tile_counter"',
        "scale": "2.000000e+00 : f32",
        "inverse_scale": "5.000000e-01 : f32",
        "scale_log2": "2.885390e+00 : f32",
        "soft_cap": "0.000000e+00 : f32",
        "band_lower": "0 : i32",
        "band_upper": "-3 : i32",
        "rows_per_query": "1 : i32",
    }
    query, key = "2x70x4x128xf16", "2x5x2x128xf16"
    assert operand_types == [query, key, key, query, "2x70x4xf32", query, "2x70x4xf32"]
    # 70 queries are two tiles of 64.
    rows = "2x4x128xf32"
    assert result_types == [query, key, key, rows, rows, "2x4x128x128xf32", "2x4x2xi32", "2xi32"]
    assert "while" not in text


@pytest.mark.parametrize("offset", [2**29 - 1, -(2**29) + 1])
def test_extreme_offsets_reach_the_kernels(offset: int, make_operands: Operands) -> None:
    call = loss(None, is_causal=True, query_offset=offset)
    ((_, attributes, _, _),) = calls(lower(call, *make_operands().values()))
    assert attributes["band_upper"] == f"{offset} : i32"


def test_a_right_window_is_an_upper_bound(make_operands: Operands) -> None:
    call = loss(None, local_window_size=(None, 5), query_offset=2)
    for heads, kernel in (((4, 4), "causal_short"), ((4, 2), "ragged")):
        ((_, attributes, _, _),) = calls(lower(call, *make_operands(heads=heads).values()))
        assert attributes["kernels"] == f'"sm_90a/forward_bf16_d64_{kernel}"'
        assert attributes["band_upper"] == "7 : i32"


def test_the_widest_window_stays_within_int32(make_operands: Operands) -> None:
    widest = 2**30 - 1
    call = loss(None, local_window_size=(None, widest), query_offset=2**29 - 1)
    ((_, attributes, _, _),) = calls(lower(call, *make_operands().values()))
    assert attributes["band_upper"] == f"{2**30} : i32"
    unbounded = loss(None, local_window_size=(None, widest + 1), query_offset=2**29 - 1)
    ((_, attributes, _, _),) = calls(lower(unbounded, *make_operands().values()))
    assert attributes["kernels"] == '"sm_90a/forward_bf16_d64_full_short"'


def test_attributes_have_the_types_that_the_handlers_decode() -> None:
    shape = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    call = jax_flash.ops.arguments.Arguments(query=shape, key=shape, value=shape, is_causal=True)
    checked = jax_flash.ops.validation.check_call(call, allow_shapes=True)
    kernels = jax_flash.ops.dispatch.choose(checked).kernels
    assert kernels is not None
    attributes = ffi_calls.call_attributes(kernels.forward, kernels)
    types = {name: type(value) for name, value in attributes.items()}
    assert types == {
        "version": np.int32,
        "kernels": str,
        "operands": str,
        "results": str,
        "scale": np.float32,
        "scale_log2": np.float32,
        "inverse_scale": np.float32,
        "soft_cap": np.float32,
        "rows_per_query": np.int32,
        "band_lower": np.int32,
        "band_upper": np.int32,
    }


def test_without_implementation_cpu_gets_plain_jax(make_operands: Operands) -> None:
    text = lower(jax.grad(loss(None)), *make_operands().values(), platforms=("cpu",))
    assert "jax_flash" not in text


def test_a_program_for_two_platforms_has_both(make_operands: Operands) -> None:
    call = loss(None, is_causal=True)
    text = lower(call, *make_operands(queries=600, keys=600).values(), platforms=("cpu", "cuda"))
    assert len(calls(text)) == 1
    assert "stablehlo.while" in text


def test_cuda_refuses_a_program_for_two_platforms(make_operands: Operands) -> None:
    with pytest.raises(NotImplementedError, match="lowered for cpu"):
        lower(loss("cuda"), *make_operands().values(), platforms=("cpu", "cuda"))


def test_xla_never_calls_kernels(make_operands: Operands) -> None:
    assert "jax_flash" not in lower(jax.grad(loss("xla")), *make_operands().values())


def test_both_results_are_used_by_the_gradient(make_operands: Operands) -> None:
    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        _, lse = jax_flash.attention(query, key, value, return_residual=True)
        return jnp.sum(jnp.sin(lse))

    text = lower(jax.grad(total), *make_operands().values())
    assert "stablehlo.cosine" in text
    assert [target for target, *_ in calls(text)] == [
        "jax_flash_forward_v1",
        "jax_flash_backward_v1",
    ]


@pytest.mark.parametrize(
    ("implementation", "shape"), [("cuda", "b, t, 4, 64"), (None, "b, 16, 4, 64")]
)
def test_export_with_symbolic_sizes(implementation: str | None, shape: str) -> None:
    query = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.bfloat16)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"jax_flash_{direction}_v1")
        for direction in ("forward", "backward")
    ]
    exported = jax.export.export(
        jax.jit(jax.grad(loss(implementation))), platforms=["cuda"], disabled_checks=checks
    )(query, query, query)
    assert "jax_flash_backward_v1" in exported.mlir_module()
    assert exported.out_avals[0].shape == query.shape
