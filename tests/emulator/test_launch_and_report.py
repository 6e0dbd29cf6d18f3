"""Launches by the manifest, the unit report, and the parser's view of a file."""

from __future__ import annotations

import shutil
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.launch import (
    CallMemory,
    Options,
    grid_blocks,
    load_kernel,
    pack_parameters,
)
from jax_flash.emulator.parser import parse_ptx
from jax_flash.emulator.report import MACHINES, unit_cycles, unit_report
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.statistics import Statistics
from jax_flash.emulator.tensor_map import decode
from jax_flash.spec.kernel_args import PointerArgument, ScalarArgument, TensorMapArgument

from .kernel_runs import Problem, run_with_statistics

PROBLEM = Problem(query_length=128, key_length=128)


def test_parameters_are_laid_out_as_in_the_kernel():
    call = CallMemory()
    call.add("key", (2, 100, 3, 64), np.dtype(np.float16))
    call.add("lse", (2, 100, 3), np.dtype(np.float32))
    packed = pack_parameters(
        (
            ScalarArgument(name="scale", dtype="float32"),
            TensorMapArgument(operand="key", dtype="f16", box_columns=64, box_rows=32),
            PointerArgument(operand="lse", dtype="f32"),
            ScalarArgument(name="batch"),
        ),
        call,
        {"scale": 0.5, "batch": 2},
    )
    assert len(packed) == 64 + 128 + 8 + 4
    assert struct.unpack_from("<f", packed)[0] == 0.5
    tensor_map = decode(packed[64:192])
    assert tensor_map.extents == (64, 100, 3, 2) and tensor_map.box == (64, 32, 1, 1)
    assert tensor_map.strides == (3 * 128, 128, 100 * 3 * 128)
    assert struct.unpack_from("<Qi", packed, 192) == (call.addresses["lse"], 2)


def test_grids_follow_the_manifest(kernel_directory: Path):
    kernel = load_kernel(PROBLEM.forward().kernels[0], kernel_directory)
    entry = replace(
        kernel.entry,
        grid=(("query_length", 128), ("query_heads", 1), ("batch", 1)),
        cluster=(2, 1, 1),
        resident_up_to=1000,
    )
    values = {"query_length": 600, "query_heads": 3, "batch": 1}
    assert grid_blocks(entry, values, 6) == 6
    assert grid_blocks(entry, values, 1) == 2  # a whole cluster at least
    assert grid_blocks(entry, values | {"query_length": 1001}, 6) == 24


def test_what_is_missing_is_named(kernel_directory: Path, tmp_path: Path):
    variant = PROBLEM.forward().kernels[0]
    shutil.copy(kernel_directory / "manifest.json", tmp_path)
    with pytest.raises(PtxError, match="no PTX at"):
        load_kernel(variant, tmp_path)
    path = tmp_path / f"{variant.name}.ptx"
    path.parent.mkdir()
    text = (kernel_directory / f"{variant.name}.ptx").read_text()
    path.write_text(text.replace(".param .f32", ".param .u64", 1))
    with pytest.raises(PtxError, match="are not the specification's"):
        load_kernel(variant, tmp_path)
    path.write_text("hello")
    with pytest.raises(PtxError, match=r"no \.version directive"):
        load_kernel(variant, tmp_path)


def statistics_by_hand() -> Statistics:
    """Of 8 warps of two blocks: 10 ex2, 30 integer instructions, one 64 x 128 x 16 matmul."""
    producer, consumer = {1, 2, 3, 4}, {1, 2, 10, 11, 12}
    return Statistics(
        instructions=Counter({(4, "special function"): 10, (0, "integer"): 28, (1, "integer"): 2}),
        lines={0: producer, 1: {1, 2}, **dict.fromkeys(range(4, 8), consumer), 6: consumer | {13}},
        traffic=Counter({"shared read by warps": 1280, "global read by bulk copies": 1000}),
        tensor_operations=Counter({"wgmma bfloat16": 64 * 128 * 16}),
        blocks=2,
    )


def test_unit_cycles():
    """Rates of research: 4096 and 8192 operations, 16 or 32 ex2, 128 shared bytes a clock."""
    statistics = statistics_by_hand()
    cycles = unit_cycles(statistics, MACHINES["H200"])
    assert cycles["special functions"] == 10 * 32 / 16
    assert cycles["tensor cores"] == 2 * 64 * 128 * 16 / 4096
    assert cycles["shared memory"] == 10 and cycles["instruction issue"] == 10
    assert unit_cycles(statistics, MACHINES["B300"])["special functions"] == 10
    assert unit_cycles(statistics, MACHINES["B200"])["tensor cores"] == 32
    assert cycles["global memory"] == pytest.approx(1000 * 132 * 1.83e9 / 4.8e12)


def test_eight_bit_matmuls_and_bank_conflicts_in_the_model():
    statistics = statistics_by_hand()
    statistics.tensor_operations["tcgen05 float8_e4m3fn"] = 64 * 128 * 16
    statistics.traffic["shared write by bulk copies"] = 256
    statistics.shared_passes.update({"passes": 40, "ideal passes": 10})
    cycles = unit_cycles(statistics, MACHINES["B200"])
    assert cycles["tensor cores"] == 32 + 16
    assert cycles["shared memory"] == 40 + 2


def test_the_report_names_the_bound_and_the_roles():
    statistics = statistics_by_hand()
    text = unit_report("kernel", statistics, MACHINES["H200"])
    assert "for each block (of 2); a model, not a measurement" in text
    assert text.splitlines()[1].split() == [
        "tensor",
        "cores",
        "32",
        "cycles",
        "100.0%",
        "of",
        "the",
        "bound",
    ]
    roles = statistics.roles()
    assert list(roles) == ["warps 0 to 1", "warps 4 to 7"]
    assert roles["warps 0 to 1"] == {"integer": 30}
    assert "warps 0 to 1: integer 15" in text and "global read by bulk copies: 500 bytes" in text
    doubled = statistics_by_hand()
    doubled.merge(statistics)
    doubled_text = unit_report("kernel", doubled, MACHINES["H200"], scores=2 * 128 * 128)
    assert (
        "for each 128 x 128 scores" in doubled_text
        and "warps 4 to 7: special function 10" in doubled_text
    )


def test_statistics_of_a_kernel_are_what_the_algorithm_needs(kernel_directory: Path):
    problem = Problem(query_length=384, key_length=256)
    _, statistics = run_with_statistics(
        problem,
        problem.forward(),
        problem.inputs(),
        kernel_directory,
        Options(schedule=Schedule(order="round_robin", landing="eager")),
    )
    (counted,) = statistics.values()
    # Two products of T x S x D each, and one ex2 for each score; a dozen more for each row.
    assert counted.tensor_operations["wgmma bfloat16"] == 2 * 384 * 256 * 64
    special = sum(n for (_, kind), n in counted.instructions.items() if kind == "special function")
    assert 384 * 256 // 32 <= special <= 384 * (256 + 12 * 4) // 32
    # A multiply and a subtraction before each ex2, a comparison and a sum.
    floats = sum(n for (_, kind), n in counted.instructions.items() if kind == "floating point")
    assert floats >= 4 * 384 * 256 // 32


def test_the_parser_keeps_scopes_and_variables_apart():
    module = parse_ptx(
        """
        .version 9.1
        .target sm_100a
        .address_size 64
        .global .align 4 .b32 table[3] = {1, 2, 0xFF};
        .shared .align 16 .b8 fixed[48];
        .visible .entry kernel(.param .align 16 .b8 one[32], .param .u32 two) .reqntid 64 {
            .reg .b32 %r<2>, x;
            { .reg .b32 x; mov.b32 x, 1; // inner
              LOOP: bra LOOP; }
            /* outer */ mov.b32 x, %r1;
            { LOOP: bra LOOP; }
        }
        """
    )
    entry = module.entries["kernel"]
    assert module.version == (9, 1) and entry.threads == (64, 1, 1)
    assert [(p.offset, p.size) for p in entry.parameters] == [(0, 32), (32, 4)]
    assert {v.name: (v.space, v.size) for v in module.variables} == {
        "table": ("global", 12),
        "fixed": ("shared", 48),
    }
    assert module.variables[0].data == struct.pack("<III", 1, 2, 255)
    assert sorted(entry.registers) == ["%r0", "%r1", "x", "x#1"]
    assert sorted(entry.labels.values()) == [1, 3]
    assert entry.statements[0].line == 9 and entry.statements[2].line == 11


def test_schedules_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="order='fast' is not one of"):
        Schedule(order="fast")
    with pytest.raises(ValueError, match="landing='fast' is not one of"):
        Schedule(landing="fast")
