"""The example runs, learns, and is reproducible."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
STEPS = 40


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs the example on the CPU; jax_flash need not be installed."""
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def train(output: Path, *options: str) -> str:
    """Returns what the example prints."""
    outcome = run("--output", str(output), *options)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@pytest.mark.slow
def test_two_deterministic_runs_learn_the_same(tmp_path: Path):
    options = ("--device", "cpu", "--steps", str(STEPS), "--deterministic")
    texts = [train(tmp_path / name, *options) for name in ("first", "second")]
    hashes = [re.findall(r"sha256 of the parameters: ([0-9a-f]{64})$", t, re.M) for t in texts]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 1

    text = texts[0]
    assert "xla (plain JAX)" in text
    entropy = float(re.findall(r"unigram entropy: ([0-9.]+)", text)[0])
    with (tmp_path / "first" / "loss.csv").open() as file:
        losses = [float(row["loss_nats_per_byte"]) for row in csv.DictReader(file)]
    assert len(losses) == STEPS
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < entropy
    assert (tmp_path / "first" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "--- sample ---\nclass " in text


def test_bad_steps_are_refused():
    outcome = run("--steps", "0")
    assert outcome.returncode == 2
    assert "--steps is 0; it must be at least 1" in outcome.stderr


def test_a_gpu_that_is_not_there_is_refused():
    outcome = run("--device", "gpu")
    assert outcome.returncode == 1
    assert "--device gpu: JAX sees no GPU here" in outcome.stderr
    assert "--device cpu" in outcome.stderr
