"""Kernel names, and which kernels exist."""

import re

import pytest

from jax_flash.spec.arch import Arch, arch_of_compute_capability
from jax_flash.spec.band_mask import BOTH_BOUNDS, BandMask
from jax_flash.spec.kernel_args import kernel_arguments
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.problem import Support
from jax_flash.spec.support import variants_to_build
from jax_flash.spec.variant import DType, KernelRole, KernelVariant

CAUSAL = BandMask(upper=True)


def variant(role: KernelRole, **changes) -> KernelVariant:
    key = {"role": role, "arch": Arch.SM90A, "dtype": DType.BF16, "head_dims": (128, 128)}
    return KernelVariant(**(key | changes))


def test_names_are_unique_and_say_the_key():
    variants = variants_to_build()
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names) == len(set(variants)) > 0
    assert names == sorted(names)
    for built, name in zip(variants, names, strict=True):
        assert re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name)
        assert name.startswith(f"{built.arch.value}/{built.role.value}_{built.dtype.value}_d")


def test_names_never_change():
    # They are part of exported programs (jax.export) and of cubin file names.
    assert variant(KernelRole.FORWARD).name == "sm_90a/forward_bf16_d128_full"
    assert (
        variant(KernelRole.BACKWARD, band=CAUSAL, deterministic=True).name
        == "sm_90a/backward_bf16_d128_causal_deterministic"
    )
    assert (
        variant(KernelRole.ROW_STATISTICS, dtype=DType.F16, head_dims=(64, 64)).name
        == "sm_90a/row_statistics_f16_d64"
    )
    assert variant(KernelRole.FINISH_DQ).name == "sm_90a/finish_dq_bf16_d128"
    assert (
        variant(KernelRole.BACKWARD_KV, band=CAUSAL, head_dims=(192, 128)).name
        == "sm_90a/backward_kv_bf16_d192v128_causal"
    )
    assert (
        variant(KernelRole.BACKWARD_Q, head_dims=(256, 256)).name
        == "sm_90a/backward_q_bf16_d256_full"
    )
    assert (
        variant(KernelRole.FORWARD, band=BOTH_BOUNDS, support=Support.RAGGED).name
        == "sm_90a/forward_bf16_d128_ragged"
    )
    assert (
        variant(
            KernelRole.BACKWARD, band=BOTH_BOUNDS, support=Support.GENERAL, deterministic=True
        ).name
        == "sm_90a/backward_bf16_d128_general_deterministic"
    )
    assert (
        variant(KernelRole.ROW_STATISTICS, head_dims=(64, 64), support=Support.GENERAL).name
        == "sm_90a/row_statistics_bf16_d64_general"
    )


def test_the_variants_to_build_are_the_same_every_time_and_for_each_target():
    assert variants_to_build() == variants_to_build()
    assert variants_to_build() == tuple(built for arch in Arch for built in variants_to_build(arch))


@pytest.mark.parametrize("role", [KernelRole.ROW_STATISTICS, KernelRole.FINISH_DQ])
@pytest.mark.parametrize("change", [{"band": CAUSAL}, {"deterministic": True}])
def test_keys_that_name_no_distinct_kernel_are_refused(role, change):
    with pytest.raises(ValueError, match="depend on neither band nor determinism"):
        variant(role, **change)


@pytest.mark.parametrize(
    ("role", "change", "text"),
    [
        (KernelRole.FORWARD, {"band": CAUSAL}, "a ragged kernel has both bounds"),
        (KernelRole.BACKWARD, {}, "a ragged kernel has both bounds, not the band full"),
        (KernelRole.BACKWARD_KV, {"head_dims": (256, 256)}, "no ragged backward_kv kernel"),
        (KernelRole.BACKWARD_Q, {"head_dims": (192, 128)}, "no ragged backward_q kernel"),
        (KernelRole.BACKWARD_BIAS, {}, "no ragged backward_bias kernel"),
        (KernelRole.ROW_STATISTICS, {"head_dims": (64, 64)}, "no ragged row_statistics kernel"),
        (KernelRole.FINISH_DQ, {}, "the same tile when not general"),
    ],
)
def test_ragged_kernels_have_both_bounds_and_some_roles(role, change, text):
    with pytest.raises(ValueError, match=text):
        variant(role, support=Support.RAGGED, **change)


@pytest.mark.parametrize(
    ("role", "head_dims"),
    [
        (KernelRole.FORWARD, (128, 128)),
        (KernelRole.BACKWARD_KV, (256, 256)),
        (KernelRole.BACKWARD_Q, (192, 128)),
    ],
)
def test_determinism_is_no_choice_where_there_is_no_other_kernel(role, head_dims):
    with pytest.raises(ValueError, match=f"every {role.value} kernel is deterministic"):
        variant(role, head_dims=head_dims, deterministic=True)


@pytest.mark.parametrize(
    ("role", "head_dims", "text"),
    [
        (KernelRole.BACKWARD, (256, 256), "have a split tile"),
        (KernelRole.BACKWARD_KV, (128, 128), "have no split tile"),
        (KernelRole.BACKWARD_Q, (64, 64), "have no split tile"),
    ],
)
def test_a_role_that_the_tile_does_not_have_has_no_launch_plan(role, head_dims, text):
    key = variant(role, head_dims=head_dims)
    with pytest.raises(ValueError, match=text):
        launch_plan(key)
    with pytest.raises(ValueError, match=text):
        kernel_arguments(key)


def test_only_the_exact_compute_capability_has_an_arch():
    assert arch_of_compute_capability(9, 0) is Arch.SM90A
    assert arch_of_compute_capability(9, 1) is None
    assert arch_of_compute_capability(8, 0) is None
    for arch in Arch:
        assert arch_of_compute_capability(*arch.compute_capability) is arch
