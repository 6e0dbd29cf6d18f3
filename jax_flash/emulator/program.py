"""Decodes an entry into instructions that run on a warp."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_flash.emulator import instructions
from jax_flash.emulator.address_space import SHARED_BASE
from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import ptx_type
from jax_flash.emulator.registers import RegisterTable
from jax_flash.emulator.registry import Builder, Context, Run, find_builder
from jax_flash.emulator.syntax import Entry, Module, Statement, Symbol

NORMAL, BRANCH, EXIT = range(3)


@dataclass(slots=True, eq=False)
class Instruction:
    """A decoded instruction; fields are read in the hot loop."""

    run: Run
    kind: int
    guard: int
    """Row of the guard predicate, or -1."""
    guard_negated: bool
    target: int
    reads: frozenset[int]
    writes: frozenset[int]
    accesses: frozenset[int]
    converges: bool
    member_mask: int
    """Row of the membership mask of a ``.sync`` instruction, or -1 for the whole warp."""
    checks_registers: bool
    category: str
    opcode: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A decoded kernel."""

    entry: Entry
    target: str
    table: RegisterTable
    code: tuple[Instruction, ...]
    static_shared_bytes: int
    """Shared memory of fixed size; dynamic shared memory follows."""
    dynamic_shared_offset: int
    constants: dict[str, bytes]
    """Initial bytes of module-level global and constant variables."""
    uses_wgmma: bool


def decode(module: Module, name: str, *, allocate: Callable[[str, bytes], int]) -> Program:
    """Decodes one entry of a module.

    Args:
      module: parsed text.
      name: the entry.
      allocate: called with the name and initial bytes of each global variable; returns its address.

    Raises:
      PtxError: an instruction or modifier that is not implemented, with its line and the title of
        the PTX ISA section to read.
    """
    if name not in module.entries:
        raise PtxError(f"no entry {name}; there are {', '.join(module.entries)}")
    entry = module.entries[name]
    shared, static_bytes, dynamic = _lay_out_shared(module)
    addresses, constants = {}, {}
    for variable in module.variables:
        if variable.space != "shared":
            data = variable.data.ljust(variable.size, b"\0")
            constants[variable.name] = data
            addresses[variable.name] = allocate(variable.name, data)
    table = RegisterTable(entry=entry, shared_symbols=shared, global_symbols=addresses)
    code = [_decode_statement(statement, entry, table) for statement in entry.statements]
    last = entry.statements[-1].line if entry.statements else 0
    end = Statement(opcode="ret", operands=(), line=last, text="(end of the kernel)")
    code.append(_decode_statement(end, entry, table))
    return Program(
        entry=entry,
        target=module.target,
        table=table,
        code=tuple(code),
        static_shared_bytes=static_bytes,
        dynamic_shared_offset=dynamic,
        constants=constants,
        uses_wgmma=any(item.opcode.startswith("wgmma.mma_async") for item in code),
    )


def _lay_out_shared(module: Module) -> tuple[dict[str, int], int, int]:
    """Returns offsets of shared variables, the end of the static ones, and the dynamic offset."""
    offsets: dict[str, int] = {}
    position, dynamic_alignment = SHARED_BASE, 16
    for variable in module.variables:
        if variable.space == "shared" and variable.size:
            position = -(-position // variable.alignment) * variable.alignment
            offsets[variable.name] = position
            position += variable.size
        elif variable.space == "shared":
            dynamic_alignment = max(dynamic_alignment, variable.alignment)
    dynamic = -(-position // dynamic_alignment) * dynamic_alignment
    for variable in module.variables:
        if variable.space == "shared" and not variable.size:
            offsets[variable.name] = dynamic
    return offsets, position - SHARED_BASE, dynamic


def _no_operation(warp: Any, lanes: Any) -> None:
    del warp, lanes


def _decode_statement(statement: Statement, entry: Entry, table: RegisterTable) -> Instruction:
    words = statement.opcode.split(".")
    guard = -1
    context = Context(statement=statement, table=table, modifiers=[], labels=entry.labels)
    try:
        if statement.guard is not None:
            guard = context.source(statement.guard, ptx_type("pred"))
        builder = find_builder(statement.opcode)
        kind, target, run = NORMAL, -1, _no_operation
        if words[0] in ("ret", "exit"):
            kind = EXIT
        elif words[0] == "bra":
            kind, target = BRANCH, _branch_target(statement, entry)
        elif builder is None:
            raise PtxError(
                f"instruction {statement.opcode} is not implemented in {instructions.__name__}; "
                f'read the section on {words[0]} in the PTX ISA, "Instruction Set"'
            )
        else:
            context.modifiers = words[len(builder.name.split(".")) :]
            run = _build(builder, context)
    except PtxError as error:
        raise PtxError(f"line {statement.line}: {statement.text}: {error}") from None
    return Instruction(
        run=run,
        kind=kind,
        guard=guard,
        guard_negated=statement.guard_negated,
        target=target,
        reads=frozenset(context.reads),
        writes=frozenset(context.writes),
        accesses=frozenset(context.reads | context.writes),
        converges=builder is not None and builder.converges,
        member_mask=context.member_mask,
        checks_registers=builder is None or builder.checks_registers,
        category=_category(builder, words),
        opcode=statement.opcode,
        line=statement.line,
        text=statement.text,
    )


_FLOATS = {"f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "f32x2"}


def _category(builder: Builder | None, words: list[str]) -> str:
    if builder is None:
        return "control"
    # Integer and floating-point arithmetic share names, and so a builder.
    if builder.category == "integer" and _FLOATS.intersection(words):
        return "floating point"
    return builder.category


def _build(builder: Builder, context: Context) -> Run:
    try:
        run = builder.build(context)
        context.done()
    except PtxError as error:
        raise PtxError(f'{error} (PTX ISA, "{builder.section}")') from None
    return run


def _branch_target(statement: Statement, entry: Entry) -> int:
    (operand,) = statement.operands
    if not isinstance(operand, Symbol) or operand.name not in entry.labels:
        raise PtxError(f"unknown label {operand}")
    return entry.labels[operand.name]
