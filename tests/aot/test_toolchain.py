"""What makes a cubin stale: the sources its kernel is made of, and the compiler."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from jax_flash.aot import toolchain as toolchain_module
from jax_flash.aot.build import MODULES
from jax_flash.aot.toolchain import source_hash, sources_of
from jax_flash.spec.variant import KernelRole

PACKAGE = Path(toolchain_module.__file__).parents[1]


def relative_sources(role: KernelRole) -> set[str]:
    return {path.relative_to(PACKAGE).as_posix() for path in sources_of(MODULES[role])}


def test_sources_are_what_a_kernel_imports_directly_or_not():
    forward = relative_sources(KernelRole.FORWARD)
    assert {
        "kernels/sm90/forward.py",
        "kernels/sm90/wgmma.py",
        "kernels/shared/online_softmax.py",
        "spec/tile_table.py",
        "spec/variant.py",
    } <= forward
    assert "kernels/sm90/backward.py" not in forward
    for role in KernelRole:
        folders = {name.split("/")[0] for name in relative_sources(role)}
        assert folders <= {"kernels", "spec"}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the sources, to change."""
    ignore = shutil.ignore_patterns("cubins", "__pycache__", "*.so")
    return shutil.copytree(PACKAGE, tmp_path / "jax_flash", ignore=ignore)


def load(package: Path) -> ModuleType:
    """Loads the toolchain module of a copy; it imports nothing of the package."""
    path = package / "aot" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("copied_toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hash_changes_with_the_sources_of_its_kernel_alone(copied: Path):
    forward, finish_dq = MODULES[KernelRole.FORWARD], MODULES[KernelRole.FINISH_DQ]
    before = load(copied)
    hashes = [before.source_hash(module, "kernel") for module in (forward, finish_dq)]
    assert hashes == [source_hash(module, "kernel") for module in (forward, finish_dq)]

    path = copied / "kernels" / "sm90" / "forward_compute.py"
    path.write_text(path.read_text() + "# changed\n")
    after = load(copied)
    assert after.source_hash(forward, "kernel") != hashes[0]
    assert after.source_hash(finish_dq, "kernel") == hashes[1]


def test_a_hash_changes_with_the_variant_and_the_compiler(monkeypatch: pytest.MonkeyPatch):
    module = MODULES[KernelRole.FORWARD]
    ours = source_hash(module, "kernel")
    assert source_hash(module, "other") != ours
    monkeypatch.setattr(toolchain_module, "toolchain", lambda: "another compiler")
    assert source_hash(module, "kernel") != ours


def test_the_toolchain_names_every_part_of_the_compiler():
    parts = dict(part.rsplit(" ", 1) for part in toolchain_module.toolchain().split(", "))
    assert parts["nvidia-cutlass-dsl"] == "4.8.1"
    assert {version for name, version in parts.items() if "libs" in name} == {"4.8.1"}
    assert any("libs" in name for name in parts)
