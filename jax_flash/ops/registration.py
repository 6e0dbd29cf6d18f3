"""Makes the kernels known to XLA when the package is imported.

Nothing here touches a GPU, initialises a backend or reads a cubin. What is missing or wrong is
kept as text, because `implementation="xla"` works without any of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.ffi

from jax_flash.spec.kernel_args import ABI_VERSION
from jax_flash.spec.manifest import CubinEntry, Manifest, ManifestError, read_manifest

_EXTENSION = "jax_flash._ffi"
_REMEDY = "Install jax_flash with pip (from a wheel, or from its source tree with a C++ compiler)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The kernels that FFI calls may name, or why there are none.

    Attributes:
        directory: where the cubins and their manifest are.
        kernels: manifest entries by kernel name.
        platforms: those that handlers are registered for. Tests add "cpu".
        error: why no kernel can be called, with the remedy; empty when they can.
    """

    directory: Path
    kernels: Mapping[str, CubinEntry] = field(default_factory=dict)
    platforms: tuple[str, ...] = ("cuda",)
    error: str = ""


def register(directory: Path, load_extension: Callable[[], Any]) -> Registration:
    """Hands the manifest to the extension, and the extension's handlers to XLA.

    Args:
      directory: holds the manifest and the cubins.
      load_extension: returns the extension module; may raise ImportError.

    Returns:
      The outcome; this function does not raise for a broken installation.
    """
    try:
        extension = load_extension()
        _check_abi(extension)
        manifest = read_manifest(directory)
        _add_kernels(extension, manifest, directory)
    except (ImportError, ManifestError) as error:
        return Registration(directory=directory, error=str(error))
    for target, stages in extension.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")
    return Registration(directory=directory, kernels=manifest.by_name())


def load_extension() -> Any:
    """Imports the C++ extension.

    Raises:
      ImportError: it is not there or does not load; the text says what to do.
    """
    try:
        return importlib.import_module(_EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != _EXTENSION:
            raise
        raise ImportError(f"The extension module {_EXTENSION} is not built. {_REMEDY}") from None
    except ImportError as error:
        raise ImportError(
            f"The extension module {_EXTENSION} does not load ({error}). {_REMEDY}"
        ) from None


def _check_abi(extension: Any) -> None:
    if extension.ABI_VERSION != ABI_VERSION:
        raise ImportError(
            f"The extension module {_EXTENSION} has kernel ABI version {extension.ABI_VERSION}, "
            f"this jax_flash needs {ABI_VERSION}: it comes from another build. {_REMEDY}"
        )


def _add_kernels(extension: Any, manifest: Manifest, directory: Path) -> None:
    for entry in manifest.cubins:
        try:
            extension.add_kernel(
                entry.name,
                path=str(directory / entry.file),
                symbol=entry.symbol,
                sha256=entry.sha256,
                threads=entry.threads,
                cluster=entry.cluster,
                shared_memory_bytes=entry.shared_memory_bytes,
                programmatic_launch=entry.programmatic_launch,
                arguments=entry.arguments,
                grid=entry.grid,
                resident_up_to=entry.resident_up_to,
            )
        except (TypeError, ValueError) as error:
            raise ManifestError(
                f"The manifest in {directory} has an unusable row for kernel {entry.name} "
                f"({error}). Reinstall jax_flash, or run `python -m jax_flash.aot build`."
            ) from None


REGISTRATION = register(Path(__file__).parent.parent / "cubins", load_extension)
"""The outcome for this process."""
