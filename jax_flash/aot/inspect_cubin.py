"""Reads what a cubin needs of the hardware, with ``cuobjdump`` from PyPI."""

import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_DISTRIBUTION = "nvidia-cuda-cuobjdump"
_FUNCTION = re.compile(
    r"Function (?P<symbol>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:\d+ LOCAL:(?P<local>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinResources:
    """Resources of the one kernel in a cubin."""

    symbol: str
    registers: int
    """Registers a thread at entry; ``setmaxnreg`` moves them between warpgroups afterwards."""
    spill_bytes: int
    """Stack and local memory of a thread; 0 when every value stays in registers."""


def _cuobjdump() -> Path:
    try:
        installed = files(_DISTRIBUTION) or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == "cuobjdump":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"cuobjdump was not found: the build needs the package {_DISTRIBUTION} "
        f"(pip install {_DISTRIBUTION})"
    )


def inspect_cubin(path: Path) -> CubinResources:
    """Returns the resources of the kernel in ``path``.

    Raises:
      ValueError: the cubin does not hold exactly one kernel.
      FileNotFoundError: ``cuobjdump`` is not installed.
    """
    report = subprocess.run(
        [_cuobjdump(), "--dump-resource-usage", path], check=True, capture_output=True, text=True
    ).stdout
    kernels = list(_FUNCTION.finditer(report))
    if len(kernels) != 1:
        raise ValueError(f"{path} holds {len(kernels)} kernels, expected 1:\n{report}")
    kernel = kernels[0]
    return CubinResources(
        symbol=kernel["symbol"],
        registers=int(kernel["registers"]),
        spill_bytes=int(kernel["stack"]) + int(kernel["local"]),
    )
