"""Grids, and the buffers and kernels of the two operations."""

from itertools import product

import pytest

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS, BandMask
from jax_flash.spec.buffers import OPTIONAL_OPERANDS
from jax_flash.spec.kernel_args import PointerArgument, TensorMapArgument, kernel_arguments
from jax_flash.spec.launch_plan import (
    Dealing,
    GridFactor,
    LaunchPlan,
    backward_bias_operation,
    backward_operation,
    forward_operation,
    launch_plan,
)
from jax_flash.spec.problem import GENERAL_FEATURES, RAGGED_FEATURES, Feature, Support
from jax_flash.spec.support import variants_to_build
from jax_flash.spec.variant import (
    DType,
    KernelRole,
    backward_bias_tile_of,
    backward_tile_of,
    forward_tile_of,
    split_backward_tile_of,
)

PROBLEM = {
    "batch": 3,
    "query_length": 1000,
    "key_length": 77,
    "query_heads": 8,
    "key_heads": 2,
    # A bias of [N, 1, S].
    "bias_batch": 1,
    "bias_heads": 8,
    "bias_queries": 1,
    "bias_keys": 77,
}
MASKS = (
    (BandMask(), frozenset[Feature]()),
    (BandMask(upper=True), frozenset({Feature.SINKS, Feature.QUERY_OFFSET_ARRAY})),
    (BOTH_BOUNDS, frozenset[Feature]()),
    (BOTH_BOUNDS, frozenset({Feature.SINKS, Feature.QUERY_OFFSET_ARRAY}) | RAGGED_FEATURES),
    (BOTH_BOUNDS, frozenset(OPTIONAL_OPERANDS) | GENERAL_FEATURES),
)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


OPERATIONS = [
    operation
    for dtype, head_dims, (band, features) in product(DType, HEAD_DIMS, MASKS)
    for operation in (
        forward_operation(Arch.SM90A, dtype, head_dims, band, features),
        forward_operation(Arch.SM90A, dtype, head_dims, band, features, short=True),
        backward_operation(Arch.SM90A, dtype, head_dims, band, features, deterministic=False),
        backward_operation(Arch.SM90A, dtype, head_dims, band, features, deterministic=True),
        backward_bias_operation(Arch.SM90A, dtype, head_dims, features),
    )
]


def test_blocks_are_the_product_of_the_ceilings():
    plan = LaunchPlan(
        threads=128,
        shared_memory_bytes=0,
        grid=(GridFactor(value="rows", divisor=64), GridFactor(value="batch")),
    )
    assert plan.blocks({"rows": 1, "batch": 1}) == 1
    assert plan.blocks({"rows": 64, "batch": 3}) == 3
    assert plan.blocks({"rows": 65, "batch": 3}) == 6


@pytest.mark.parametrize("variant", variants_to_build(), ids=lambda variant: variant.name)
def test_a_kernel_has_a_block_for_each_tile_it_owns(variant):
    blocks = launch_plan(variant).blocks(PROBLEM)
    if variant.role is KernelRole.FORWARD:
        expected = -(-1000 // forward_tile_of(variant).tile_q) * 8 * 3
    elif variant.role in (KernelRole.BACKWARD, KernelRole.BACKWARD_KV):
        expected = -(-77 // backward_tile_of(variant).tile_kv) * 2 * 3
    elif variant.role is KernelRole.BACKWARD_BIAS:
        expected = -(-77 // backward_bias_tile_of(variant).tile_kv) * 8
    elif variant.role is KernelRole.BACKWARD_Q:
        expected = -(-1000 // split_backward_tile_of(variant).owned_queries) * 8 * 3
    else:
        expected = -(-1000 // backward_tile_of(variant).tile_q) * 8 * 3
    assert blocks == expected


@pytest.mark.parametrize("variant", variants_to_build(), ids=lambda variant: variant.name)
def test_tiles_that_wait_for_others_are_not_dealt_out(variant):
    """A block might wait for one that cannot start before it ends."""
    plan = launch_plan(variant)
    assert (plan.dealing is Dealing.ONE_EACH) == (plan.resident_up_to == 0)
    if variant.deterministic:
        assert plan.dealing is not Dealing.DEALT
    if plan.dealing is Dealing.HANDED_OUT:
        # Its counter is set to zero by the row statistics, and by nothing else.
        assert variant.role is KernelRole.BACKWARD


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.kernels[-1].name)
def test_every_buffer_that_a_kernel_takes_is_an_operand_or_result(operation):
    results = {buffer.name: buffer for buffer in operation.results}
    assert len(results) == len(operation.results)
    assert not results.keys() & set(operation.operand_names)
    for kernel in operation.kernels:
        for argument in kernel_arguments(kernel):
            if isinstance(argument, PointerArgument | TensorMapArgument):
                if isinstance(argument, PointerArgument) and argument.optional:
                    continue
                assert argument.operand in {*operation.operand_names, *results}
                if argument.operand in results:
                    dtype = results[argument.operand].dtype
                    names = {"input": kernel.dtype.value, "float32": "f32", "int32": "s32"}
                    assert argument.dtype == names[dtype]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.kernels[-1].name)
def test_every_operand_is_taken_by_some_kernel(operation):
    taken = {
        argument.operand
        for kernel in operation.kernels
        for argument in kernel_arguments(kernel)
        if isinstance(argument, PointerArgument | TensorMapArgument)
    }
    assert set(operation.operand_names) <= taken


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.kernels[-1].name)
def test_every_result_is_written_by_some_kernel(operation):
    taken = {
        argument.operand
        for kernel in operation.kernels
        for argument in kernel_arguments(kernel)
        if isinstance(argument, PointerArgument | TensorMapArgument)
    }
    assert {buffer.name for buffer in operation.results} <= taken


def test_the_kernels_that_are_built_are_those_of_some_operation():
    used = {kernel for operation in OPERATIONS for kernel in operation.kernels}
    assert used == set(variants_to_build())


SUPPORT = {
    Feature.QUERY_OFFSET_ARRAY: "band",
    Feature.SINKS: "band",
    Feature.QUERY_LENGTHS: "ragged",
    Feature.KEY_LENGTHS: "ragged",
    Feature.SEGMENT_IDS: "ragged",
    Feature.SOFT_CAP: "general",
    Feature.BIAS: "general",
    Feature.MASK: "general",
}


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_a_feature_takes_the_least_support(head_dims: tuple[int, int], feature: Feature):
    key = (Arch.SM90A, DType.BF16, head_dims, BOTH_BOUNDS)
    (forward,) = forward_operation(*key, frozenset({feature})).kernels
    assert forward.support.value == SUPPORT[feature]
    if head_dims in ((64, 64), (128, 128)):
        operation = backward_operation(*key, frozenset({feature}), deterministic=False)
        assert operation.kernels[1].support.value == SUPPORT[feature]


def test_one_feature_that_changes_scores_takes_a_general_kernel():
    features = RAGGED_FEATURES | {Feature.SOFT_CAP}
    key = (Arch.SM90A, DType.BF16, (128, 128), BOTH_BOUNDS, features)
    assert forward_operation(*key).kernels[0].support is Support.GENERAL
    assert backward_operation(*key, deterministic=True).kernels[1].support is Support.GENERAL


@pytest.mark.parametrize(
    ("head_dims", "names"),
    [
        # Ragged and general kernels of D = 64 share a tile that others do not have.
        (
            (64, 64),
            [
                "row_statistics_f16_d64_general",
                "backward_f16_d64_ragged",
                "finish_dq_f16_d64_general",
            ],
        ),
        (
            (128, 128),
            ["row_statistics_f16_d128", "backward_f16_d128_ragged", "finish_dq_f16_d128"],
        ),
        # Wide heads have no ragged kernels of gradients.
        (
            (256, 256),
            [
                "row_statistics_f16_d256",
                "backward_kv_f16_d256_general",
                "backward_q_f16_d256_general",
            ],
        ),
    ],
    ids=str,
)
def test_the_kernels_of_gradients_of_ragged_calls(head_dims: tuple[int, int], names: list[str]):
    operation = backward_operation(
        Arch.SM90A, DType.F16, head_dims, BOTH_BOUNDS, RAGGED_FEATURES, deterministic=False
    )
    assert [kernel.name.removeprefix("sm_90a/") for kernel in operation.kernels] == names


def test_backward_is_three_kernels_in_order():
    operation = backward_operation(
        Arch.SM90A, DType.F16, (64, 64), BandMask(upper=True), deterministic=True
    )
    assert [kernel.role for kernel in operation.kernels] == [
        KernelRole.ROW_STATISTICS,
        KernelRole.BACKWARD,
        KernelRole.FINISH_DQ,
    ]
    assert [kernel.deterministic for kernel in operation.kernels] == [False, True, False]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_split_backward_has_no_accumulator_and_no_mode(deterministic: bool):
    operation = backward_operation(
        Arch.SM90A, DType.BF16, (256, 256), BandMask(), deterministic=deterministic
    )
    assert [kernel.role for kernel in operation.kernels] == [
        KernelRole.ROW_STATISTICS,
        KernelRole.BACKWARD_KV,
        KernelRole.BACKWARD_Q,
    ]
    assert not any(kernel.deterministic for kernel in operation.kernels)
    names = [buffer.name for buffer in operation.results]
    assert names == ["d_query", "d_key", "d_value", "lse_log2", "delta"]
