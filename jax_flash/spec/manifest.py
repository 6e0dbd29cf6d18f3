"""The manifest: what each cubin is, how to launch it, and what built it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jax_flash.spec.kernel_args import ABI_VERSION

MANIFEST_NAME = "manifest.json"


class ManifestError(ValueError):
    """A manifest or a cubin that cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinEntry:
    """One cubin: identity, launch facts, resources and provenance."""

    name: str
    """``KernelVariant.name``."""
    file: str
    """Path relative to the manifest."""
    symbol: str
    sha256: str
    arguments: tuple[tuple[str | int, ...], ...]
    """Rows of ``kernel_args.KernelArgument.as_row``, in parameter order."""
    grid: tuple[tuple[str, int], ...]
    """``(value, divisor)`` factors of the grid."""
    threads: int
    cluster: tuple[int, int, int]
    programmatic_launch: bool
    resident_up_to: int
    """``LaunchPlan.resident_up_to``."""
    shared_memory_bytes: int
    registers: int
    spill_bytes: int
    tile: Mapping[str, int]
    toolchain: str
    """Versions of the compiler packages that built it."""
    source_hash: str
    """Hash of everything that decides the cubin's bytes."""
    instructions: Mapping[str, int] = field(default_factory=dict)
    """Machine instructions in the cubin by class (``aot.instruction_mix``), each counted once.
    Empty if the build that made the entry did not count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every cubin of a build."""

    abi_version: int
    cubins: tuple[CubinEntry, ...]

    def by_name(self) -> dict[str, CubinEntry]:
        """Returns the entries keyed by variant name."""
        return {entry.name: entry for entry in self.cubins}


def _tuples(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Writes ``manifest.json``, replacing it atomically."""
    path = directory / MANIFEST_NAME
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def read_manifest(directory: Path) -> Manifest:
    """Reads ``manifest.json``.

    Raises:
      ManifestError: the file is missing, not a manifest, or of another ABI version.
    """
    path = directory / MANIFEST_NAME
    remedy = "Reinstall jax_flash, or run `python -m jax_flash.aot build`."
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ManifestError(f"No kernel manifest at {path}. {remedy}") from None
    except ValueError as error:
        raise ManifestError(f"{path} is not valid JSON ({error}). {remedy}") from None
    version = content.get("abi_version") if isinstance(content, dict) else None
    if version != ABI_VERSION:
        raise ManifestError(
            f"{path} has kernel ABI version {version}, this jax_flash needs {ABI_VERSION}. {remedy}"
        )
    names = {own.name for own in fields(CubinEntry)}
    # What only informs has a default, so that the manifests of older builds can be read.
    required = {own.name for own in fields(CubinEntry) if own.default_factory is MISSING}
    entries = []
    for row in content.get("cubins", ()):
        if not required <= set(row) <= names:
            raise ManifestError(
                f"{path}: entry {row.get('name')} lacks {sorted(required - set(row))} or has "
                f"unknown {sorted(set(row) - names)}. {remedy}"
            )
        entries.append(CubinEntry(**{key: _tuples(value) for key, value in row.items()}))
    return Manifest(abi_version=version, cubins=tuple(entries))


def check_cubin(entry: CubinEntry, directory: Path) -> None:
    """Checks that an entry's file exists and has the bytes that were built.

    Raises:
      ManifestError: the file is missing or differs.
    """
    path = directory / entry.file
    remedy = "Reinstall jax_flash, or run `python -m jax_flash.aot build`."
    if not path.is_file():
        raise ManifestError(f"Cubin {path} of kernel {entry.name} is missing. {remedy}")
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != entry.sha256:
        raise ManifestError(
            f"Cubin {path} of kernel {entry.name} is corrupt: sha256 {actual}, the manifest says "
            f"{entry.sha256}. {remedy}"
        )
