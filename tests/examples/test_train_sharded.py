"""The sharded example has the loss of a single device, in every mode."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_flash import context_parallel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_sharded.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs the example on simulated devices; jax_flash need not be installed."""
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", context_parallel.MODES)
def test_losses_are_a_single_devices(mode: str) -> None:
    outcome = run("--simulate", "8", "--mode", mode, "--steps", "8", "--compare")
    assert outcome.returncode == 0, outcome.stderr
    assert "mesh: {'data': 2, 'tensor': 2, 'context': 2} of cpu" in outcome.stdout
    first, last = map(
        float, re.findall(r"first loss ([0-9.]+), last loss ([0-9.]+)", outcome.stdout)[0]
    )
    assert first > 5
    assert last < first - 1
    (difference,) = re.findall(r"to one device's loss: ([0-9.e+-]+) nats", outcome.stdout)
    assert float(difference) < 2e-4
    assert "8 devices: 100%" in outcome.stderr
    assert "1 devices: 100%" in outcome.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--simulate", "2", "--mesh", "2,2,1"), "--mesh needs 4 devices, and JAX has 2"),
        (("--simulate", "3", "--mesh", "1,3,1"), "axis 'tensor' has size 3, which must divide 2"),
        (("--simulate", "3"), "3 devices cannot be split .* name the mesh"),
        (("--mesh", "2,2"), "--mesh is 2,2; it must be three sizes"),
        (("--steps", "0"), "--steps is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], message: str) -> None:
    outcome = run(*options)
    assert outcome.returncode != 0
    assert re.search(message, outcome.stderr)
