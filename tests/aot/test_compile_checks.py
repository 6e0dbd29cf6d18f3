"""What the build refuses: a kernel that is not what its specification says."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from jax_flash.aot import build as build_module
from jax_flash.aot import compile as compile_module
from jax_flash.aot import inspect_cubin as inspect_module
from jax_flash.aot.compile import CompiledKernel, KernelBuildError, compile_variant, entry_of
from jax_flash.aot.inspect_cubin import CubinResources, inspect_cubin
from jax_flash.spec.arch import Arch
from jax_flash.spec.variant import DType, KernelRole, KernelVariant

# Importing the kernels imports the DSL, which warns of names that it has moved itself.
pytestmark = pytest.mark.filterwarnings("ignore:cutlass:DeprecationWarning")

VARIANT = KernelVariant(
    role=KernelRole.FINISH_DQ, arch=Arch.SM90A, dtype=DType.F16, head_dims=(64, 64)
)
SYMBOL = "jax_flash_finish_dq_f16_d64"

PTX = f"""
.version 8.8
.target sm_90a
.visible .entry {SYMBOL}(
    .param .align 64 .b8 map[128],
    .param .u64 .ptr .global .align 16 pointer,
    .param .f32 scale,
    .param .u32 length
)
.maxntid 256, 1, 1
{{ ret; }}
"""


def test_the_entry_of_ptx():
    assert entry_of(PTX) == (SYMBOL, [128, 8, 4, 4])
    assert entry_of(".entry alone() { ret; }") == ("alone", [])


@pytest.mark.parametrize("ptx", ["", PTX + PTX.replace(SYMBOL, "second")])
def test_ptx_must_have_one_kernel(ptx: str):
    with pytest.raises(KernelBuildError, match="expected one kernel, the PTX has"):
        entry_of(ptx)


def compile_to(monkeypatch: pytest.MonkeyPatch, ptx: str) -> CompiledKernel:
    """Compiles VARIANT with a compiler that gives `ptx` whatever it is asked for."""

    class Compiler:
        def __getitem__(self, options: object):
            return lambda *arguments: SimpleNamespace(
                artifacts=SimpleNamespace(PTX=ptx, CUBIN=b"cubin")
            )

    monkeypatch.setattr(compile_module.cute, "compile", Compiler())
    return compile_variant(VARIANT)


def test_parameters_that_differ_from_the_specification(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KernelBuildError) as error:
        compile_to(monkeypatch, PTX)
    assert "takes parameters of [128, 8, 4, 4] bytes" in str(error.value)
    assert "spec.kernel_args says [8, 128, 4, 4, 4]" in str(error.value)
    assert VARIANT.name in str(error.value)


class Pair(NamedTuple):
    first: int
    second: int


class Pairs(NamedTuple):
    pair: Pair
    third: int


class KernelWithRecords:
    def __call__(self, alone: int, pairs: Pairs, last: int, extra: int | None = None) -> None: ...


def test_records_take_their_parameters_one_after_the_other():
    arguments = compile_module.in_records(KernelWithRecords(), [0, 1, 2, 3, 4])
    assert arguments == [0, Pairs(Pair(1, 2), 3), 4]
    arguments = compile_module.in_records(KernelWithRecords(), [0, 1, 2, 3, 4, 5])
    assert arguments == [0, Pairs(Pair(1, 2), 3), 4, 5]
    with pytest.raises(KernelBuildError, match=r"takes 6 parameters, .* has 7"):
        compile_module.in_records(KernelWithRecords(), [0, 1, 2, 3, 4, 5, 6])
    with pytest.raises(KernelBuildError, match="takes more parameters than the 4"):
        compile_module.in_records(KernelWithRecords(), [0, 1, 2, 3])


def test_a_kernel_of_another_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KernelBuildError, match="the compiled kernel is called other"):
        compile_to(monkeypatch, PTX.replace(SYMBOL, "other"))


RESOURCES = CubinResources(
    symbol=SYMBOL,
    registers=40,
    spill_bytes=0,
    matmuls_serialised=False,
    instructions={"float": 1},
)


def build_with(monkeypatch: pytest.MonkeyPatch, directory: Path, resources: CubinResources) -> None:
    """Builds VARIANT from a compiled kernel that has these resources."""
    compiled = CompiledKernel(symbol=SYMBOL, ptx=PTX, cubin=b"cubin")
    monkeypatch.setattr(compile_module, "compile_variant", lambda variant: compiled)
    monkeypatch.setattr(build_module, "inspect_cubin", lambda path: resources)
    build_module.build_one(VARIANT, directory)


def test_a_kernel_that_spills_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    resources = replace(RESOURCES, registers=255, spill_bytes=48)
    with pytest.raises(ValueError, match=f"{VARIANT.name} spills 48 bytes a thread"):
        build_with(monkeypatch, tmp_path, resources)


def test_a_kernel_whose_matmuls_the_compiler_serialises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    resources = replace(RESOURCES, matmuls_serialised=True)
    with pytest.raises(ValueError, match=f"{VARIANT.name}: the compiler serialises its matmuls"):
        build_with(monkeypatch, tmp_path, resources)


def test_serialised_matmuls_are_told_from_their_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    usage = "Function name:\n  REG:32 STACK:0 SHARED:0 LOCAL:0\n"

    def resources(code: str) -> CubinResources:
        reports = {"--dump-resource-usage": usage, "--dump-sass": code}
        monkeypatch.setattr(
            inspect_module.subprocess,
            "run",
            lambda command, **_: SimpleNamespace(stdout=reports[command[1]]),
        )
        return inspect_cubin(tmp_path / "any.cubin")

    overlapped = "HGMMA.64x128x16\nHGMMA.64x128x16\nWARPGROUP.DEPBAR.LE gsb0, 0x1\n"
    assert not resources(overlapped).matmuls_serialised
    assert resources("HGMMA.64x128x16\nWARPGROUP.DEPBAR.LE gsb0, 0x0\n" * 2).matmuls_serialised
    assert not resources("FFMA\n").matmuls_serialised


def test_a_cubin_that_holds_another_kernel_than_its_ptx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    resources = replace(RESOURCES, symbol="other")
    with pytest.raises(ValueError, match=f"the cubin holds other, the PTX {SYMBOL}"):
        build_with(monkeypatch, tmp_path, resources)


def test_without_cuobjdump_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(inspect_module, "files", missing)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-cuobjdump"):
        inspect_cubin(tmp_path / "any.cubin")


@pytest.mark.parametrize("count", [0, 2])
def test_a_cubin_must_hold_one_kernel(count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    line = " Function a:\n  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:500\n"
    report = SimpleNamespace(stdout=line * count)
    monkeypatch.setattr(inspect_module.subprocess, "run", lambda *_, **__: report)
    with pytest.raises(ValueError, match=f"holds {count} kernels, expected 1"):
        inspect_cubin(tmp_path / "any.cubin")
