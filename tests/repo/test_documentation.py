"""The documentation agrees with the code: commands, paths, versions, what is supported."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import jax_flash
from jax_flash.spec.arch import Arch
from jax_flash.spec.buffers import OPTIONAL_OPERANDS
from jax_flash.spec.problem import GENERAL_FEATURES, Feature
from jax_flash.spec.support import KERNEL_DTYPES, variants_to_build
from jax_flash.spec.variant import KernelRole

from .sources import ROOT, files_with_suffix

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Folders that exist after a build or a run, not in a clone.
GENERATED = ("jax_flash/cubins", "jax_flash/_ffi", "outputs/", "build/")
TOP_FOLDERS = ("benchmarks", "bazel", "docs", "examples", "ffi", "jax_flash", "tests", ".ci")


def fenced_blocks(text: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_has_two_commands():
    blocks = fenced_blocks(README)
    assert len(blocks) == 2
    install_example, install_tests = (block.strip() for block in blocks)
    assert "\n" not in install_example
    assert "\n" not in install_tests
    assert install_example.endswith("python examples/train_gpt.py")
    assert install_tests.endswith("pytest")
    for extra in re.findall(r"\.\[(\w+)\]", "".join(blocks)):
        assert extra in PROJECT["optional-dependencies"]


def test_ci_runs_the_readmes_test_command():
    for number, block in enumerate(fenced_blocks(README), start=1):
        printed = subprocess.run(
            [ROOT / ".ci" / "readme_command", str(number)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed == block
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command 2" in script
    for check in ("ruff check", "ruff format --check", "pyright"):
        assert re.search(rf"^{check}", script, flags=re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


@pytest.mark.parametrize("document", files_with_suffix(".md"), ids=str)
def test_links_and_paths_exist(document: Path):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / document.parent / target).exists(), f"{document} links to {target}"
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text):
        if path.split("/")[0] in TOP_FOLDERS and not path.startswith(GENERATED):
            assert (ROOT / path).exists(), f"{document} names {path}"


@pytest.mark.parametrize("document", files_with_suffix(".md"), ids=str)
def test_modules_that_documents_name_exist(document: Path):
    text = (ROOT / document).read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        if module.split(".")[0] in TOP_FOLDERS:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_one_version():
    version = PROJECT["version"]
    assert jax_flash.__version__ in (version, "0+unknown")
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert f"project(jax_flash VERSION {version} " in cmake
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\]", changelog, flags=re.MULTILINE)


def test_the_readmes_python_version_is_the_projects():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {oldest} or newer" in README


def test_the_readme_says_what_kernels_exist():
    forward = [v for v in variants_to_build() if v.role is KernelRole.FORWARD]
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in README.splitlines()
        if len(cells := line.split("|")) == 5
    }
    assert rows["dtypes"] == ", ".join(KERNEL_DTYPES)
    largest = max(max(variant.head_dims) for variant in forward)
    of_keys = (KernelRole.BACKWARD, KernelRole.BACKWARD_KV)
    backward = [v for v in variants_to_build() if v.role in of_keys]
    assert max(max(variant.head_dims) for variant in backward) == largest
    assert rows["head dimensions"] == f"D and Dv any multiple of 8 up to {largest}"
    for arch in Arch:
        assert arch.value in rows["hardware"]
    assert set(Feature) == set(OPTIONAL_OPERANDS) | GENERAL_FEATURES
    assert rows["masks"].endswith("dense masks and biases")
    # Every mask in every size: five kinds of kernel for each tile and dtype.
    any_length = [v for v in forward if not v.short]
    kinds = {(v.band, v.support) for v in any_length}
    assert len(kinds) == 5
    assert len(any_length) == 5 * len(KERNEL_DTYPES) * len({v.head_dims for v in forward})
