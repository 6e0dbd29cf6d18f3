"""Kernels that run on the CPU: the library's FFI calls, with a handler that computes in C++ loops.

The handler is ffi/tests/cpu_attention.cc. A program then holds what it would hold on GPUs, down to
the collectives around each call, and gives values on eight simulated devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_flash.ops import registration
from jax_flash.ops.registration import Registration
from tests.ffi.conftest import Build, build
from tests.ops.conftest import all_kernels, on_the_cpu

__all__ = ["all_kernels", "build", "on_the_cpu"]

TARGETS = ("jax_flash_forward_v1", "jax_flash_backward_v1", "jax_flash_backward_bias_v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """The handler.

    Attributes:
        path: of its library.
        library: the library.
    """

    path: Path
    library: ctypes.CDLL

    def calls(self) -> tuple[int, int]:
        """How many forward and backward calls this process has run."""
        count = self.library.JaxFlashCpuAttentionCalls
        count.restype = ctypes.c_int64
        return count(0), count(1)

    def calls_of(self, function: Callable[..., Any], *operands: Any) -> tuple[int, int]:
        """How many forward and backward calls one run of `function` makes."""
        before = self.calls()
        jax.block_until_ready(function(*operands))
        after = self.calls()
        return after[0] - before[0], after[1] - before[1]


@pytest.fixture(scope="session")
def cpu_handler(build: Build) -> CpuKernels:
    """The handler, registered with XLA for the rest of this process."""
    folder = build(("cpuattention",), "-DCMAKE_BUILD_TYPE=Release")
    path = folder / "ffi" / "tests" / "libcpuattention.so"
    library = ctypes.CDLL(str(path))
    for target in TARGETS:
        capsule = jax.ffi.pycapsule(library.JaxFlashCpuAttention)
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return CpuKernels(path=path, library=library)


@pytest.fixture
def cpu_kernels(
    cpu_handler: CpuKernels, all_kernels: Registration, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CpuKernels]:
    """Makes the library call kernels on CPUs, too."""
    everywhere = replace(all_kernels, platforms=("cuda", "cpu"))
    monkeypatch.setattr(registration, "REGISTRATION", everywhere)
    yield cpu_handler
