"""Which implementation runs a call, the errors of a named one, and what `explain` says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.ops import dispatch, registration
from jax_flash.ops.registration import Registration

Operands = Callable[..., dict[str, Any]]

T, S = 9, 9
UNSUPPORTED = {
    "dtype": ({}, {"dtype": jnp.float32}, "dtype float32"),
    "negative scale": ({"scale": -1.0}, {}, "scale=-1.0"),
}


# Arguments, and the mask in the name of the kernel that runs them.
SUPPORTED = {
    "offset array": ({"query_offset": np.array([1, 2], np.int32), "is_causal": True}, "causal"),
    "query lengths": ({"query_seq_lengths": np.array([3, 4])}, "ragged"),
    "key lengths": ({"key_value_seq_lengths": np.array([3, 4])}, "ragged"),
    "sinks": ({"sinks": np.zeros(4, np.float32)}, "full"),
    "segment ids": (
        {
            "query_segment_ids": np.zeros((2, T), np.int32),
            "key_value_segment_ids": np.zeros((2, S), np.int32),
        },
        "ragged",
    ),
    "soft cap": ({"logits_soft_cap": 30.0, "is_causal": True}, "general"),
    "bias": ({"bias": np.zeros((T, S), np.float32)}, "general"),
    "mask": ({"mask": np.ones((4, 1, S), bool)}, "general"),
    "lengths and a soft cap": (
        {"key_value_seq_lengths": np.array([3, 4]), "logits_soft_cap": 30.0},
        "general",
    ),
}


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("case", SUPPORTED)
def test_features_choose_their_kernel(case: str, make_operands: Operands) -> None:
    arguments, word = SUPPORTED[case]
    chosen = jax_flash.explain(**make_operands(heads=(4, 4)), **arguments)
    assert chosen.on_cuda == "cuda"
    (kernel,) = chosen.forward
    assert kernel.name.removesuffix("_short").endswith(f"_{word}")
    assert any(kernel.name == f"sm_90a/backward_bf16_d64_{word}" for kernel in chosen.backward)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "is_short"),
    [
        (1024, 1024, 64, True),
        (1025, 1024, 64, False),
        (1024, 1025, 40, False),
        (256, 5000, 64, True),
        (257, 5000, 64, False),
        (100, 100, 128, False),
    ],
)
def test_few_queries_have_a_kernel_of_their_own_up_to_64(
    queries: int, keys: int, dim: int, is_short: bool, make_operands: Operands
) -> None:
    operands = make_operands(queries=queries, keys=keys, dims=(dim, dim))
    (kernel,) = jax_flash.explain(**operands, local_window_size=(5, 3)).forward
    assert kernel.name == f"sm_90a/forward_bf16_d{max(dim, 64)}_band{'_short' * is_short}"


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("queries", "dim", "is_short"),
    [(1024, 128, True), (1025, 128, False), (100, 72, True), (100, 192, False)],
)
def test_few_queries_have_one_without_a_mask_at_128(
    queries: int, dim: int, is_short: bool, make_operands: Operands
) -> None:
    operands = make_operands(queries=queries, keys=queries, dims=(dim, 128))
    (kernel,) = jax_flash.explain(**operands).forward
    assert kernel.name.endswith(f"_full{'_short' * is_short}")


@pytest.mark.usefixtures("all_kernels")
def test_the_gradient_of_a_bias_has_a_kernel_of_its_own(make_operands: Operands) -> None:
    chosen = jax_flash.explain(**make_operands(), bias=np.zeros((T, S), np.float32))
    assert [kernel.name for kernel in chosen.backward][-1] == (
        "sm_90a/backward_bias_bf16_d64_general"
    )
    without = jax_flash.explain(**make_operands(), mask=np.ones((T, S), bool))
    assert not any("backward_bias" in kernel.name for kernel in without.backward)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("deterministic_bwd", [False, True])
def test_gradients_of_large_head_dimensions_are_deterministic_in_any_case(
    deterministic_bwd: bool, make_operands: Operands
) -> None:
    operands = make_operands(queries=100, dims=(192, 128))
    chosen = jax_flash.explain(**operands, is_causal=True, deterministic_bwd=deterministic_bwd)
    assert [kernel.name for kernel in chosen.backward] == [
        "sm_90a/row_statistics_bf16_d192v128",
        "sm_90a/backward_kv_bf16_d192v128_causal",
        "sm_90a/backward_q_bf16_d192v128_causal",
    ]
    assert chosen.deterministic_bwd
    # Batch 2, 4 heads, 2 tiles of 64 queries: two float32 a row.
    assert chosen.backward_workspace_bytes == 2 * 4 * 2 * 64 * 2 * 4
    assert "backward: deterministic, workspace 8,192 bytes" in str(chosen)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_cuda_refuses_what_no_kernel_covers(case: str, make_operands: Operands) -> None:
    arguments, shapes, reason = UNSUPPORTED[case]
    operands = make_operands(**shapes)
    with pytest.raises(NotImplementedError, match="cannot run this call") as caught:
        jax_flash.attention(**operands, **arguments, implementation="cuda")
    assert reason in str(caught.value)
    assert "pass implementation=None" in str(caught.value)

    chosen = jax_flash.explain(**operands, **arguments)
    assert (chosen.on_cuda, chosen.elsewhere) == ("xla", "xla")
    assert len(chosen.reasons_against_cuda) == 1
    assert reason in chosen.reasons_against_cuda[0]
    refused = jax_flash.explain(**operands, **arguments, implementation="cuda")
    assert (refused.on_cuda, refused.elsewhere) == ("error", "error")
    assert reason in str(refused)


@pytest.mark.usefixtures("all_kernels")
def test_all_reasons_are_given_at_once(make_operands: Operands) -> None:
    operands = make_operands(dtype=jnp.float32)
    with pytest.raises(NotImplementedError) as caught:
        jax_flash.attention(**operands, scale=-1.0, implementation="cuda")
    for reason in ("dtype float32", "scale=-1.0"):
        assert reason in str(caught.value)


@pytest.mark.usefixtures("all_kernels")
def test_an_offset_without_a_causal_mask_or_window_needs_no_feature(
    make_operands: Operands,
) -> None:
    offsets = np.array([3, 4], np.int32)
    assert jax_flash.explain(**make_operands(), query_offset=offsets).on_cuda == "cuda"


@pytest.mark.usefixtures("all_kernels")
def test_cuda_without_a_cuda_device_is_an_error_when_run(make_operands: Operands) -> None:
    operands = make_operands()

    def call(**operands: Any) -> jax.Array:
        return jax_flash.attention(**operands, implementation="cuda").astype(jnp.float32).sum()

    def gradient(**operands: Any) -> jax.Array:
        return jax.grad(lambda query: call(**(operands | {"query": query})))(operands["query"])

    def mapped(**operands: Any) -> jax.Array:
        return jax.vmap(lambda operands: call(**operands))(operands)

    for function in (call, jax.jit(call), gradient, jax.jit(gradient), mapped):
        with pytest.raises(NotImplementedError, match="needs a CUDA device") as caught:
            function(**operands)
        assert "lowered for cpu" in str(caught.value)
        assert "pass implementation=None" in str(caught.value)


def test_cuda_without_kernels_installed_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, make_operands: Operands
) -> None:
    broken = Registration(directory=Path("somewhere"), error="No manifest here. Reinstall.")
    monkeypatch.setattr(registration, "REGISTRATION", broken)
    operands = make_operands()
    with pytest.raises(RuntimeError, match=r"No manifest here\. Reinstall\."):
        jax_flash.attention(**operands, implementation="cuda")
    explanation = jax_flash.explain(**operands)
    assert explanation.on_cuda == "xla"
    assert "No manifest here. Reinstall." in str(explanation)
    assert jax_flash.attention(**operands).shape == operands["query"].shape


def test_a_kernel_that_was_not_built_is_named(
    monkeypatch: pytest.MonkeyPatch, all_kernels: Registration, make_operands: Operands
) -> None:
    name = "sm_90a/forward_bf16_d64_causal_short"
    kernels = {key: entry for key, entry in all_kernels.kernels.items() if key != name}
    monkeypatch.setattr(registration, "REGISTRATION", replace(all_kernels, kernels=kernels))
    with pytest.raises(NotImplementedError, match=f"kernels {name} are not among the cubins"):
        jax_flash.attention(**make_operands(heads=(4, 4)), is_causal=True, implementation="cuda")
    assert jax_flash.explain(**make_operands(), is_causal=False).on_cuda == "cuda"


def _device(kind: str, capability: str) -> list[Any]:
    return [SimpleNamespace(device_kind=kind, compute_capability=capability)]


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("capability", ["8.0", "9.1", "12.0", "gfx942"])
def test_a_device_without_cubins_is_named(
    capability: str, monkeypatch: pytest.MonkeyPatch, make_operands: Operands
) -> None:
    monkeypatch.setattr(dispatch, "_cuda_devices", lambda: _device("Some GPU", capability))
    with pytest.raises(NotImplementedError) as caught:
        jax_flash.attention(**make_operands(), implementation="cuda")
    assert f"Some GPU with compute capability {capability}" in str(caught.value)
    assert "there are cubins for sm_90a" in str(caught.value)
    explanation = jax_flash.explain(**make_operands())
    assert explanation.on_cuda == "xla"
    assert "Some GPU" in str(explanation)


@pytest.mark.usefixtures("all_kernels")
def test_a_device_with_cubins_runs_kernels(
    monkeypatch: pytest.MonkeyPatch, make_operands: Operands
) -> None:
    monkeypatch.setattr(dispatch, "_cuda_devices", lambda: _device("NVIDIA H200", "9.0"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    explanation = jax_flash.explain(**make_operands())
    assert (explanation.implementation, explanation.on_cuda) == ("cuda", "cuda")
    assert explanation.target == "NVIDIA H200 with compute capability 9.0"


def test_without_any_cubin_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch, make_operands: Operands
) -> None:
    monkeypatch.setattr(registration, "REGISTRATION", Registration(directory=Path("cubins")))
    with pytest.raises(NotImplementedError, match="there are cubins for no architecture"):
        jax_flash.attention(**make_operands(), implementation="cuda")


@pytest.mark.usefixtures("all_kernels")
def test_explain_says_everything(make_operands: Operands) -> None:
    shapes = jax.eval_shape(lambda: make_operands(queries=100, dims=(128, 128)))
    explanation = jax_flash.explain(**shapes, is_causal=True, deterministic_bwd=True)
    assert [kernel.name for kernel in explanation.forward] == ["sm_90a/forward_bf16_d128_causal"]
    assert [kernel.name for kernel in explanation.backward] == [
        "sm_90a/row_statistics_bf16_d128",
        "sm_90a/backward_bf16_d128_causal_deterministic",
        "sm_90a/finish_dq_bf16_d128",
    ]
    # Batch 2, 4 heads, 2 tiles of 64 queries: two float32 a row, 128 for dQ; one int32 a tile.
    assert explanation.backward_workspace_bytes == 2 * 4 * (2 * 64 * 4 * (1 + 1 + 128) + 2 * 4 + 1)
    text = str(explanation)
    for part in (
        "on CUDA: cuda (kernels); no CUDA device in this process, so sm_90a",
        "elsewhere: xla (plain JAX)",
        "on the default backend of this process: xla (plain JAX)",
        "forward kernel: sm_90a/forward_bf16_d128_causal (tile_kv=64, tile_q=128; 168 registers)",
        "backward kernel: sm_90a/finish_dq_bf16_d128",
        "deterministic, workspace 532,552 bytes",
        "cubins: cubins",
    ):
        assert part in text


def test_explain_of_xla_needs_no_kernels(make_operands: Operands) -> None:
    explanation = jax_flash.explain(**make_operands(), implementation="xla")
    assert (explanation.on_cuda, explanation.elsewhere) == ("xla", "xla")
    assert explanation.reasons_against_cuda == ('implementation="xla" was asked for',)


@pytest.mark.usefixtures("all_kernels")
def test_explain_takes_symbolic_dimensions() -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 4, 64"), jnp.bfloat16)
    explanation = jax_flash.explain(shape, shape, shape)
    assert explanation.on_cuda == "cuda"
    assert "b" in str(explanation.backward_workspace_bytes)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_other --xla_gpu_deterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_not=true", False),
    ],
)
def test_the_xla_flag_turns_determinism_on(
    flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch, make_operands: Operands
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    explanation = jax_flash.explain(**make_operands())
    assert explanation.deterministic_bwd is expected
    assert explanation.backward[1].name.endswith("_deterministic") is expected
    assert jax_flash.explain(**make_operands(), deterministic_bwd=True).deterministic_bwd is True


EMPTY = {
    "batch": {"leading": (0,)},
    "queries": {"queries": 0},
    "keys": {"keys": 0},
    "heads": {"heads": (0, 1)},
}


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("implementation", [None, "xla", "cuda"])
def test_nothing_to_compute(case: str, implementation: str | None, make_operands: Operands) -> None:
    operands = make_operands(**EMPTY[case])

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        def total(*operands: jax.Array) -> Any:
            output, lse = jax_flash.attention(
                *operands, return_residual=True, implementation=implementation
            )
            return jnp.sum(output, dtype=jnp.float32), (output, lse)

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(query, key, value)

    lowered = jax.jit(run).trace(**operands).lower(lowering_platforms=("cuda",))
    assert "jax_flash_forward" not in lowered.as_text()
    if implementation == "cuda":
        with pytest.raises(NotImplementedError, match="needs a CUDA device"):
            run(**operands)
        return
    (_, (output, lse)), gradients = run(**operands)
    assert output.shape == operands["query"].shape
    np.testing.assert_array_equal(output, np.zeros(output.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))
    for gradient, operand in zip(gradients, operands.values(), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(operand.shape))
