"""Why a problem has no kernel."""

from dataclasses import replace

import pytest

from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BandMask
from jax_flash.spec.problem import AttentionProblem, Feature
from jax_flash.spec.support import (
    KERNEL_DTYPES,
    backward_tile_dims,
    forward_tile_dims,
    reasons_unsupported,
)
from jax_flash.spec.tile_table import BACKWARD_TILES, FORWARD_TILES

SUPPORTED = AttentionProblem(
    dtype="bfloat16",
    query_length=1000,
    key_length=300,
    query_heads=8,
    key_heads=2,
    head_dim=128,
    value_head_dim=128,
)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "band",
    [BandMask(lower=lower, upper=upper) for lower in (False, True) for upper in (False, True)],
    ids=lambda band: band.name,
)
def test_supported_problems(dtype, head_dim, band):
    problem = replace(SUPPORTED, dtype=dtype, head_dim=head_dim, value_head_dim=head_dim, band=band)
    assert reasons_unsupported(problem, Arch.SM90A) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, ("float32", "bfloat16 and float16")),
        ({"head_dim": 100}, ("D=100", "Dv=128", "multiples of 8 up to 256")),
        ({"value_head_dim": 264}, ("D=128", "Dv=264")),
        ({"query_length": 0}, ("query_length=0", "at least one query")),
        ({"key_length": 0}, ("key_length=0", "at least one")),
    ],
)
def test_a_reason_says_what_was_given_and_what_kernels_need(change, words):
    (reason,) = reasons_unsupported(replace(SUPPORTED, **change), Arch.SM90A)
    for word in words:
        assert word in reason


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_every_feature_has_kernels(feature):
    problem = replace(SUPPORTED, features=frozenset({feature}))
    assert reasons_unsupported(problem, Arch.SM90A) == ()


@pytest.mark.parametrize(
    ("head_dims", "tile"),
    [
        ((8, 8), (64, 64)),
        ((64, 72), (128, 128)),
        ((136, 64), (192, 128)),
        ((192, 128), (192, 128)),
        ((64, 136), (256, 256)),
        ((256, 256), (256, 256)),
    ],
)
def test_the_smallest_tile_that_holds_the_head_dimensions_is_taken(head_dims, tile):
    problem = replace(SUPPORTED, head_dim=head_dims[0], value_head_dim=head_dims[1])
    assert forward_tile_dims(problem, Arch.SM90A) == tile
    assert backward_tile_dims(problem, Arch.SM90A) == tile


def test_whatever_runs_forward_can_be_differentiated():
    assert FORWARD_TILES.keys() == BACKWARD_TILES.keys()


def test_every_reason_is_given_at_once():
    problem = replace(SUPPORTED, dtype="float32", head_dim=97, key_length=0)
    assert len(reasons_unsupported(problem, Arch.SM90A)) == 3


def test_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match="query_heads=8 is not a multiple of key_heads=3"):
        replace(SUPPORTED, key_heads=3)
    assert SUPPORTED.heads_per_group == 4
