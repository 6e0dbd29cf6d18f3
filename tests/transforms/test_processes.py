"""What crosses processes: compiled programs in the persistent cache, exported ones, collectives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import export

import jax_flash

from .conftest import CpuKernels
from .programs import attention, make_operands, with_gradients

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def start(kernels: CpuKernels, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts in_a_process.py."""
    script = Path(__file__).with_name("in_a_process.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMP")}
    return subprocess.Popen(
        [sys.executable, str(script), str(kernels.path), *arguments],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a process and reads its report."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("kind", ["explicit", "manual", "auto"])
def test_the_persistent_compilation_cache_hits(
    kind: str, cpu_handler: CpuKernels, tmp_path: Path
) -> None:
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if kind == "auto":
        # An address that is in the program by default, and different in every process.
        environment["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "1"
    first, second = (report_of(start(cpu_handler, kind, **environment)) for _ in range(2))
    assert first["misses"] > 0
    assert (second["hits"], second["misses"]) == (first["misses"] + first["hits"], 0)
    for report in (first, second):
        assert (report["different"], report["collectives"]) == (0, {})


@pytest.mark.usefixtures("cpu_kernels")
def test_a_program_is_exported_here_and_run_elsewhere(
    cpu_handler: CpuKernels, tmp_path: Path
) -> None:
    program = export.export(
        jax.jit(with_gradients(attention)),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_flash.export_checks(),
    )(*make_operands(2))
    path = tmp_path / "attention.exported"
    path.write_bytes(program.serialize())
    assert report_of(start(cpu_handler, "load", str(path))) == {"different": 0}


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_two_processes_of_one_mesh(kind: str, cpu_handler: CpuKernels) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [start(cpu_handler, kind, str(index), "2", address) for index in range(2)]
    for report in map(report_of, processes):
        # Five results, on two of four devices each.
        assert (report["devices"], report["shards"], report["different"]) == (4, 10, 0)
        assert report["collectives"] == {}
