"""Floating-point arithmetic: PTX ISA, "Floating Point Instructions", half precision included.

Arithmetic is exact IEEE with the rounding that the instruction names. The approximations
(``ex2``, ``lg2``, ``rcp``, ``rsqrt``, ``sqrt``, ``sin``, ``cos``, ``tanh``) are the correctly
rounded float32 result instead of the hardware's, whose last bits the ISA leaves open.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.instructions.elementwise import run_function, run_ufunc
from jax_flash.emulator.instructions.rounding import (
    fused_multiply_add,
    maximum,
    minimum,
    round_to,
    without_subnormals,
)
from jax_flash.emulator.ptx_types import VIEWS, PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_CATEGORY = "floating point"
_ROUNDINGS = ("rn", "rz", "rm", "rp")

Function = Callable[..., np.ndarray]


def _lane_dtype(kind: PtxType) -> np.dtype:
    """Returns the element type that a (possibly packed) type computes in."""
    packed = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
    return VIEWS[packed[kind.name]] if kind.name in packed else kind.dtype


def packed(function: Function, kind: PtxType) -> Function:
    """Returns a function of register rows from one of elements, for packed types."""
    element = _lane_dtype(kind)
    if element == kind.dtype:
        return function

    def apply(*rows: np.ndarray) -> np.ndarray:
        elements = [np.ascontiguousarray(row).view(element) for row in rows]
        return np.ascontiguousarray(function(*elements).astype(element)).view(kind.dtype)

    return apply


def _finish(value: np.ndarray, *, ftz: bool, sat: bool, relu: bool = False) -> np.ndarray:
    if ftz:
        value = without_subnormals(value)
    if sat:
        value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)
    if relu:
        value = np.where(value < 0, np.zeros((), value.dtype), value)
    return value


def _arithmetic(context: Context, kind: PtxType, exact: Function, ufunc: Any, sources: int) -> Run:
    """Builds add, sub or mul: ``exact`` computes in float64, ``ufunc`` in the type itself."""
    rounding = context.take(*_ROUNDINGS, default="rn")
    ftz, sat = context.flag("ftz"), context.flag("sat")
    element = _lane_dtype(kind)
    if rounding == "rn" and not ftz and not sat and element == kind.dtype and kind.bits >= 32:
        return run_ufunc(context, ufunc, kind)

    def apply(*rows: np.ndarray) -> np.ndarray:
        if ftz:
            rows = tuple(without_subnormals(row) for row in rows)
        if element == np.float64 or (rounding == "rn" and element == np.float32):
            value = ufunc(*rows)
        else:
            value = exact(*rows, element=element, rounding=rounding)
        return _finish(value, ftz=ftz, sat=sat)

    return run_function(context, packed(apply, kind), [kind] * sources, kind)


def _exact_add(a: np.ndarray, b: np.ndarray, *, element: np.dtype, rounding: str) -> np.ndarray:
    one = np.ones((), np.float64)
    return fused_multiply_add(a.astype(np.float64), one, b, element=element, rounding=rounding)


def _exact_sub(a: np.ndarray, b: np.ndarray, *, element: np.dtype, rounding: str) -> np.ndarray:
    return _exact_add(a, -b, element=element, rounding=rounding)


def _exact_mul(a: np.ndarray, b: np.ndarray, *, element: np.dtype, rounding: str) -> np.ndarray:
    # The product of two numbers of at most 24 bits is exact in float64.
    return round_to(a.astype(np.float64) * b.astype(np.float64), element, rounding)


def build_add(context: Context, kind: PtxType) -> Run:
    """``add{.rnd}{.ftz}{.sat}.type d, a, b``."""
    return _arithmetic(context, kind, _exact_add, np.add, 2)


def build_sub(context: Context, kind: PtxType) -> Run:
    """``sub{.rnd}{.ftz}{.sat}.type d, a, b``."""
    return _arithmetic(context, kind, _exact_sub, np.subtract, 2)


def build_mul(context: Context, kind: PtxType) -> Run:
    """``mul{.rnd}{.ftz}{.sat}.type d, a, b``."""
    return _arithmetic(context, kind, _exact_mul, np.multiply, 2)


def build_fma(context: Context, kind: PtxType) -> Run:
    """``fma.rnd{.ftz}{.sat}{.relu}.type d, a, b, c``: rounded once."""
    rounding = context.take(*_ROUNDINGS, default="rn")
    ftz, sat, relu = context.flag("ftz"), context.flag("sat"), context.flag("relu")
    element = _lane_dtype(kind)
    if element == np.float64:
        raise PtxError("fma.f64 is not implemented")

    def apply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        if ftz:
            a, b, c = without_subnormals(a), without_subnormals(b), without_subnormals(c)
        value = fused_multiply_add(a, b, c, element=element, rounding=rounding)
        return _finish(value, ftz=ftz, sat=sat, relu=relu)

    return run_function(context, packed(apply, kind), [kind] * 3, kind)


@instruction("fma", section="Floating Point Instructions: fma", category=_CATEGORY)
def fma(context: Context) -> Run:
    """``fma.rnd.type d, a, b, c``."""
    return build_fma(context, context.take_type())


def build_div(context: Context, kind: PtxType, mode: str) -> Run:
    """``div.{rn,approx,full}.f32 d, a, b``, always correctly rounded."""
    del mode
    return run_ufunc(context, np.divide, kind)


def build_sign(context: Context, kind: PtxType, ufunc: Any, *, ftz: bool) -> Run:
    """``neg`` and ``abs``: only the sign bit changes."""

    def apply(a: np.ndarray) -> np.ndarray:
        value = ufunc(a)
        return without_subnormals(value) if ftz else value

    return run_function(context, packed(apply, kind), [kind], kind)


def build_extremum(context: Context, name: str) -> Run:
    """``min``/``max{.ftz}{.NaN}{.xorsign.abs}.type d, a, b{, c}``.

    Without ``.NaN`` a NaN loses to a number; -0 is less than +0.
    """
    ftz, propagate = context.flag("ftz"), context.flag("NaN")
    kind = context.take_type()
    function = minimum if name == "min" else maximum

    def apply(*rows: np.ndarray) -> np.ndarray:
        if ftz:
            rows = tuple(without_subnormals(row) for row in rows)
        value = rows[0]
        for row in rows[1:]:
            value = function(value, row, propagate)
        return value

    return run_function(context, packed(apply, kind), [kind] * (len(context.operands) - 1), kind)


def _rounded(function: Function) -> Function:
    """Returns a float32 function that is a float64 one rounded once."""

    def apply(a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(np.float32)

    return apply


def _signed_zero_reciprocal(a: np.ndarray) -> np.ndarray:
    return 1.0 / a


_APPROXIMATIONS: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": _signed_zero_reciprocal,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction(
    *_APPROXIMATIONS,
    section="Floating Point Instructions: approximations",
    category="special function",
)
def approximate(context: Context) -> Run:
    """``ex2.approx{.ftz}.f32 d, a`` and its kin, also packed half precision; correctly rounded."""
    name = context.statement.opcode.partition(".")[0]
    context.take("approx", "rn", default="approx")
    ftz = context.flag("ftz")
    kind = context.take_type()
    function = _APPROXIMATIONS[name]
    element = _lane_dtype(kind)

    def apply(a: np.ndarray) -> np.ndarray:
        if ftz:
            a = without_subnormals(a)
        value = function(a.astype(np.float64)).astype(np.float32).astype(element)
        return without_subnormals(value) if ftz else value

    return run_function(context, packed(apply, kind), [kind], kind)


@instruction("testp", section="Floating Point Instructions: testp", category=_CATEGORY)
def test_property(context: Context) -> Run:
    """``testp.property.type p, a``."""
    name = context.take("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = context.take_type()
    tiny = np.finfo(kind.dtype).tiny

    def apply(a: np.ndarray) -> np.ndarray:
        subnormal = (np.abs(a) < tiny) & (a != 0)
        return {
            "finite": np.isfinite(a),
            "infinite": np.isinf(a),
            "number": ~np.isnan(a),
            "notanumber": np.isnan(a),
            "normal": np.isfinite(a) & ~subnormal & (a != 0),
            "subnormal": subnormal,
        }[name]

    return run_function(context, apply, [kind], ptx_type("pred"))


@instruction("copysign", section="Floating Point Instructions: copysign", category=_CATEGORY)
def copy_sign(context: Context) -> Run:
    """``copysign.type d, a, b``: the magnitude of ``b`` with the sign of ``a``."""
    kind = context.take_type()
    return run_function(context, lambda a, b: np.copysign(b, a), [kind, kind], kind)
