"""Register allocation of a program: one row per register, constant and special register."""

from dataclasses import dataclass, field

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import FILE_NUMBERS, FILES, PtxType, ptx_type
from jax_flash.emulator.syntax import Entry, Immediate, Register, Symbol

SPECIAL_FILES = {
    "%laneid": "32",
    "%warpid": "32",
    "%smid": "32",
    "%cluster_ctarank": "32",
    "%cluster_nctarank": "32",
    "%dynamic_smem_size": "32",
    "%total_smem_size": "32",
    **{
        f"%{name}.{axis}": "32"
        for name in (
            "tid",
            "ntid",
            "ctaid",
            "nctaid",
            "clusterid",
            "nclusterid",
            "cluster_ctaid",
            "cluster_nctaid",
        )
        for axis in "xyz"
    },
    **{f"%lanemask_{name}": "32" for name in ("eq", "le", "lt", "ge", "gt")},
}
"""Special registers that are constant for a thread; PTX ISA, "Special Registers"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A row that is set once, when a warp starts."""

    file: str
    row: int
    bits: int = 0
    special: str = ""
    """Name of a special register, or empty."""
    symbol: Symbol | None = None


@dataclass(slots=True)
class RegisterTable:
    """Rows of every register file; constants and special registers are rows like any other."""

    entry: Entry
    shared_symbols: dict[str, int]
    """Offset of each shared variable in the block's shared memory."""
    global_symbols: dict[str, int]
    """Address of each module-level global or constant variable."""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))
    fills: list[Fill] = field(default_factory=list)
    _rows: dict[tuple[str, str], int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Gives every declared register a row."""
        for name, declared in self.entry.registers.items():
            file = ptx_type(declared).file
            row = self._new(file)
            self._rows[name, file] = row
            self._names[self.identity(file, row)] = name

    def _new(self, file: str) -> int:
        self.sizes[file] += 1
        return self.sizes[file] - 1

    @staticmethod
    def identity(file: str, row: int) -> int:
        """Returns a number that is unique over all files."""
        return row * len(FILES) + FILE_NUMBERS[file]

    def name_of(self, identity: int) -> str:
        """Returns the name of a register by its identity."""
        return self._names.get(identity, f"register {identity}")

    def is_variable(self, register: Register) -> bool:
        """Whether a register is declared by the program, and so can be written."""
        return register.name in self.entry.registers

    def file(self, operand: object) -> str:
        """Returns the file that a register was declared in."""
        if not isinstance(operand, Register):
            raise PtxError(f"operand {operand} is no register")
        declared = self.entry.registers.get(operand.name)
        if declared is not None:
            return ptx_type(declared).file
        if operand.name in SPECIAL_FILES:
            return SPECIAL_FILES[operand.name]
        raise PtxError(f"special register {operand.name} is not implemented")

    def row(self, register: Register, file: str) -> int:
        """Returns the row of a register that must be in ``file``."""
        actual = self.file(register)
        if actual != file:
            raise PtxError(f"{register.name} is a .b{actual} register; a .b{file} one is needed")
        if not self.is_variable(register):
            return self._filled(file, register.name, special=register.name)
        return self._rows[register.name, file]

    def _filled(
        self, file: str, key: str, *, bits: int = 0, special: str = "", symbol: Symbol | None = None
    ) -> int:
        row = self._rows.get((key, file))
        if row is None:
            row = self._rows[key, file] = self._new(file)
            self.fills.append(Fill(file=file, row=row, bits=bits, special=special, symbol=symbol))
        return row

    def constant(self, immediate: Immediate, kind: PtxType) -> int:
        """Returns the row of a constant."""
        width = 1 if kind.file == "pred" else int(kind.file)
        bits = immediate.value % (1 << width)
        if immediate.float_bits and kind.bits != immediate.float_bits:
            if kind.bits != 64 or immediate.float_bits != 32:
                raise PtxError(f"0f/0d constant of {immediate.float_bits} bits as .{kind.name}")
            single = np.array(immediate.value, np.uint32).view(np.float32)
            bits = int(single.astype(np.float64).view(np.uint64))
        elif kind.kind == "f" and kind.bits >= 32 and not immediate.float_bits and kind.bits < 64:
            # An integer constant where a float is expected would be a converted value in PTX.
            if kind.view == "f32" and immediate.value:
                raise PtxError(f"integer constant {immediate.value} as .{kind.name}")
        return self._filled(kind.file, f"constant {bits}", bits=bits)

    def symbol(self, symbol: Symbol, kind: PtxType) -> int:
        """Returns the row that holds the address of a parameter or variable."""
        known = symbol.name in self.shared_symbols or symbol.name in self.global_symbols
        if not known and all(item.name != symbol.name for item in self.entry.parameters):
            raise PtxError(f"unknown name {symbol.name}")
        return self._filled(kind.file, f"address {symbol.name}{symbol.offset:+d}", symbol=symbol)

    def sink(self, file: str) -> int:
        """Returns the row that discarded results go to."""
        key = ("sink", file)
        if key not in self._rows:
            self._rows[key] = self._new(file)
        return self._rows[key]
