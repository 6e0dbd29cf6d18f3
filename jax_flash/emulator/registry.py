"""Instructions by name, and what a builder of an instruction is given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import PtxType, is_type, ptx_type
from jax_flash.emulator.syntax import (
    Address,
    Immediate,
    Negated,
    Operand,
    Register,
    Sink,
    Statement,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from jax_flash.emulator.registers import RegisterTable

Run = Callable[[Any, Any], Any]
"""``run(warp, lanes)``: executes one instruction for the active lanes.

``lanes`` is True when all 32 are active, else a bool array. The result is None, or a ``Wait`` when
the warp has to wait before it may go on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """How an instruction is decoded."""

    name: str
    section: str
    """Title in the PTX ISA."""
    category: str
    """Class that statistics count the instruction in."""
    build: Callable[["Context"], Run]
    converges: bool = False
    """Needs all threads of the warp (or of its membership mask) to execute it together."""
    checks_registers: bool = True
    """False for instructions that check registers in flight by their own rules."""


BUILDERS: dict[str, Builder] = {}


def instruction(
    *names: str,
    section: str,
    category: str,
    converges: bool = False,
    checks_registers: bool = True,
) -> Callable[[Callable[["Context"], Run]], Callable[["Context"], Run]]:
    """Registers a builder under opcode names; the longest matching name decides."""

    def register(build: Callable[["Context"], Run]) -> Callable[["Context"], Run]:
        for name in names:
            if name in BUILDERS:
                raise AssertionError(f"two builders for {name}")
            BUILDERS[name] = Builder(
                name=name,
                section=section,
                category=category,
                build=build,
                converges=converges,
                checks_registers=checks_registers,
            )
        return build

    return register


def find_builder(opcode: str) -> Builder | None:
    """Returns the builder of an opcode: the longest registered prefix of its dotted words."""
    words = opcode.split(".")
    for count in range(len(words), 0, -1):
        builder = BUILDERS.get(".".join(words[:count]))
        if builder is not None:
            return builder
    return None


@dataclass(slots=True)
class Context:
    """One statement while it is decoded: its modifiers are taken one by one, all must be known."""

    statement: Statement
    table: "RegisterTable"
    modifiers: list[str]
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    labels: dict[str, int] = field(default_factory=dict)
    member_mask: int = -1
    """Row of the membership mask of a ``.sync`` instruction; -1 for the whole warp."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Operands of the statement."""
        return self.statement.operands

    def expect(self, *counts: int) -> None:
        """Refuses a number of operands that the instruction does not have."""
        if len(self.operands) not in counts:
            raise PtxError(f"{len(self.operands)} operands; expected {counts}")

    def take(self, *choices: str, default: str | None = None) -> str:
        """Removes and returns the first modifier that is one of the choices.

        Raises:
          PtxError: there is none, and no default.
        """
        for word in self.modifiers:
            if word in choices:
                self.modifiers.remove(word)
                return word
        if default is None:
            raise PtxError(f"needs one of .{', .'.join(choices)}")
        return default

    def flag(self, word: str) -> bool:
        """Removes a modifier; returns whether it was there."""
        if word in self.modifiers:
            self.modifiers.remove(word)
            return True
        return False

    def take_type(self) -> PtxType:
        """Removes and returns the first type among the modifiers."""
        for word in self.modifiers:
            if is_type(word):
                self.modifiers.remove(word)
                return ptx_type(word)
        raise PtxError("has no type")

    def done(self) -> None:
        """Refuses what no builder has taken."""
        if self.modifiers:
            raise PtxError(f"modifier .{'.'.join(self.modifiers)} is not implemented")

    def source(self, operand: Operand, kind: PtxType) -> int:
        """Returns the row of a source operand in the register file of its type."""
        if isinstance(operand, Register):
            row = self.table.row(operand, kind.file)
            if row >= 0 and self.table.is_variable(operand):
                self.reads.add(self.table.identity(kind.file, row))
            return row
        if isinstance(operand, Immediate):
            return self.table.constant(operand, kind)
        if isinstance(operand, Symbol):
            return self.table.symbol(operand, kind)
        raise PtxError(f"operand {operand} is no value of type .{kind.name}")

    def predicate(self, operand: Operand) -> tuple[int, bool]:
        """Returns ``(row, negated)`` of a predicate source."""
        negated = isinstance(operand, Negated)
        register = operand.operand if isinstance(operand, Negated) else operand
        return self.source(register, ptx_type("pred")), negated

    def destination(self, operand: Operand, kind: PtxType) -> int:
        """Returns the row of a destination; the sink ``_`` has a row of its own."""
        if isinstance(operand, Sink):
            return self.table.sink(kind.file)
        if not isinstance(operand, Register) or not self.table.is_variable(operand):
            raise PtxError(f"operand {operand} is no destination")
        row = self.table.row(operand, kind.file)
        self.writes.add(self.table.identity(kind.file, row))
        return row

    def file_of(self, operand: Operand, kind: PtxType) -> str:
        """Returns the file of a register, which may be wider than the type (ld, st, cvt)."""
        if isinstance(operand, Register):
            return self.table.file(operand)
        return kind.file

    def address(self, operand: Operand, file: str | None = None) -> tuple[int, int, str]:
        """Returns ``(row, offset, view)`` of an address operand.

        The view is ``u32`` or ``u64``, after the register that holds the address.
        """
        if not isinstance(operand, Address):
            raise PtxError(f"operand {operand} is no address")
        base = operand.base
        if file is None:
            file = self.table.file(base) if isinstance(base, Register) else "64"
        kind = ptx_type("u32" if file == "32" else "u64")
        return self.source(base, kind), operand.offset, kind.view

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """Returns the items of a vector, or the operand alone."""
        return operand.items if isinstance(operand, Vector) else (operand,)
