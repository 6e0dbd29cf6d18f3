"""What the timings were taken on: hardware, driver, clocks and versions."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib import metadata

import jax

import jax_flash

_FIELDS = (
    "name",
    "driver_version",
    "vbios_version",
    "memory.total",
    "power.limit",
    "clocks.max.sm",
    "clocks.max.memory",
    "clocks.sm",
    "temperature.gpu",
    "ecc.mode.current",
)
_PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flash-attn3-jax",
    "fa4-jax",
    "nvidia-cutlass-dsl",
)
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def query_gpu(*fields: str) -> dict[str, str]:
    """Returns facts of the first GPU by nvidia-smi's names for them; none if it has no answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    outcome = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if outcome.returncode != 0:
        return {}
    values = outcome.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))


def describe_environment() -> dict[str, str]:
    """Returns everything that a reader of the results may ask for, in words."""
    device = jax.devices()[0]
    installed = {
        package: version
        for package in (*_PACKAGES, *_CUDNN)
        if (version := _version(package)) is not None
    }
    return {
        "device": device.device_kind,
        "platform_version": " ".join(str(device.client.platform_version).split()),
        "python": platform.python_version(),
        "jax_flash": jax_flash.__version__,
        **installed,
        **{f"nvidia-smi {name}": value for name, value in query_gpu(*_FIELDS).items()},
    }


def slug(text: str) -> str:
    """Returns the text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
