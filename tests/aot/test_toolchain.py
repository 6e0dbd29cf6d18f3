"""What makes a cubin stale: the sources its kernel is made of, and the compiler."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from jax_flash.aot import toolchain as toolchain_module
from jax_flash.aot.kernel_classes import KERNEL_CLASSES
from jax_flash.aot.toolchain import source_hash, sources_of
from jax_flash.spec.arch import Arch
from jax_flash.spec.variant import DType, KernelRole, KernelVariant

PACKAGE = Path(toolchain_module.__file__).parents[1]


def variant_of(role: KernelRole, head_dim: int = 64) -> KernelVariant:
    head_dims = head_dim, head_dim
    return KernelVariant(role=role, arch=Arch.SM90A, dtype=DType.BF16, head_dims=head_dims)


def relative_sources(role: KernelRole) -> set[str]:
    return {
        path.relative_to(PACKAGE).as_posix() for path in sources_of(KERNEL_CLASSES[role].module)
    }


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
    """Loads the toolchain module of a copy; it hashes the files beside it."""
    path = package / "aot" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("copied_toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hash_changes_with_the_sources_of_its_kernel_alone(copied: Path):
    forward, finish_dq = variant_of(KernelRole.FORWARD), variant_of(KernelRole.FINISH_DQ)
    before = load(copied)
    hashes = [before.source_hash(variant) for variant in (forward, finish_dq)]
    assert hashes == [source_hash(variant) for variant in (forward, finish_dq)]

    path = copied / "kernels" / "sm90" / "forward_compute.py"
    path.write_text(path.read_text() + "# changed\n")
    after = load(copied)
    assert after.source_hash(forward) != hashes[0]
    assert after.source_hash(finish_dq) == hashes[1]


def test_a_hash_changes_with_the_variant_and_the_compiler(monkeypatch: pytest.MonkeyPatch):
    variant = variant_of(KernelRole.FORWARD)
    ours = source_hash(variant)
    assert source_hash(variant_of(KernelRole.FORWARD, head_dim=128)) != ours
    monkeypatch.setattr(toolchain_module, "toolchain", lambda: "another compiler")
    assert source_hash(variant) != ours


def test_the_toolchain_names_every_part_of_the_compiler():
    parts = dict(part.rsplit(" ", 1) for part in toolchain_module.toolchain().split(", "))
    assert parts["nvidia-cutlass-dsl"] == "4.8.1"
    assert {version for name, version in parts.items() if "libs" in name} == {"4.8.1"}
    assert any("libs" in name for name in parts)
