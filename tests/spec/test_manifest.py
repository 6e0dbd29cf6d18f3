"""The manifest on disk, and the errors for one that cannot be used."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jax_flash.spec.kernel_args import ABI_VERSION
from jax_flash.spec.manifest import (
    MANIFEST_NAME,
    CubinEntry,
    Manifest,
    ManifestError,
    check_cubin,
    read_manifest,
    write_manifest,
)

CUBIN = b"machine code"
REMEDY = r"Reinstall jax_flash, or run `python -m jax_flash\.aot build`"

ENTRY = CubinEntry(
    name="sm_90a/forward_bf16_d64_full",
    file="sm_90a/forward_bf16_d64_full.cubin",
    symbol="jax_flash_forward_bf16_d64_full",
    sha256=hashlib.sha256(CUBIN).hexdigest(),
    arguments=(("tensor_map", "query", "bf16", 64, 64, 128), ("int32", "query_length")),
    grid=(("query_length", 128), ("batch", 1)),
    threads=384,
    cluster=(1, 1, 1),
    programmatic_launch=False,
    resident_up_to=1024,
    shared_memory_bytes=1024,
    registers=168,
    spill_bytes=0,
    tile={"tile_q": 128},
    toolchain="compiler 1",
    source_hash="0123",
    instructions={"tensor_core": 32, "float": 700},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_manifest(Manifest(abi_version=ABI_VERSION, cubins=(ENTRY,)), tmp_path)
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / ENTRY.file).write_bytes(CUBIN)
    return tmp_path


def rewrite(directory: Path, **changes) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_written_is_read(directory: Path):
    manifest = read_manifest(directory)
    assert manifest.by_name() == {ENTRY.name: ENTRY}
    assert manifest.abi_version == ABI_VERSION
    assert list(directory.glob("*.new")) == []
    check_cubin(ENTRY, directory)


def test_a_missing_manifest_is_named(tmp_path: Path):
    with pytest.raises(ManifestError, match=rf"No kernel manifest at .*{MANIFEST_NAME}.*{REMEDY}"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_not_json_is_named(directory: Path):
    (directory / MANIFEST_NAME).write_text('{"abi_version": 1, ')
    with pytest.raises(ManifestError, match=rf"{MANIFEST_NAME} is not valid JSON.*{REMEDY}"):
        read_manifest(directory)


@pytest.mark.parametrize("version", [ABI_VERSION + 1, None, "1"])
def test_another_abi_version_is_refused_with_both_versions(directory: Path, version):
    rewrite(directory, abi_version=version)
    text = rf"has kernel ABI version {version}, this jax_flash needs {ABI_VERSION}.*{REMEDY}"
    with pytest.raises(ManifestError, match=text):
        read_manifest(directory)


def test_a_list_is_no_manifest(directory: Path):
    (directory / MANIFEST_NAME).write_text("[]")
    with pytest.raises(ManifestError, match="has kernel ABI version None"):
        read_manifest(directory)


def test_rows_with_other_fields_are_refused(directory: Path):
    path = directory / MANIFEST_NAME
    (row,) = json.loads(path.read_text())["cubins"]
    del row["threads"]
    rewrite(directory, cubins=[row | {"colour": "red"}])
    with pytest.raises(ManifestError, match=r"lacks \['threads'\] or has unknown \['colour'\]"):
        read_manifest(directory)


def test_rows_of_builds_that_did_not_count_instructions_can_be_read(directory: Path):
    path = directory / MANIFEST_NAME
    (row,) = json.loads(path.read_text())["cubins"]
    del row["instructions"]
    rewrite(directory, cubins=[row])
    assert read_manifest(directory).cubins == (replace(ENTRY, instructions={}),)


def test_a_corrupt_cubin_is_named_with_both_hashes(directory: Path):
    (directory / ENTRY.file).write_bytes(CUBIN + b"!")
    actual = hashlib.sha256(CUBIN + b"!").hexdigest()
    with pytest.raises(ManifestError, match=rf"corrupt: sha256 {actual}.*{ENTRY.sha256}.*{REMEDY}"):
        check_cubin(ENTRY, directory)


def test_a_missing_cubin_is_named(directory: Path):
    absent = replace(ENTRY, file="sm_90a/absent.cubin")
    with pytest.raises(ManifestError, match=rf"absent\.cubin of kernel {ENTRY.name} is missing"):
        check_cubin(absent, directory)
