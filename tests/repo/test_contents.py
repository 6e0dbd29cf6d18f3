"""What must not be in a tracked file."""

from __future__ import annotations

import re

from .sources import ROOT, files_with_suffix, tracked_files

# Put together here, so that this file does not hold what it looks for.
MACHINE_FOLDERS = ("work", "root", "opt", "home", "tmp")
MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{'|'.join(MACHINE_FOLDERS)})/[\w.]")
EXEMPTIONS = (
    "# type: " + "ignore",
    "# no" + "qa",
    "pyright: " + "ignore",
    "TO" + "DO",
    "FIX" + "ME",
)
SKIPS = ("pytest." + "skip", "mark." + "skip", "mark." + "xfail", "pytest." + "xfail")


def text_of(path) -> str:
    return (ROOT / path).read_bytes().decode(errors="replace")


def test_the_pattern_finds_machine_paths():
    for folder in MACHINE_FOLDERS:
        assert MACHINE_PATH.search(f'path = "/{folder}/main"')
    assert not MACHINE_PATH.search("tests/tmp/main and https://example.org/work")


def test_no_machine_paths():
    found = [
        f"{path}: {match.group()}"
        for path in tracked_files()
        if path.suffix != ".png"
        for match in MACHINE_PATH.finditer(text_of(path))
    ]
    assert not found, "\n".join(found)


def test_no_exemptions_from_checks():
    found = [
        f"{path}:{number}: {word}"
        for path in files_with_suffix(".py", ".pyi", ".cc", ".h")
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        for word in (*EXEMPTIONS, *SKIPS)
        if word in line
    ]
    assert not found, "\n".join(found)


def test_no_large_or_generated_files():
    for path in tracked_files():
        assert (ROOT / path).stat().st_size < 1_000_000, path
        assert path.suffix not in (".so", ".cubin", ".ptx", ".whl", ".pyc"), path
