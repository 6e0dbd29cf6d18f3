"""Conversions: PTX ISA, "Data Movement and Conversion Instructions: cvt"."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.instructions.rounding import round_to, without_subnormals
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction

_CATEGORY = "conversion"
_INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_NARROW = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def to_integer(value: np.ndarray, kind: PtxType, rounding: str) -> np.ndarray:
    """Rounds floats to an integer type: values outside clamp, NaN becomes zero (64 bits: 2^63)."""
    rounded = _INTEGER_ROUNDINGS[rounding](value.astype(np.float64))
    low, high = (-(1 << kind.bits - 1), (1 << kind.bits - 1) - 1)
    if kind.kind != "s":
        low, high = 0, (1 << kind.bits) - 1
    result = []
    for x in rounded:
        if np.isnan(x):
            result.append(0 if kind.bits < 64 else 1 << 63)
        else:
            result.append(low if x <= low else high if x >= high else int(x))
    return np.array([r % (1 << kind.bits) for r in result], f"u{kind.bits // 8}").view(kind.dtype)


def saturated_integer(value: np.ndarray, source: PtxType, kind: PtxType) -> np.ndarray:
    """Clamps integers to the range of another integer type."""
    limits = np.iinfo(kind.dtype)
    clamped = [min(max(int(x), limits.min), limits.max) for x in value.view(source.dtype)]
    return np.array(clamped, kind.dtype)


def narrow_float(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds float32 to an 8-bit format with ``.satfinite``: the largest number, never infinity."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(np.isnan(value), value, np.clip(value, -largest, largest)).astype(dtype)


@instruction(
    "cvt", "cvt.pack", section="Data Movement and Conversion Instructions: cvt", category=_CATEGORY
)
def convert(context: Context) -> Run:
    """``cvt{.rnd}{.ftz}{.sat}.dtype.atype d, a``, and the packing forms with two sources."""
    if context.statement.opcode.startswith("cvt.pack"):
        raise PtxError("cvt.pack is not implemented")
    for word in _NARROW:
        if word in context.modifiers:
            return _convert_narrow(context, word)
    rounding = context.take("rn", "rz", "rm", "rp", "rna", *_INTEGER_ROUNDINGS, default="none")
    ftz, relu = context.flag("ftz"), context.flag("relu")
    sat = context.flag("sat")
    satfinite = context.flag("satfinite")
    result, source = context.take_type(), context.take_type()
    if result.name in ("f16x2", "bf16x2"):
        return _convert_pair(context, result, rounding, relu=relu)
    if rounding == "rna" or satfinite:
        raise PtxError(f"cvt.{rounding}.{result.name} is not implemented")
    function = _scalar_conversion(result, source, rounding, sat=sat, ftz=ftz, relu=relu)
    return _run_conversion(context, result, source, function)


def _scalar_conversion(
    result: PtxType, source: PtxType, rounding: str, *, sat: bool, ftz: bool, relu: bool
) -> Callable[[np.ndarray], np.ndarray]:
    if source.kind == "f" and result.kind == "f":
        return _float_to_float(result, rounding, sat=sat, ftz=ftz, relu=relu)
    if source.kind == "f":
        return lambda a: to_integer(a, result, rounding)
    if result.kind == "f":
        direction = "rn" if rounding == "none" else rounding
        # 64-bit integers do not fit float64; the direction then applies to the first rounding.
        return lambda a: round_to(a.astype(np.float64), result.dtype, direction)
    if sat:
        return lambda a: saturated_integer(a, source, result)
    return lambda a: a.astype(result.dtype)


def _float_to_float(
    result: PtxType, rounding: str, *, sat: bool, ftz: bool, relu: bool
) -> Callable[[np.ndarray], np.ndarray]:
    def apply(a: np.ndarray) -> np.ndarray:
        value = without_subnormals(a) if ftz else a
        if rounding in _INTEGER_ROUNDINGS:
            value = _INTEGER_ROUNDINGS[rounding](value)
        elif rounding in ("none", "rn"):
            value = value.astype(result.dtype)
        else:
            value = round_to(value.astype(np.float64), result.dtype, rounding)
        if ftz and result.bits == 32:
            value = without_subnormals(value)
        if sat:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(result.dtype)
        if relu:
            value = np.where(value < 0, np.zeros((), result.dtype), value)
        return value

    return apply


def _run_conversion(
    context: Context,
    result: PtxType,
    source: PtxType,
    function: Callable[[np.ndarray], np.ndarray],
) -> Run:
    """Converts between registers that may be wider than the types (then the low bits count)."""
    context.expect(2)
    target, operand = context.operands
    source_file = context.file_of(operand, source)
    result_file = context.file_of(target, result)
    source_view = f"u{source_file}"
    sign = "s" if result.kind == "s" else "u"
    row = context.source(operand, ptx_type(f"b{source_file}"))
    destination = context.destination(target, ptx_type(f"b{result_file}"))
    widened = np.dtype(f"{'i' if sign == 's' else 'u'}{int(result_file) // 8}")
    steps = int(source_file) // source.bits

    def run(warp: Any, lanes: Any) -> None:
        raw = warp.rows[source_view][row]
        value = function(raw.view(source.dtype)[::steps] if steps > 1 else raw.view(source.dtype))
        value = np.ascontiguousarray(value)
        if result.kind != "f":  # sign- or zero-extended to the register
            value = value.view(result.dtype).astype(widened)
        np.copyto(
            warp.rows[f"u{result_file}"][destination],
            value.view(f"u{int(result_file) // 8}"),
            where=lanes,
        )

    return run


def _convert_pair(context: Context, result: PtxType, rounding: str, *, relu: bool) -> Run:
    """``cvt.rn.{bf16x2,f16x2}.f32 d, a, b``: ``a`` goes to the upper half, ``b`` to the lower."""
    if rounding not in ("rn", "rz"):
        raise PtxError(f"cvt.{rounding}.{result.name}.f32 is not implemented")
    context.expect(3)
    f32 = ptx_type("f32")
    element = ml_dtypes.bfloat16 if result.name == "bf16x2" else np.float16
    destination = context.destination(context.operands[0], result)
    upper, lower = (context.source(operand, f32) for operand in context.operands[1:])

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows["f32"]
        both = np.empty((rows[upper].size, 2), np.float32)
        both[:, 0], both[:, 1] = rows[lower], rows[upper]
        if relu:
            both = np.where(both < 0, np.float32(0), both)
        if rounding == "rn":
            value = both.astype(element)
        else:
            value = round_to(both.astype(np.float64), np.dtype(element), rounding)
        np.copyto(warp.rows["u32"][destination], value.view(np.uint32)[:, 0], where=lanes)

    return run


def _convert_narrow(context: Context, word: str) -> Run:
    """``cvt.rn.satfinite.e4m3x2.f32 d, a, b`` and ``cvt.rn.f16x2.e4m3x2 d, a``."""
    context.take("rn")
    relu, satfinite = context.flag("relu"), context.flag("satfinite")
    narrow = _NARROW[word]
    from_narrow = context.modifiers[-1] == word
    context.modifiers.remove(word)
    kind = context.take_type()
    b16, b32 = ptx_type("b16"), ptx_type("b32")
    if from_narrow:
        if kind.name != "f16x2":
            raise PtxError(f"cvt.{kind.name}.{word} is not implemented")
        destination = context.destination(context.operands[0], b32)
        row = context.source(context.operands[1], b16)

        def widen(warp: Any, lanes: Any) -> None:
            pairs = warp.rows["u16"][row].view(narrow).astype(np.float16)
            if relu:
                pairs = np.where(pairs < 0, np.float16(0), pairs)
            np.copyto(warp.rows["u32"][destination], pairs.view(np.uint32), where=lanes)

        return widen
    if kind.name != "f32" or not satfinite:
        raise PtxError(f"cvt.{word}.{kind.name} is implemented from f32 with .satfinite only")
    destination = context.destination(context.operands[0], b16)
    upper, lower = (context.source(operand, kind) for operand in context.operands[1:])

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows["f32"]
        both = np.stack([rows[lower], rows[upper]], axis=1)
        if relu:
            both = np.where(both < 0, np.float32(0), both)
        value = narrow_float(both, narrow).view(np.uint16)[:, 0]
        np.copyto(warp.rows["u16"][destination], value, where=lanes)

    return run
