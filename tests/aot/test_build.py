"""The ahead-of-time build, with the real compiler, on one small kernel."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jax_flash.aot import build as build_module
from jax_flash.aot.__main__ import main
from jax_flash.aot.build import selected_variants, up_to_date
from jax_flash.aot.inspect_cubin import inspect_cubin
from jax_flash.aot.instruction_mix import CLASS_NAMES
from jax_flash.spec.kernel_args import kernel_arguments
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.manifest import check_cubin, read_manifest, write_manifest
from jax_flash.spec.variant import KernelVariant

NAME = "finish_dq_f16_d128"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one kernel."""
    directory = tmp_path_factory.mktemp("cubins")
    assert main(["build", "--only", NAME, "--directory", str(directory), "-j", "1"]) == 0
    return directory


@pytest.fixture
def directory(built: Path, tmp_path: Path) -> Path:
    """A copy of that folder to change."""
    return shutil.copytree(built, tmp_path / "cubins")


def variant() -> KernelVariant:
    (chosen,) = selected_variants("sm_90a", NAME)
    return chosen


def test_one_kernel_was_built_and_described(built: Path):
    (entry,) = read_manifest(built).cubins
    assert entry.name == variant().name == f"sm_90a/{NAME}"
    check_cubin(entry, built)
    assert (built / entry.file).read_bytes().startswith(b"\x7fELF")
    plan = launch_plan(variant())
    assert entry.threads == plan.threads
    assert entry.arguments == tuple(a.as_row() for a in kernel_arguments(variant()))
    assert entry.grid == tuple((factor.value, factor.divisor) for factor in plan.grid)
    assert entry.resident_up_to == plan.resident_up_to
    assert entry.spill_bytes == 0
    assert entry.instructions["float"] > 0
    assert entry.instructions.keys() <= set(CLASS_NAMES)
    assert not {"tensor_core", "exp2", "local_memory"} & entry.instructions.keys()
    assert "nvidia-cutlass-dsl 4.8.1" in entry.toolchain
    names = sorted(path.name for path in built.rglob("*") if path.is_file())
    assert names == [f"{NAME}.cubin", f"{NAME}.ptx", "manifest.json"]


def test_inspection_reads_the_kernel_of_a_cubin(built: Path):
    (entry,) = read_manifest(built).cubins
    resources = inspect_cubin(built / entry.file)
    assert resources.symbol == entry.symbol
    assert resources.registers == entry.registers
    assert 8 <= resources.registers <= 255
    assert f".entry {entry.symbol}" in (built / entry.file).with_suffix(".ptx").read_text()


def test_a_second_build_does_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build_module, "ProcessPoolExecutor", None)  # would fail if it were used
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*.cubin")}
    assert main(["build", "--only", NAME, "--directory", str(directory)]) == 0
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*.cubin")} == before


def test_instructions_that_an_older_build_did_not_count_are_counted_without_compiling(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build_module, "ProcessPoolExecutor", None)  # would fail if it were used
    manifest = read_manifest(directory)
    (entry,) = manifest.cubins
    write_manifest(replace(manifest, cubins=(replace(entry, instructions={}),)), directory)
    assert main(["build", "--only", NAME, "--directory", str(directory)]) == 0
    assert read_manifest(directory) == manifest


def test_a_corrupt_cubin_is_built_again(directory: Path):
    (entry,) = read_manifest(directory).cubins
    (directory / entry.file).write_bytes(b"\x7fELF and nothing else")
    assert not up_to_date(variant(), entry, directory)
    assert main(["build", "--only", NAME, "--directory", str(directory), "-j", "1"]) == 0
    (again,) = read_manifest(directory).cubins
    check_cubin(again, directory)
    assert again == entry  # the same bytes: the compiler is deterministic


def test_a_cubin_is_stale_when_its_sources_change_or_its_ptx_is_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    (entry,) = read_manifest(directory).cubins
    assert up_to_date(variant(), entry, directory)
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "source_hash", lambda variant: "of other sources")
        assert not up_to_date(variant(), entry, directory)
    (directory / entry.file).with_suffix(".ptx").unlink()
    assert not up_to_date(variant(), entry, directory)


def test_entries_of_kernels_that_no_build_makes_are_dropped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build_module, "variants_to_build", lambda arch=None: ())
    assert build_module.build((), directory, 1).cubins == ()


def test_check_and_list(directory: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--only", NAME, "--directory", str(directory)]
    assert main(["check", *options]) == 0
    assert capsys.readouterr().out == ""
    assert main(["list", *options]) == 0
    assert f"sm_90a/{NAME}" in (listed := capsys.readouterr().out)
    assert "up to date" in listed
    assert "registers" in listed
    next(directory.rglob("*.cubin")).unlink()
    assert main(["check", *options]) == 1
    assert "1 of 1 kernels need `python -m jax_flash.aot build`" in capsys.readouterr().out


def test_check_without_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "--only", NAME, "--directory", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "No kernel manifest" in captured.err
    assert "not built" in captured.out


def test_an_unknown_name_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["build", "--only", "sideways", "--directory", str(tmp_path)]) == 2
    assert "no kernel is called like 'sideways'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_only_selects_by_part_of_the_name():
    names = [variant.name for variant in selected_variants("sm_90a", "forward_bf16")]
    assert names
    assert all("forward_bf16" in name for name in names)
    assert len(selected_variants(None, None)) > len(names)
