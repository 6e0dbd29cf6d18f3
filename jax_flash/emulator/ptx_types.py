"""PTX types: register file, numpy view and width of each fundamental type."""

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_flash.emulator.errors import PtxError

LANES = 32

VIEWS: dict[str, np.dtype] = {
    "pred": np.dtype(np.bool_),
    "u16": np.dtype(np.uint16),
    "s16": np.dtype(np.int16),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f64": np.dtype(np.float64),
    "u128": np.dtype("V16"),
}
"""Numpy dtype of each view of the register files; a register is a row of 32 lanes in each view."""

FILES = {
    "pred": ("pred",),
    "16": ("u16", "s16", "f16", "bf16"),
    "32": ("u32", "s32", "f32"),
    "64": ("u64", "s64", "f64"),
    "128": ("u128",),
}
"""Register files by width, and the views of each."""

FILE_NUMBERS = {name: number for number, name in enumerate(FILES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxType:
    """A fundamental PTX type."""

    name: str
    view: str
    """Key of :data:`VIEWS` that arithmetic on the type uses (8-bit types have none: ``""``)."""
    bits: int
    """Width; 1 for predicates."""
    kind: str
    """``u``, ``s``, ``f`` (any float), ``b`` or ``p``."""

    @property
    def file(self) -> str:
        """Register file that holds values of the type; 8-bit values live in wider registers."""
        if self.bits == 1:
            return "pred"
        return str(max(self.bits, 16))

    @property
    def dtype(self) -> np.dtype:
        """Numpy dtype of a value."""
        if self.bits == 8:
            return np.dtype(np.int8 if self.kind == "s" else np.uint8)
        return VIEWS[self.view]


_PATTERN = re.compile(
    r"^(pred|[usb](?:8|16|32|64|128)|f(?:16|32|64)|bf16|f16x2|bf16x2|f32x2|tf32)$"
)


def is_type(word: str) -> bool:
    """Whether an opcode modifier is a fundamental type."""
    return _PATTERN.match(word) is not None


def ptx_type(name: str) -> PtxType:
    """Returns a type by name.

    Raises:
      PtxError: not a type.
    """
    if not is_type(name):
        raise PtxError(f"unknown type .{name}")
    if name == "pred":
        return PtxType(name=name, view="pred", bits=1, kind="p")
    if name in ("f16x2", "bf16x2"):
        return PtxType(name=name, view="u32", bits=32, kind="f")
    if name == "f32x2":
        return PtxType(name=name, view="u64", bits=64, kind="f")
    if name in ("bf16", "tf32"):
        bits = 16 if name == "bf16" else 32
        return PtxType(name=name, view="bf16" if bits == 16 else "f32", bits=bits, kind="f")
    bits = int(name[1:])
    view = ("u" if name[0] == "b" or bits == 128 else name[0]) + name[1:]
    return PtxType(name=name, view=view if bits >= 16 else "", bits=bits, kind=name[0])
