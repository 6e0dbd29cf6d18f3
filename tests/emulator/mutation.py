"""Mutants of a kernel's PTX: each lacks, or weakens, one piece of synchronisation."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DROPPED = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(?:bar\.|barrier\.|fence\.|wgmma\.fence|wgmma\.wait_group|"
    r"wgmma\.commit_group|cp\.async\.bulk\.commit_group|cp\.async\.bulk\.wait_group|"
    r"mbarrier\.arrive\.shared|mbarrier\.arrive\.release|setmaxnreg\.dec|red\.release)[^;]*;"
)
_TRY_WAIT = re.compile(r"mbarrier\.try_wait\.parity\.shared\.b64\s+(\w+),[^;]*;")
_EXPECT = re.compile(r"(mbarrier\.arrive\.expect_tx\.shared\.b64[^;]*\],\s*)(%r\d+|\d+);")
_INIT = re.compile(r"(mbarrier\.init\.shared\.b64[^;]*\],\s*)(%r\d+|\d+);")
_WAIT_GROUP = re.compile(r"((?:wgmma\.wait_group\.sync\.aligned|wait_group\.read)\s+)(\d+);")
_POLL = re.compile(r"ld\.acquire\.gpu\.global\.b32\s+(%r\d+),[^;]*;")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed text."""

    line: int
    """Line of the PTX, from 1."""
    change: str
    """What was done, with the statement."""
    text: str


def mutants_of(ptx: str) -> Iterator[Mutant]:
    """Yields every mutant: each statement that synchronises is dropped or weakened, alone."""
    lines = ptx.split("\n")
    for index, line in enumerate(lines):
        for change, new in _changes(lines, index, line):
            text = "\n".join([*lines[:index], new, *lines[index + 1 :]])
            yield Mutant(line=index + 1, change=f"{change}: {line.strip()}", text=text)


def _changes(lines: list[str], index: int, line: str) -> Iterator[tuple[str, str]]:
    if _DROPPED.match(line):
        yield "drop", _DROPPED.sub("", line)
    match = _TRY_WAIT.search(line)
    if match:
        yield "do not wait", _TRY_WAIT.sub(f"setp.eq.b32 {match.group(1)}, 0, 0;", line)
    match = _WAIT_GROUP.search(line)
    if match:
        yield (
            "wait for one group less",
            _WAIT_GROUP.sub(lambda m: f"{m.group(1)}{int(m.group(2)) + 1};", line),
        )
    for pattern, change, step in (
        (_EXPECT, "expect 64 bytes less", -64),
        (_EXPECT, "expect 64 bytes more", 64),
        (_INIT, "count one arrival more", 1),
        (_INIT, "count one arrival less", -1),
    ):
        match = pattern.search(line)
        if match:
            value = _value_of(lines, index, match.group(2)) + step
            if value > 0:
                yield change, pattern.sub(rf"\g<1>{value};", line)
    match = _POLL.search(line)
    if match:
        yield "do not wait", _POLL.sub(f"mov.b32 {match.group(1)}, 1000000;", line)


def _value_of(lines: list[str], index: int, operand: str) -> int:
    """Returns the constant that a register was last set to above a line."""
    if not operand.startswith("%"):
        return int(operand)
    pattern = re.compile(rf"mov\.b32\s+{re.escape(operand)},\s*(-?\d+);")
    for line in reversed(lines[:index]):
        match = pattern.search(line)
        if match:
            return int(match.group(1))
    raise AssertionError(f"{operand} is not set to a constant above line {index + 1}")
