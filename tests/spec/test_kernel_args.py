"""Sizes of kernel parameters, and the rows that the manifest carries."""

import pytest

from jax_flash.spec.kernel_args import (
    BOX_COLUMNS,
    SWIZZLE_BYTES,
    PointerArgument,
    ScalarArgument,
    TensorMapArgument,
    argument_bytes,
    kernel_arguments,
)
from jax_flash.spec.support import variants_to_build


@pytest.mark.parametrize(
    ("argument", "size", "alignment", "row"),
    [
        (
            TensorMapArgument(operand="query", dtype="bf16", box_columns=64, box_rows=128),
            128,
            64,
            ("tensor_map", "query", "bf16", 64, 128, 128),
        ),
        (PointerArgument(operand="lse", dtype="f32"), 8, 8, ("pointer", "lse", "f32")),
        (ScalarArgument(name="query_length"), 4, 4, ("int32", "query_length")),
        (ScalarArgument(name="scale", dtype="float32"), 4, 4, ("float32", "scale")),
    ],
)
def test_size_alignment_and_row_of_an_argument(argument, size, alignment, row):
    assert argument_bytes(argument) == (size, alignment)
    assert argument.as_row() == row


@pytest.mark.parametrize("variant", variants_to_build(), ids=lambda variant: variant.name)
def test_arguments_of_a_kernel(variant):
    arguments = kernel_arguments(variant)
    names = [getattr(argument, "operand", getattr(argument, "name", "")) for argument in arguments]
    assert len(set(names)) == len(names)
    # A kernel's parameter space, and the launcher's buffer for it.
    assert sum(argument_bytes(argument)[0] for argument in arguments) <= 4096
    for argument in arguments:
        if isinstance(argument, TensorMapArgument):
            assert argument.dtype == variant.dtype.value
            assert argument.box_columns == BOX_COLUMNS == SWIZZLE_BYTES // 2
            assert all(columns % argument.box_columns == 0 for columns in variant.head_dims)
            assert argument.box_rows <= 256  # cuTensorMapEncodeTiled
