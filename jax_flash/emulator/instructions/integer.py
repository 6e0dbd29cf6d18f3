"""Integer arithmetic: PTX ISA, "Integer Arithmetic Instructions" and "Extended-Precision"."""

from typing import Any

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.instructions import floating
from jax_flash.emulator.instructions.elementwise import run_function, run_ufunc
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_CATEGORY = "integer"


def _wide(kind: PtxType) -> PtxType:
    if kind.bits not in (16, 32):
        raise PtxError(f".wide needs a 16- or 32-bit type, not .{kind.name}")
    return ptx_type(f"{kind.kind}{2 * kind.bits}")


def high_half(a: np.ndarray, b: np.ndarray, kind: PtxType) -> np.ndarray:
    """Returns the upper half of the product, of rows of any integer type."""
    if kind.bits < 64:
        wide = np.int64 if kind.kind == "s" else np.uint64
        return (a.astype(wide) * b.astype(wide)) >> wide(kind.bits)
    products = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array([p % (1 << 64) for p in products], np.uint64).view(kind.dtype)


@instruction("add", section="Integer Arithmetic Instructions: add", category=_CATEGORY)
def add(context: Context) -> Run:
    """``add.type d, a, b``; floating-point types by their own rules."""
    kind = context.take_type()
    if kind.kind == "f":
        return floating.build_add(context, kind)
    if context.flag("sat"):
        return run_function(context, _saturated(np.add), [kind, kind], kind)
    return run_ufunc(context, np.add, kind)


@instruction("sub", section="Integer Arithmetic Instructions: sub", category=_CATEGORY)
def sub(context: Context) -> Run:
    """``sub.type d, a, b``."""
    kind = context.take_type()
    if kind.kind == "f":
        return floating.build_sub(context, kind)
    if context.flag("sat"):
        return run_function(context, _saturated(np.subtract), [kind, kind], kind)
    return run_ufunc(context, np.subtract, kind)


def _saturated(ufunc: Any) -> Any:
    def apply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = ufunc(a.astype(np.int64), b.astype(np.int64))
        return np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32)

    return apply


@instruction("mul", section="Integer Arithmetic Instructions: mul", category=_CATEGORY)
def mul(context: Context) -> Run:
    """``mul.{lo,hi,wide}.type d, a, b``."""
    part = context.take("lo", "hi", "wide", default="float")
    kind = context.take_type()
    if part == "float":
        return floating.build_mul(context, kind)
    if part == "lo":
        return run_ufunc(context, np.multiply, kind)
    if part == "hi":
        return run_function(context, lambda a, b: high_half(a, b, kind), [kind, kind], kind)
    wide = _wide(kind)
    return run_function(
        context, lambda a, b: np.multiply(a, b, dtype=wide.dtype), [kind, kind], wide
    )


@instruction("mad", section="Integer Arithmetic Instructions: mad", category=_CATEGORY)
def mad(context: Context) -> Run:
    """``mad.{lo,hi,wide}.type d, a, b, c``: ``d = part(a * b) + c``."""
    part = context.take("lo", "hi", "wide", default="float")
    kind = context.take_type()
    if part == "float":
        return floating.build_fma(context, kind)
    if part == "lo":
        return run_function(context, lambda a, b, c: a * b + c, [kind] * 3, kind)
    if part == "hi":
        return run_function(
            context,
            lambda a, b, c: high_half(a, b, kind).astype(kind.dtype) + c,
            [kind] * 3,
            kind,
        )
    wide = _wide(kind)
    return run_function(
        context, lambda a, b, c: np.multiply(a, b, dtype=wide.dtype) + c, [kind, kind, wide], wide
    )


def divide_toward_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns integer quotients truncated toward zero; all ones where the divisor is zero."""
    if a.dtype.kind == "u":
        quotient = a // np.where(b == 0, np.ones_like(b), b)
    else:
        safe = np.where(b == 0, np.ones_like(b), b)
        quotient = a // safe
        quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
    # Division by zero gives an unspecified value in PTX; all ones is what hardware returns.
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


@instruction("div", section="Integer Arithmetic Instructions: div", category=_CATEGORY)
def div(context: Context) -> Run:
    """``div.type d, a, b``, truncated toward zero."""
    mode = context.take("rn", "approx", "full", default="integer")
    context.flag("ftz")
    kind = context.take_type()
    if kind.kind == "f":
        return floating.build_div(context, kind, mode)
    return run_function(context, divide_toward_zero, [kind, kind], kind)


@instruction("rem", section="Integer Arithmetic Instructions: rem", category=_CATEGORY)
def rem(context: Context) -> Run:
    """``rem.type d, a, b``: the remainder has the sign of ``a``."""
    kind = context.take_type()
    return run_function(context, lambda a, b: a - divide_toward_zero(a, b) * b, [kind, kind], kind)


@instruction("neg", section="Integer Arithmetic Instructions: neg", category=_CATEGORY)
def neg(context: Context) -> Run:
    """``neg.type d, a``."""
    ftz = context.flag("ftz")
    kind = context.take_type()
    if kind.kind == "f":
        return floating.build_sign(context, kind, np.negative, ftz=ftz)
    return run_ufunc(context, np.negative, kind)


@instruction("abs", section="Integer Arithmetic Instructions: abs", category=_CATEGORY)
def absolute(context: Context) -> Run:
    """``abs.type d, a``."""
    ftz = context.flag("ftz")
    kind = context.take_type()
    if kind.kind == "f":
        return floating.build_sign(context, kind, np.abs, ftz=ftz)
    return run_ufunc(context, np.absolute, kind)


@instruction("min", "max", section="Integer Arithmetic Instructions: min, max", category=_CATEGORY)
def minimum_or_maximum(context: Context) -> Run:
    """``min.type d, a, b``; ``.relu`` clamps the result of a signed type to zero from below."""
    name = context.statement.opcode.partition(".")[0]
    words = set(context.modifiers)
    if words & {"f16", "f32", "f64", "bf16", "f16x2", "bf16x2"}:
        return floating.build_extremum(context, name)
    relu = context.flag("relu")
    kind = context.take_type()
    ufunc = np.minimum if name == "min" else np.maximum
    if not relu:
        return run_ufunc(context, ufunc, kind)
    return run_function(context, lambda a, b: np.maximum(ufunc(a, b), 0), [kind, kind], kind)


@instruction("bfind", section="Integer Arithmetic Instructions: bfind", category=_CATEGORY)
def bfind(context: Context) -> Run:
    """``bfind{.shiftamt}.type d, a``: position of the most significant non-sign bit."""
    shift = context.flag("shiftamt")
    kind = context.take_type()

    def find(a: np.ndarray) -> np.ndarray:
        values = [int(x) for x in a]
        if kind.kind == "s":
            values = [~x if x < 0 else x for x in values]
        positions = [x.bit_length() - 1 for x in values]
        if shift:
            positions = [kind.bits - 1 - p if p >= 0 else -1 for p in positions]
        return np.array(positions, np.int64).astype(np.uint32)

    return run_function(context, find, [kind], ptx_type("u32"))


@instruction("popc", section="Integer Arithmetic Instructions: popc", category=_CATEGORY)
def popc(context: Context) -> Run:
    """``popc.type d, a``: number of one bits."""
    kind = context.take_type()

    def count(a: np.ndarray) -> np.ndarray:
        return np.array([int(x).bit_count() for x in a], np.uint32)

    return run_function(context, count, [ptx_type(f"u{kind.bits}")], ptx_type("u32"))


@instruction("clz", section="Integer Arithmetic Instructions: clz", category=_CATEGORY)
def clz(context: Context) -> Run:
    """``clz.type d, a``: number of leading zeros."""
    kind = context.take_type()

    def count(a: np.ndarray) -> np.ndarray:
        return np.array([kind.bits - int(x).bit_length() for x in a], np.uint32)

    return run_function(context, count, [ptx_type(f"u{kind.bits}")], ptx_type("u32"))
