"""Logic, shifts, bit fields, comparison and selection.

PTX ISA: "Logic and Shift Instructions", "Comparison and Selection Instructions".
"""

from typing import Any

import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.instructions.elementwise import run_function, run_ufunc
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate, Pair

_CATEGORY = "logic"


@instruction(
    "and", "or", "xor", "not", "cnot", section="Logic and Shift Instructions", category=_CATEGORY
)
def bitwise(context: Context) -> Run:
    """``and.type d, a, b`` and its kin, on bits or predicates."""
    name = context.statement.opcode.partition(".")[0]
    kind = context.take_type()
    if name == "cnot":
        return run_function(context, lambda a: (a == 0).astype(a.dtype), [kind], kind)
    ufunc = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.bitwise_not,
    }[name]
    return run_ufunc(context, ufunc, kind)


@instruction("shl", "shr", section="Logic and Shift Instructions: shl, shr", category=_CATEGORY)
def shift(context: Context) -> Run:
    """``shl.type d, a, n``: amounts above the width clamp; ``shr.s`` fills with the sign."""
    left = context.statement.opcode.startswith("shl")
    kind = context.take_type()
    bits = kind.bits

    def apply(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        limit = bits - 1 if kind.kind == "s" and not left else bits
        amount = np.minimum(amount, limit)
        inside = np.minimum(amount, bits - 1).astype(a.dtype)
        value = np.left_shift(a, inside) if left else np.right_shift(a, inside)
        return np.where(amount >= bits, np.zeros_like(a), value)

    return run_function(context, apply, [kind, ptx_type("u32")], kind)


@instruction("shf", section="Logic and Shift Instructions: shf", category=_CATEGORY)
def funnel_shift(context: Context) -> Run:
    """``shf.{l,r}.{wrap,clamp}.b32 d, a, b, c``: shifts the 64 bits ``b:a``."""
    left = context.take("l", "r") == "l"
    wrap = context.take("wrap", "clamp") == "wrap"
    kind = context.take_type()

    def apply(a: np.ndarray, b: np.ndarray, amount: np.ndarray) -> np.ndarray:
        joined = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        n = (amount & 31 if wrap else np.minimum(amount, 32)).astype(np.uint64)
        if left:
            return (joined << n) >> np.uint64(32)
        return (joined >> n) & np.uint64(0xFFFFFFFF)

    return run_function(context, apply, [kind, kind, ptx_type("u32")], kind)


@instruction("lop3", section="Logic and Shift Instructions: lop3", category=_CATEGORY)
def lop3(context: Context) -> Run:
    """``lop3.b32 d, a, b, c, table``: any logic function of three bits."""
    kind = context.take_type()
    context.expect(5)
    table = context.operands[4]
    if not isinstance(table, Immediate):
        raise PtxError("lop3 needs a constant table")
    bits = table.value
    destination = context.destination(context.operands[0], kind)
    sources = [context.source(operand, kind) for operand in context.operands[1:4]]

    def run(warp: Any, lanes: Any) -> None:
        a, b, c = (warp.rows["u32"][row] for row in sources)
        result = np.zeros_like(a)
        for index in range(8):
            if bits >> index & 1:
                term = a if index & 4 else ~a
                term = term & (b if index & 2 else ~b)
                result |= term & (c if index & 1 else ~c)
        np.copyto(warp.rows["u32"][destination], result, where=lanes)

    return run


@instruction("bfe", section="Integer Arithmetic Instructions: bfe", category=_CATEGORY)
def extract_bits(context: Context) -> Run:
    """``bfe.type d, a, position, length``."""
    kind = context.take_type()
    u32 = ptx_type("u32")

    def apply(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        values = []
        for x, p, n in zip(a, position & 255, length & 255, strict=True):
            field = (int(x) >> min(int(p), kind.bits)) & ((1 << int(n)) - 1)
            if kind.kind == "s" and n and int(p) < kind.bits:
                width = min(int(n), kind.bits - int(p))
                field &= (1 << width) - 1
                field -= (field >> (width - 1) & 1) << width
            values.append(field % (1 << kind.bits))
        return np.array(values, f"u{kind.bits // 8}").view(kind.dtype)

    return run_function(context, apply, [kind, u32, u32], kind)


@instruction("bfi", section="Integer Arithmetic Instructions: bfi", category=_CATEGORY)
def insert_bits(context: Context) -> Run:
    """``bfi.type d, a, b, position, length``: puts low bits of ``a`` into ``b``."""
    kind = context.take_type()
    u32 = ptx_type("u32")

    def apply(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        values = []
        for x, y, p, n in zip(a, b, position & 255, length & 255, strict=True):
            mask = (((1 << int(n)) - 1) << int(p)) % (1 << kind.bits)
            values.append((int(y) & ~mask) | ((int(x) << int(p)) & mask))
        return np.array(values, kind.dtype)

    return run_function(context, apply, [kind, kind, u32, u32], kind)


@instruction("brev", section="Integer Arithmetic Instructions: brev", category=_CATEGORY)
def reverse_bits(context: Context) -> Run:
    """``brev.type d, a``."""
    kind = context.take_type()

    def apply(a: np.ndarray) -> np.ndarray:
        return np.array([int(f"{int(x):0{kind.bits}b}"[::-1], 2) for x in a], kind.dtype)

    return run_function(context, apply, [kind], kind)


@instruction("prmt", section="Data Movement and Conversion Instructions: prmt", category=_CATEGORY)
def permute_bytes(context: Context) -> Run:
    """``prmt.b32 d, a, b, selector``: four bytes of ``b:a``, or their replicated sign bits."""
    kind = context.take_type()

    def apply(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        joined = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(a.shape, np.uint64)
        for index in range(4):
            choice = (selector >> np.uint32(4 * index)) & 15
            byte = (joined >> ((choice & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(choice & 8, sign, byte)
            result |= byte << np.uint64(8 * index)
        return result

    return run_function(context, apply, [kind] * 3, kind)


_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def _either_is_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def comparison(name: str, kind: PtxType) -> Any:
    """Returns the function of two rows that a comparison operator names."""
    if name == "nan":
        return _either_is_nan
    if name == "num":
        return lambda a, b: ~_either_is_nan(a, b)
    if name in _UNORDERED:
        ordered = _ORDERED[_UNORDERED[name]]
        return lambda a, b: ordered(a, b) | _either_is_nan(a, b)
    ordered = _ORDERED[name]
    if kind.kind == "f" and name == "ne":
        return lambda a, b: ordered(a, b) & ~_either_is_nan(a, b)
    return ordered


@instruction("setp", section="Comparison and Selection Instructions: setp", category=_CATEGORY)
def set_predicate(context: Context) -> Run:
    """``setp.op{.bool}.type p{|q}, a, b{, c}``."""
    operator = context.take(*_ORDERED, *_UNORDERED, "num", "nan")
    combine = context.take("and", "or", "xor", default="none")
    context.flag("ftz")
    kind = context.take_type()
    pred = ptx_type("pred")
    targets = context.operands[0]
    pair = isinstance(targets, Pair)
    first = context.destination(targets.first if isinstance(targets, Pair) else targets, pred)
    second = context.destination(targets.second, pred) if isinstance(targets, Pair) else -1
    a, b = (context.source(operand, kind) for operand in context.operands[1:3])
    compare, view = comparison(operator, kind), kind.view
    if combine == "none" and not pair:

        def run_simple(warp: Any, lanes: Any) -> None:
            rows = warp.rows[view]
            np.copyto(warp.rows["pred"][first], compare(rows[a], rows[b]), where=lanes)

        return run_simple
    third, negated = context.predicate(context.operands[3]) if combine != "none" else (-1, False)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(combine)

    def run(warp: Any, lanes: Any) -> None:
        rows, predicates = warp.rows[view], warp.rows["pred"]
        result = compare(rows[a], rows[b])
        inverse = ~result
        if join is not None:
            other = predicates[third] ^ negated
            result, inverse = join(result, other), join(inverse, other)
        np.copyto(predicates[first], result, where=lanes)
        if second >= 0:
            np.copyto(predicates[second], inverse, where=lanes)

    return run


@instruction("set", section="Comparison and Selection Instructions: set", category=_CATEGORY)
def set_register(context: Context) -> Run:
    """``set.op.dtype.stype d, a, b``: all ones or 1.0 where the comparison holds."""
    operator = context.take(*_ORDERED, *_UNORDERED, "num", "nan")
    context.flag("ftz")
    result, kind = context.take_type(), context.take_type()
    compare = comparison(operator, kind)
    true = 1.0 if result.kind == "f" else np.array(-1).astype(result.dtype)
    return run_function(
        context,
        lambda a, b: np.where(compare(a, b), true, np.zeros((), result.dtype)),
        [kind, kind],
        result,
    )


@instruction("selp", section="Comparison and Selection Instructions: selp", category=_CATEGORY)
def select(context: Context) -> Run:
    """``selp.type d, a, b, p``: ``a`` where the predicate holds, else ``b``."""
    kind = context.take_type()
    destination = context.destination(context.operands[0], kind)
    a, b = (context.source(operand, kind) for operand in context.operands[1:3])
    p, negated = context.predicate(context.operands[3])
    # Bits are moved, so floats keep their NaN payloads.
    view = ptx_type(f"u{kind.bits}").view

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows[view]
        chosen = warp.rows["pred"][p]
        if negated:
            chosen = ~chosen
        np.copyto(rows[destination], np.where(chosen, rows[a], rows[b]), where=lanes)

    return run
