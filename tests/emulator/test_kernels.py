"""The compiled kernels, run on the emulator under several interleavings, against float64."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_flash.emulator.launch import Options
from jax_flash.emulator.schedule import Schedule
from jax_flash.spec.variant import DType

from .kernel_runs import (
    Problem,
    assert_close,
    exact,
    run_both,
    run_forward,
    run_with_statistics,
)

SCHEDULES = {
    "in turn, copies at once": Schedule(order="round_robin", landing="eager"),
    "random": Schedule(order="random", landing="random", seed=11),
    "producer starved, copies late": Schedule(order="starve", landing="lazy", starved=0, seed=1),
    "consumer starved": Schedule(order="starve", landing="random", starved=9, seed=2),
}

# Between them: every kernel source path (each dtype, head dimension, mask, both backward modes;
# lengths in ragged kernels and, with a soft cap, in general ones),
# ragged tails of both axes, grouped heads, several batch elements, rows and blocks without keys.
PROBLEMS = {
    "full": Problem(query_length=128, key_length=128),
    "full, ragged, grouped, D=128": Problem(
        query_length=100, key_length=150, head_dim=128, query_heads=2
    ),
    "full, deterministic, f16": Problem(
        dtype=DType.F16, query_length=130, key_length=290, deterministic=True
    ),
    "causal": Problem(query_length=200, key_length=200, upper=0),
    "causal, grouped, batch": Problem(
        query_length=70, key_length=140, upper=70, batch=2, query_heads=4, key_heads=2
    ),
    "causal, rows without keys, D=128, deterministic": Problem(
        query_length=150, key_length=40, head_dim=128, upper=-110, deterministic=True
    ),
    "causal, f16, D=128": Problem(
        dtype=DType.F16, query_length=64, key_length=300, head_dim=128, upper=236
    ),
    "window": Problem(query_length=300, key_length=420, lower=-70, upper=30),
    "window without right side, D=128, deterministic": Problem(
        query_length=150, key_length=290, head_dim=128, lower=40, deterministic=True
    ),
    "one query, one key": Problem(query_length=1, key_length=1, head_dim=128),
    "lengths, grouped": Problem(
        query_length=140,
        key_length=300,
        batch=2,
        query_heads=2,
        query_lengths=(140, 33),
        key_lengths=(130, 300),
    ),
    "lengths, causal, offsets, D=128, deterministic": Problem(
        query_length=100,
        key_length=260,
        head_dim=128,
        batch=3,
        upper=0,
        query_offset=(160, 10, -50),
        query_lengths=(100, 70, 100),
        key_lengths=(260, 77, 0),
        deterministic=True,
    ),
    "window, offsets, lengths of keys, f16": Problem(
        dtype=DType.F16,
        query_length=200,
        key_length=330,
        batch=2,
        lower=-90,
        upper=10,
        query_offset=(130, 0),
        key_lengths=(301, 64),
    ),
    "sinks, causal, grouped, f16": Problem(
        dtype=DType.F16,
        query_length=150,
        key_length=150,
        query_heads=4,
        key_heads=2,
        upper=-20,
        sinks=True,
    ),
    "sinks, lengths, D=128": Problem(
        query_length=70, key_length=150, head_dim=128, sinks=True, key_lengths=(101,)
    ),
    "narrow heads, deterministic": Problem(
        query_length=140, key_length=200, head_dim=40, value_head_dim=56, deterministic=True
    ),
    "D=104, Dv=72, causal": Problem(
        query_length=130, key_length=150, head_dim=104, value_head_dim=72, upper=20
    ),
    "D=256, ragged, grouped": Problem(
        query_length=100, key_length=150, head_dim=256, query_heads=2
    ),
    "D=192, Dv=128, causal, grouped": Problem(
        query_length=150,
        key_length=280,
        head_dim=192,
        value_head_dim=128,
        query_heads=2,
        upper=130,
    ),
    "D=256, causal, rows without keys": Problem(
        query_length=150, key_length=40, head_dim=256, upper=-110
    ),
    "D=256, f16, lengths of keys, sinks": Problem(
        dtype=DType.F16,
        query_length=140,
        key_length=200,
        head_dim=256,
        key_lengths=(170,),
        sinks=True,
    ),
    "D=200, Dv=136, window": Problem(
        query_length=140, key_length=200, head_dim=200, value_head_dim=136, lower=-60, upper=20
    ),
    "D=192, Dv=128, lengths, causal, offsets": Problem(
        query_length=100,
        key_length=260,
        head_dim=192,
        value_head_dim=128,
        batch=3,
        upper=0,
        query_offset=(160, 10, -50),
        query_lengths=(100, 70, 100),
        key_lengths=(260, 77, 0),
    ),
    "D=64, Dv=200, one query": Problem(
        query_length=1, key_length=70, head_dim=64, value_head_dim=200
    ),
}
# The same on general kernels.
PROBLEMS |= {
    f"{name}, soft cap": replace(PROBLEMS[name], soft_cap=2.0)
    for name in ("lengths, grouped", "lengths, causal, offsets, D=128, deterministic")
}
PROBLEMS["sinks, lengths, soft cap, f16, D=128"] = replace(
    PROBLEMS["sinks, lengths, D=128"], dtype=DType.F16, soft_cap=2.0
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_forward_and_backward(problem: str, schedule: str, kernel_directory: Path):
    case = PROBLEMS[problem]
    results = run_both(case, kernel_directory, Options(schedule=SCHEDULES[schedule]))
    assert_close(results, exact(case), case.dtype)


def test_interleavings_do_not_change_deterministic_bits(kernel_directory: Path):
    """Three key tiles add to each query tile: their order decides the bits of dQ."""
    case = Problem(query_length=128, key_length=384, deterministic=True)
    runs = [
        run_both(case, kernel_directory, Options(schedule=schedule, resident_clusters=resident))
        for schedule, resident in zip(SCHEDULES.values(), (1, 2, 3, 3), strict=True)
    ]
    for other in runs[1:]:
        for name, array in runs[0].items():
            assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("upper", [None, 0])
def test_bits_do_not_depend_on_the_grid(upper: int | None, kernel_directory: Path):
    """However many blocks share out the tiles: dealt in turns, or in pairs and longest first."""
    case = Problem(
        query_length=400, key_length=330, query_heads=6, key_heads=3, batch=2, upper=upper
    )
    grids = (1, 2, 5, 100)
    runs = [
        run_both(case, kernel_directory, Options(schedule=SCHEDULES["random"], multiprocessors=n))
        for n in grids
    ]
    assert_close(runs[0], exact(case), case.dtype)
    for other in runs[1:]:
        for name in ("output", "lse", "d_key", "d_value"):
            assert runs[0][name].tobytes() == other[name].tobytes(), name
        assert_close(other, exact(case), case.dtype)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Problem(query_length=200, key_length=330, batch=2, deterministic=True), id="D=64"
        ),
        pytest.param(
            Problem(query_length=150, key_length=330, head_dim=128, upper=60, deterministic=True),
            id="D=128, causal",
        ),
        pytest.param(
            Problem(
                query_length=200,
                key_length=400,
                head_dim=128,
                batch=2,
                key_lengths=(130, 400),
                query_lengths=(200, 0),
                upper=10,
                deterministic=True,
            ),
            id="D=128, lengths of 0",
        ),
        pytest.param(
            Problem(query_length=150, key_length=330, head_dim=128, query_heads=2, upper=60),
            id="D=128, causal, any order of sums",
        ),
    ],
)
def test_handed_out_key_tiles_get_done_whoever_takes_them(case: Problem, kernel_directory: Path):
    """Blocks take tiles from a counter: one of them all, or each one, also if few run at a time."""
    runs = [
        run_both(
            case,
            kernel_directory,
            Options(schedule=schedule, resident_clusters=resident, multiprocessors=blocks),
        )
        for schedule, resident, blocks in zip(
            SCHEDULES.values(), (1, 2, 3, 3), (3, 1, 3, 100), strict=True
        )
    ]
    assert_close(runs[0], exact(case), case.dtype)
    for other in runs[1:]:
        assert_close(other, exact(case), case.dtype)
        for name, array in runs[0].items():
            if case.deterministic or name != "d_query":
                assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    ("lower", "upper"), [(None, None), (None, 60), (-90, 30)], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("dtype", DType)
def test_the_kernel_for_few_queries_gives_the_same_bits(
    dtype: DType, lower: int | None, upper: int | None, kernel_directory: Path
):
    case = Problem(
        dtype=dtype, query_length=260, key_length=320, query_heads=2, lower=lower, upper=upper
    )
    options = Options(schedule=SCHEDULES["random"], multiprocessors=2)
    few = run_forward(replace(case, short=True), kernel_directory, options)
    assert_close(few, {name: exact(case)[name] for name in few}, dtype)
    many = run_forward(case, kernel_directory, options)
    for name, array in many.items():
        assert few[name].tobytes() == array.tobytes(), name


def test_forward_bits_do_not_depend_on_other_rows(kernel_directory: Path):
    """The numerics contract: a row's bits are those it has in a shorter, smaller batch."""
    case = Problem(query_length=140, key_length=140, upper=0, query_heads=2, batch=2)
    options = Options(schedule=SCHEDULES["random"])
    whole = run_forward(case, kernel_directory, options)
    inputs = case.inputs()
    alone = replace(case, batch=1, query_heads=1, query_length=70, key_length=70)
    arrays = {name: inputs[name][1:, :70, 1:2] for name in ("query", "key", "value")}
    # Two query heads share one key head here.
    arrays["key"], arrays["value"] = inputs["key"][1:, :70], inputs["value"][1:, :70]
    part, _ = run_with_statistics(alone, alone.forward(), arrays, kernel_directory, options)
    assert part["output"][0, :, 0].tobytes() == whole["output"][1, :70, 1].tobytes()
    assert np.array_equal(part["lse"][0, :, 0], whole["lse"][1, :70, 1])


@pytest.mark.parametrize("seed", range(int(os.environ.get("JAX_FLASH_SWEEP_SEEDS", "2"))))
def test_random_shapes(seed: int, kernel_directory: Path):
    """Under random interleavings; `JAX_FLASH_SWEEP_SEEDS=100` runs more of them."""
    rng = np.random.default_rng(seed)
    key_heads = int(rng.integers(1, 3))
    query_length, key_length = (int(n) for n in rng.integers(1, 500, 2))
    case = Problem(
        dtype=[DType.BF16, DType.F16][seed % 2],
        head_dim=[64, 128, 256][seed // 2 % 3],
        batch=int(rng.integers(1, 3)),
        query_length=query_length,
        key_length=key_length,
        query_heads=key_heads * int(rng.integers(1, 4)),
        key_heads=key_heads,
        upper=[None, key_length - query_length][seed // 4 % 2],
        lower=[None, key_length - query_length - int(rng.integers(1, 300))][rng.integers(2)],
        deterministic=bool(rng.integers(2)),
    )
    schedule = Schedule(order="random", landing=["random", "lazy"][seed % 2], seed=seed)
    results = run_both(case, kernel_directory, Options(schedule=schedule), seed)
    assert_close(results, exact(case, seed), case.dtype)
