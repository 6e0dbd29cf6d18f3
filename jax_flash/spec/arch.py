"""GPU architectures that kernels are built for, and the limits a kernel must fit in."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchLimits:
    """What one streaming multiprocessor offers to one thread block."""

    shared_memory_bytes: int
    """Largest dynamic shared memory of one block."""
    registers: int
    """32-bit registers of one multiprocessor."""
    max_cluster_size: int
    """Blocks of a cluster without opting in to a non-portable size."""


class Arch(Enum):
    """A compilation target; the value is the name that the compiler toolchain uses.

    The ``a`` targets are exact: their machine code runs on that compute capability alone.
    """

    SM90A = "sm_90a"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability of the devices that run this target."""
        return _COMPUTE_CAPABILITY[self]

    @property
    def limits(self) -> ArchLimits:
        """Hardware limits of the target."""
        return _LIMITS[self]


_COMPUTE_CAPABILITY = {Arch.SM90A: (9, 0)}

# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_LIMITS = {
    Arch.SM90A: ArchLimits(shared_memory_bytes=232_448, registers=65_536, max_cluster_size=8),
}


def arch_of_compute_capability(major: int, minor: int) -> Arch | None:
    """Returns the target whose code runs on compute capability ``major.minor``, if there is one."""
    for arch, capability in _COMPUTE_CAPABILITY.items():
        if capability == (major, minor):
            return arch
    return None
