"""Parses PTX text (ISA versions 8.x and 9.x) as NVIDIA's compilers emit it.

Covers what kernels consist of: entries with parameters, register declarations in nested scopes
(inline assembly), labels, guarded instructions, shared and initialised global variables, debug
directives (ignored). Device functions and calls are refused: compiled kernels are one entry.
"""

import re
from dataclasses import dataclass, field

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.operand_text import Scope, parse_operands
from jax_flash.emulator.syntax import (
    Entry,
    Module,
    Parameter,
    Register,
    Statement,
    Variable,
)

_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_IGNORED = (".pragma", ".loc", ".file", ".section", ".minnctapersm", ".maxnreg", ".explicitcluster")
_VARIABLE = re.compile(
    r"^(?:\.visible\s+|\.weak\s+)?(\.extern\s+)?\.(shared|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)\s*(\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"^\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*(?:\.ptr\s*(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?"
    r"([\w$%]+)\s*(?:\[\s*(\d+)\s*\])?$"
)
_REGISTERS = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"^@(!?)\s*([\w$%]+)\s+(.*)$", re.DOTALL)


def type_bytes(type_name: str) -> int:
    """Returns the size in bytes of a fundamental type such as ``u32`` or ``b64``."""
    digits = re.sub(r"^[a-z]+", "", type_name)
    if digits not in _TYPE_BYTES:
        raise PtxError(f"unknown type .{type_name}")
    return _TYPE_BYTES[digits]


def without_comments(text: str) -> str:
    """Returns the text with comments blanked, so that line numbers stay as they are."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


@dataclass(slots=True)
class _Body:
    """An entry while it is parsed; operands are resolved at the end, when labels are known."""

    pending: list[tuple[str, Scope, int]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    scopes: int = 0


class _Reader:
    """Walks the text, one statement or brace at a time."""

    def __init__(self, text: str) -> None:
        self.text = without_comments(text)
        self.position = 0

    def line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def skip_blank(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def until(self, stops: str) -> tuple[str, str]:
        """Returns the text up to a stop character outside brackets, and that character."""
        depth, start = 0, self.position
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in stops and depth == 0:
                self.position += 1
                return self.text[start : self.position - 1], character
            if character in "{[(":
                depth += 1
            elif character in "}])":
                depth -= 1
            self.position += 1
        raise PtxError(f"line {self.line(start)}: no {stops!r} before the end of the text")


def parse_ptx(text: str) -> Module:
    """Parses a PTX file.

    Raises:
      PtxError: text that is not understood, with its line.
    """
    reader = _Reader(text)
    header = {}
    for name in ("version", "target", "address_size"):
        match = re.search(rf"^\s*\.{name}\s+([^\n]+)", reader.text, re.MULTILINE)
        if match is None:
            raise PtxError(f"no .{name} directive: this is not PTX")
        header[name] = match.group(1).strip()
        reader.position = max(reader.position, match.end())
    if header["address_size"] != "64":
        raise PtxError(f".address_size {header['address_size']}; the emulator needs 64")
    variables: list[Variable] = []
    entries: dict[str, Entry] = {}
    reader.skip_blank()
    while reader.position < len(reader.text):
        start = reader.position
        match = re.match(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)", reader.text[start:])
        if match:
            reader.position += match.end()
            entry, inner = _parse_entry(reader, match.group(1))
            entries[entry.name] = entry
            variables += inner
        else:
            statement, _ = reader.until(";\n" if reader.text[start:].startswith(".file") else ";")
            _module_statement(statement.strip(), reader.line(start), variables)
        reader.skip_blank()
    major, minor = header["version"].split(".")
    return Module(
        version=(int(major), int(minor)),
        target=header["target"].split(",")[0],
        variables=tuple(variables),
        entries=entries,
    )


def _module_statement(statement: str, line: int, variables: list[Variable]) -> None:
    if not statement or statement.startswith(_IGNORED):
        return
    variable = _parse_variable(statement)
    if variable is None:
        raise PtxError(f"line {line}: unknown statement outside an entry: {statement[:80]!r}")
    variables.append(variable)


def _parse_variable(statement: str) -> Variable | None:
    match = _VARIABLE.match(statement)
    if match is None:
        return None
    _, space, alignment, type_name, name, array, count, values = match.groups()
    element = type_bytes(type_name)
    size = element * (int(count or 0) if array else 1)
    data = b""
    if values:
        numbers = [int(item, 0) for item in values.strip(" \n{}").split(",")]
        data = b"".join((n % (1 << 8 * element)).to_bytes(element, "little") for n in numbers)
        size = max(size, len(data))
    return Variable(
        name=name, space=space, size=size, alignment=int(alignment or element), data=data
    )


def _parse_parameters(text: str) -> tuple[Parameter, ...]:
    parameters, offset = [], 0
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        match = _PARAMETER.match(item)
        if match is None:
            raise PtxError(f"unknown parameter declaration {item!r}")
        alignment, type_name, name, count = match.groups()
        element = type_bytes(type_name)
        step = max(element, int(alignment or 1))
        offset = -(-offset // step) * step
        size = element * int(count or 1)
        parameters.append(Parameter(name=name, offset=offset, size=size))
        offset += size
    return tuple(parameters)


def _parse_entry(reader: _Reader, name: str) -> tuple[Entry, list[Variable]]:
    before, _ = reader.until("{(")
    if before.strip():
        raise PtxError(f"entry {name}: unexpected {before.strip()!r}")
    parameters: tuple[Parameter, ...] = ()
    directives = ""
    if reader.text[reader.position - 1] == "(":
        listed, _ = reader.until(")")
        parameters = _parse_parameters(listed)
        directives, _ = reader.until("{")
    body = _Body()
    _parse_block(reader, body, Scope(parent=None, suffix=""))
    statements = tuple(_resolve(*item) for item in body.pending)
    entry = Entry(
        name=name,
        parameters=parameters,
        statements=statements,
        labels=body.labels,
        registers=body.registers,
        threads=_dimensions(directives, "reqntid"),
        cluster=_dimensions(directives, "reqnctapercluster"),
    )
    return entry, body.variables


def _dimensions(directives: str, name: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{name}\s+([\d,\s]+)", directives)
    if match is None:
        return None
    numbers = [int(part) for part in match.group(1).replace(" ", "").strip().split(",") if part]
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _parse_block(reader: _Reader, body: _Body, scope: Scope) -> None:
    """Parses up to the closing brace of a block whose opening brace has been read."""
    while True:
        reader.skip_blank()
        if reader.position >= len(reader.text):
            raise PtxError("the text ends inside a block")
        character = reader.text[reader.position]
        if character == "}":
            reader.position += 1
            return
        if character == "{":
            reader.position += 1
            body.scopes += 1
            _parse_block(reader, body, Scope(parent=scope, suffix=f"#{body.scopes}"))
            continue
        label = _LABEL.match(reader.text, reader.position)
        if label:
            reader.position = label.end()
            body.labels[scope.declare_label(label.group(1))] = len(body.pending)
            continue
        start = reader.position
        if reader.text.startswith((".loc", ".file"), start):
            reader.position = reader.text.index("\n", start)
            continue
        statement, _ = reader.until(";")
        _block_statement(statement.strip(), reader.line(start), body, scope)


def _block_statement(statement: str, line: int, body: _Body, scope: Scope) -> None:
    if not statement or statement.startswith(_IGNORED):
        return
    declared = _REGISTERS.match(statement)
    if declared:
        type_name, names = declared.groups()
        for unique in scope.declare_registers(names):
            body.registers[unique] = type_name
    elif statement.startswith("."):
        variable = _parse_variable(statement)
        if variable is None:
            raise PtxError(f"line {line}: unknown directive {statement[:80]!r}")
        body.variables.append(variable)
    else:
        body.pending.append((statement, scope, line))


def _resolve(statement: str, scope: Scope, line: int) -> Statement:
    text = " ".join(statement.split())
    guard, negated = None, False
    match = _GUARD.match(text)
    rest = text
    if match:
        negated = bool(match.group(1))
        guard = Register(name=scope.unique(match.group(2)))
        rest = match.group(3)
    opcode, _, operands = rest.partition(" ")
    try:
        parsed = parse_operands(operands.strip(), scope)
    except PtxError as error:
        raise PtxError(f"line {line}: {text}: {error}") from None
    return Statement(
        opcode=opcode, operands=parsed, line=line, text=text, guard=guard, guard_negated=negated
    )
