"""Records of parsed PTX: operands, statements, entry points."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A register by its unique name (registers of nested blocks get a suffix), or a special one."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Immediate:
    """A constant: an integer, or the bits of a floating-point number with their width."""

    value: int
    float_bits: int = 0
    """0 for an integer; 32 or 64 for ``0f``/``0d`` constants, whose bits ``value`` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A label, parameter or variable, plus a constant number of bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Operands in braces."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two destinations joined by a bar: ``%r1|%p2``."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Operands in brackets: a base with an offset, then coordinates of a tensor copy."""

    base: "Operand"
    offset: int = 0
    coordinates: Vector | None = None
    extra: Vector | None = None
    """im2col offsets or gather rows, after the coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """The destination ``_``: the result is discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Negated:
    """A predicate source with ``!``."""

    operand: Register


Operand = Register | Immediate | Symbol | Vector | Pair | Address | Sink | Negated


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One instruction."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    """Line of the PTX text, from 1."""
    text: str
    guard: Register | None = None
    guard_negated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One ``.param`` of an entry: byte range in the parameter space."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable in shared, global or constant memory."""

    name: str
    space: str
    size: int
    """Bytes; 0 for ``extern`` dynamic shared memory."""
    alignment: int
    data: bytes = b""
    """Initial bytes, for global and constant variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A kernel: its statements in order, and where its labels point to."""

    name: str
    parameters: tuple[Parameter, ...]
    statements: tuple[Statement, ...]
    labels: dict[str, int]
    """Unique label name to the index of the statement after it."""
    registers: dict[str, str]
    """Unique register name to its type as declared, e.g. ``b32``."""
    threads: tuple[int, int, int] | None = None
    """``.reqntid``, if given."""
    cluster: tuple[int, int, int] | None = None
    """``.reqnctapercluster``, if given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A parsed PTX file."""

    version: tuple[int, int]
    target: str
    variables: tuple[Variable, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)
