"""Training is reproducible bit for bit with deterministic gradients, and is not without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
STEPS = int(os.environ.get("JAX_FLASH_TEST_STEPS", "40"))


def start(output: Path, *options: str) -> subprocess.Popen[str]:
    """Starts the example; all runs share the GPU, and so disturb each other's schedules."""
    arguments = ("--preset", "h200", "--device", "gpu", "--steps", str(STEPS), *options)
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--implementation", "cuda", "--output", output, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_hashes_of_the_parameters(tmp_path: Path) -> None:
    kinds = ["--deterministic"] * 3 + [None] * 2
    runs = [
        start(tmp_path / str(place), *([kind] if kind else [])) for place, kind in enumerate(kinds)
    ]
    texts = [run.communicate(timeout=300)[0] for run in runs]
    hashes = []
    for run, text in zip(runs, texts, strict=True):
        assert run.returncode == 0, text
        hashes += re.findall(r"^sha256 of the parameters: ([0-9a-f]{64})$", text, re.MULTILINE)
    assert len(hashes) == len(runs)
    assert len(set(hashes[:3])) == 1
    # Without the option, dQ is summed in the order in which blocks finish.
    assert len(set(hashes)) == 3
