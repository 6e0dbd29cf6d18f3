"""Parses operand lists, and resolves names in the nested scopes of inline assembly."""

import re
from dataclasses import dataclass, field

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.syntax import (
    Address,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)

_INTEGER = re.compile(r"^[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"^0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL = re.compile(r"^[-+]?\d+\.\d*(?:[eE][-+]?\d+)?$")
_NAME = re.compile(r"^[A-Za-z_$%][\w$.]*$")


@dataclass(slots=True)
class Scope:
    """Names declared in one block; inner blocks may hide outer names."""

    parent: "Scope | None"
    suffix: str
    """Appended to a name declared here, to make it unique in the entry."""
    registers: set[str] = field(default_factory=set)
    ranges: dict[str, int] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)

    def declare_registers(self, names: str) -> list[str]:
        """Declares a comma-separated list, with ``%r<n>`` ranges; returns the unique names."""
        unique = []
        for name in (part.strip() for part in names.split(",")):
            match = re.match(r"^([\w$%]+)<(\d+)>$", name)
            if match:
                self.ranges[match.group(1)] = int(match.group(2))
                unique += [f"{match.group(1)}{i}{self.suffix}" for i in range(int(match.group(2)))]
            else:
                self.registers.add(name)
                unique.append(name + self.suffix)
        return unique

    def declare_label(self, name: str) -> str:
        """Declares a label; returns its unique name."""
        if name in self.labels:
            raise PtxError(f"label {name} appears twice in one block")
        self.labels.add(name)
        return name + self.suffix

    def _holds(self, name: str) -> bool:
        if name in self.registers or name in self.labels:
            return True
        match = re.match(r"^(.*?)(\d+)$", name)
        return match is not None and int(match.group(2)) < self.ranges.get(match.group(1), 0)

    def unique(self, name: str) -> str:
        """Returns the unique name of a register or label; other names stay as they are."""
        scope: Scope | None = self
        while scope is not None:
            if scope._holds(name):
                return name + scope.suffix
            scope = scope.parent
        return name

    def is_register(self, name: str) -> bool:
        """Whether a name is a declared or special register."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return False
            if scope._holds(name):
                return True
            scope = scope.parent
        return name.startswith("%")


def split_top_level(text: str, separator: str) -> list[str]:
    """Splits at a separator outside brackets and braces."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def parse_operands(text: str, scope: Scope) -> tuple[Operand, ...]:
    """Parses a comma-separated operand list."""
    return tuple(_operand(part, scope) for part in split_top_level(text, ","))


def _operand(text: str, scope: Scope) -> Operand:
    if text.startswith("{"):
        return _vector(text, scope)
    if text.startswith("["):
        return _address(text, scope)
    if "|" in text:
        first, _, second = text.partition("|")
        return Pair(first=_operand(first.strip(), scope), second=_operand(second.strip(), scope))
    if text == "_":
        return Sink()
    if text.startswith("!"):
        return Negated(operand=Register(name=scope.unique(text[1:].strip())))
    constant = _constant(text)
    if constant is not None:
        return constant
    match = re.match(r"^(.*?)\s*([+-])\s*(\w+)$", text)
    if match and _NAME.match(match.group(1)):
        offset = int(match.group(3), 0) * (1 if match.group(2) == "+" else -1)
        return Symbol(name=match.group(1), offset=offset)
    if not _NAME.match(text):
        raise PtxError(f"unknown operand {text!r}")
    if scope.is_register(text):
        return Register(name=scope.unique(text))
    return Symbol(name=scope.unique(text))


def _constant(text: str) -> Immediate | None:
    if _INTEGER.match(text):
        return Immediate(value=int(text.rstrip("U"), 0))
    match = _FLOAT_BITS.match(text)
    if match:
        bits = 32 if match.group(1) in "fF" else 64
        return Immediate(value=int(match.group(2), 16), float_bits=bits)
    if _DECIMAL.match(text):
        raise PtxError(f"decimal constant {text}: compilers emit 0f and 0d constants")
    return None


def _vector(text: str, scope: Scope) -> Vector:
    if not text.endswith("}"):
        raise PtxError(f"unknown operand {text!r}")
    return Vector(items=parse_operands(text[1:-1], scope))


def _address(text: str, scope: Scope) -> Address:
    if not text.endswith("]"):
        raise PtxError(f"unknown address {text!r}")
    parts = split_top_level(text[1:-1], ",")
    base_text, offset = parts[0], 0
    match = re.match(r"^(.+?)\s*([+-])\s*(-?\w+)$", base_text)
    if match:
        base_text = match.group(1)
        offset = int(match.group(3), 0) * (1 if match.group(2) == "+" else -1)
    base = _operand(base_text, scope)
    vectors = [_vector(part, scope) for part in parts[1:]]
    if len(vectors) > 2:
        raise PtxError(f"unknown address {text!r}")
    return Address(
        base=base,
        offset=offset,
        coordinates=vectors[0] if vectors else None,
        extra=vectors[1] if len(vectors) > 1 else None,
    )
