"""What import makes of a healthy, a missing and a broken installation."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_flash.ops import registration
from jax_flash.ops.registration import register
from jax_flash.spec.kernel_args import ABI_VERSION
from jax_flash.spec.manifest import MANIFEST_NAME, CubinEntry, Manifest, write_manifest
from jax_flash.spec.support import variants_to_build

MakeEntry = Callable[..., CubinEntry]


class Extension(SimpleNamespace):
    """Stands for the extension module; records what it is told."""

    def __init__(self, abi_version: int = ABI_VERSION) -> None:
        super().__init__(ABI_VERSION=abi_version, kernels={}, asked_for_registrations=False)

    def add_kernel(self, name: str, **fields: Any) -> None:
        if len(fields["sha256"]) != 64:
            raise ValueError("sha256 is not 64 hexadecimal digits")
        self.kernels[name] = fields

    def registrations(self) -> dict[str, dict[str, object]]:
        self.asked_for_registrations = True
        return {"some_target": {"execute": "a capsule"}}


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records what would be registered with XLA."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        jax.ffi,
        "register_ffi_target",
        lambda name, stages, platform: calls.append((name, stages, platform)),
    )
    return calls


@pytest.fixture
def directory(tmp_path: Path, make_entry: MakeEntry) -> Path:
    """A directory with a manifest of every kernel."""
    entries = tuple(make_entry(variant) for variant in variants_to_build())
    write_manifest(Manifest(abi_version=ABI_VERSION, cubins=entries), tmp_path)
    return tmp_path


def test_a_healthy_installation(directory: Path, targets: list[tuple[Any, ...]]) -> None:
    extension = Extension()
    outcome = register(directory, lambda: extension)
    assert outcome.error == ""
    assert set(outcome.kernels) == {variant.name for variant in variants_to_build()}
    assert set(extension.kernels) == set(outcome.kernels)
    assert targets == [("some_target", {"execute": "a capsule"}, "CUDA")]
    name = "sm_90a/forward_bf16_d64_causal"
    fields = extension.kernels[name]
    assert fields["path"] == str(directory / f"{name}.cubin")
    assert fields["arguments"][0] == ("tensor_map", "query", "bf16", 64, 64, 128)
    assert fields["grid"][1:] == (("query_heads", 1), ("batch", 1))
    assert fields["cluster"] == (1, 1, 1)
    assert fields["resident_up_to"] == 2**31 - 1


def test_a_missing_manifest_is_named(tmp_path: Path, targets: list[tuple[Any, ...]]) -> None:
    outcome = register(tmp_path, Extension)
    assert f"No kernel manifest at {tmp_path / MANIFEST_NAME}" in outcome.error
    assert "python -m jax_flash.aot build" in outcome.error
    assert not outcome.kernels
    assert not targets


def test_a_manifest_that_is_no_json_is_named(
    directory: Path, targets: list[tuple[Any, ...]]
) -> None:
    (directory / MANIFEST_NAME).write_text("{")
    outcome = register(directory, Extension)
    assert f"{directory / MANIFEST_NAME} is not valid JSON" in outcome.error
    assert not targets


def test_a_manifest_of_another_version_is_named(
    directory: Path, targets: list[tuple[Any, ...]]
) -> None:
    write_manifest(Manifest(abi_version=ABI_VERSION + 1, cubins=()), directory)
    outcome = register(directory, Extension)
    assert f"has kernel ABI version {ABI_VERSION + 1}" in outcome.error
    assert f"needs {ABI_VERSION}" in outcome.error
    assert str(directory / MANIFEST_NAME) in outcome.error
    assert not targets


def test_an_unusable_row_is_named(
    tmp_path: Path, make_entry: MakeEntry, targets: list[tuple[Any, ...]]
) -> None:
    bad = make_entry(variants_to_build()[0], sha256="short")
    write_manifest(Manifest(abi_version=ABI_VERSION, cubins=(bad,)), tmp_path)
    outcome = register(tmp_path, Extension)
    assert f"unusable row for kernel {bad.name} (sha256 is not 64" in outcome.error
    assert "Reinstall jax_flash" in outcome.error
    assert not targets


def test_an_extension_of_another_version_is_refused(
    directory: Path, targets: list[tuple[Any, ...]]
) -> None:
    extension = Extension(abi_version=ABI_VERSION + 7)
    outcome = register(directory, lambda: extension)
    assert f"has kernel ABI version {ABI_VERSION + 7}" in outcome.error
    assert "Install jax_flash with pip" in outcome.error
    assert not extension.kernels
    assert not targets


def test_a_missing_extension_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, targets: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setattr(registration, "_EXTENSION", "jax_flash._not_there")
    outcome = register(directory, registration.load_extension)
    assert "The extension module jax_flash._not_there is not built" in outcome.error
    assert "Install jax_flash with pip" in outcome.error
    assert not targets


def test_an_extension_that_does_not_load_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, targets: list[tuple[Any, ...]]
) -> None:
    (directory / "broken_extension.so").write_bytes(b"no ELF file")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setattr(registration, "_EXTENSION", "broken_extension")
    outcome = register(directory, registration.load_extension)
    assert "The extension module broken_extension does not load (" in outcome.error
    assert not targets
