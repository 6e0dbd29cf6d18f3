"""Kernels for the emulator's tests: compiled from the current sources, unless they already are."""

from __future__ import annotations

from pathlib import Path

import pytest

from jax_flash.ops import registration
from jax_flash.ops.registration import Registration
from jax_flash.spec.manifest import ManifestError, read_manifest
from jax_flash.spec.support import variants_to_build


@pytest.fixture(scope="session")
def kernel_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with manifest and PTX of every kernel, up to date with the sources."""
    # Imported where it is needed: the tests on a GPU run where there is no compiler.
    from jax_flash.aot.build import DEFAULT_DIRECTORY, build, up_to_date

    variants = variants_to_build()
    try:
        entries = read_manifest(DEFAULT_DIRECTORY).by_name()
    except ManifestError:
        entries = {}
    if all(up_to_date(v, entries.get(v.name), DEFAULT_DIRECTORY) for v in variants):
        return DEFAULT_DIRECTORY
    directory = tmp_path_factory.mktemp("kernels")
    build(variants, directory, jobs=1)
    return directory


@pytest.fixture
def emulated(kernel_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Registration:
    """Makes the kernels of the current sources those of the installation."""
    built = Registration(
        directory=kernel_directory, kernels=read_manifest(kernel_directory).by_name()
    )
    monkeypatch.setattr(registration, "REGISTRATION", built)
    return built
