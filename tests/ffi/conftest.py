"""Builds the C++ code for the tests of this folder, each configuration once per session."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Build = Callable[..., Path]


def tool(name: str) -> str:
    """Path of a program: that of this Python's environment, else the system's."""
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    assert found is not None, f"{name} is required: pip install {name}"
    return found


def run(*command: str, **options) -> None:
    """Runs a command, and shows what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Returns `build(targets, *cmake_options) -> build folder`."""
    built: dict[tuple[str, ...], Path] = {}

    def build_once(targets: tuple[str, ...], *options: str) -> Path:
        if (*targets, *options) not in built:
            folder = tmp_path_factory.mktemp("ffi_build")
            run(
                *(tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(folder)),
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                f"-DPython_EXECUTABLE={sys.executable}",
                *("-DJAX_FLASH_BUILD_CUBINS=OFF", "-DJAX_FLASH_BUILD_TESTS=ON"),
                *options,
            )
            run(tool("cmake"), "--build", str(folder), "--target", *targets)
            built[(*targets, *options)] = folder
        return built[(*targets, *options)]

    return build_once


@pytest.fixture(scope="session")
def testing_build(build: Build) -> Path:
    """A build of the extension with the handlers for XLA's CPU backend, and the fake driver."""
    options = ("-DCMAKE_BUILD_TYPE=Debug", "-DJAX_FLASH_TESTING=ON")
    return build(("_ffi", "fakecuda"), *options)
