"""Reads what a cubin needs of the hardware, with ``cuobjdump`` from PyPI."""

import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from jax_flash.aot.instruction_mix import instruction_mix

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
    matmuls_serialised: bool
    """Whether the compiler waits after every warpgroup matmul instead of where the kernel says.

    It does so, with no more than a warning, when a kernel needs too many registers or touches an
    accumulator in flight; the kernel is right but up to twice as slow.
    """
    instructions: dict[str, int]
    """Machine instructions by class: ``instruction_mix``."""


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


def _report(option: str, path: Path) -> str:
    return subprocess.run(
        [_cuobjdump(), option, path], check=True, capture_output=True, text=True
    ).stdout


def inspect_cubin(path: Path) -> CubinResources:
    """Returns the resources of the kernel in ``path``.

    Raises:
      ValueError: the cubin does not hold exactly one kernel.
      FileNotFoundError: ``cuobjdump`` is not installed.
    """
    report = _report("--dump-resource-usage", path)
    kernels = list(_FUNCTION.finditer(report))
    if len(kernels) != 1:
        raise ValueError(f"{path} holds {len(kernels)} kernels, expected 1:\n{report}")
    kernel = kernels[0]
    code = _report("--dump-sass", path)
    matmuls, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    return CubinResources(
        symbol=kernel["symbol"],
        registers=int(kernel["registers"]),
        spill_bytes=int(kernel["stack"]) + int(kernel["local"]),
        matmuls_serialised=matmuls > 0 and waits >= matmuls,
        instructions=instruction_mix(code),
    )
