"""The files of the repository, for the tests that read them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Returns every file that git tracks, relative to ROOT."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout
    return tuple(Path(name) for name in listed.split("\0") if (ROOT / name).is_file())


def files_with_suffix(*suffixes: str) -> tuple[Path, ...]:
    """Returns the tracked files with one of these suffixes."""
    found = tuple(path for path in tracked_files() if path.suffix in suffixes)
    assert found, f"no tracked file ends with any of {suffixes}"
    return found
