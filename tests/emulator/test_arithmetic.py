"""Integer, logic, comparison and floating-point instructions, lane by lane.

Expected values are written from the PTX ISA's descriptions, with exact Python integers and
fractions, not with the numpy operations that the emulator uses.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .snippet import per_lane, run_snippet

EDGES = [0, 1, 2, 7, 31, 32, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x12345678, 0xDEADBEEF]
A = np.array([EDGES[i % len(EDGES)] for i in range(32)], np.uint32)
B = np.array([EDGES[(5 * i + 3) % len(EDGES)] for i in range(32)], np.uint32)


def signed(value: int, bits: int = 32) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def run2(instruction: str, a: np.ndarray = A, b: np.ndarray = B, output: Any = np.uint32):
    return run_snippet(f"{instruction} %o, %a, %b;", inputs={"a": a, "b": b}, outputs={"o": output})


def check2(instruction: str, expected, bits: int = 32):
    got = run2(instruction, output=f"u{bits // 8}").outputs["o"]
    want = [expected(int(a), int(b)) % (1 << bits) for a, b in zip(A, B, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32", lambda a, b: a + b),
        ("add.u32", lambda a, b: a + b),
        ("sub.s32", lambda a, b: a - b),
        ("mul.lo.s32", lambda a, b: a * b),
        ("mul.hi.u32", lambda a, b: a * b >> 32),
        ("mul.hi.s32", lambda a, b: signed(a) * signed(b) >> 32),
        ("min.s32", lambda a, b: min(signed(a), signed(b))),
        ("min.u32", min),
        ("max.s32", lambda a, b: max(signed(a), signed(b))),
        ("max.u32", max),
        ("min.relu.s32", lambda a, b: max(min(signed(a), signed(b)), 0)),
        ("and.b32", lambda a, b: a & b),
        ("or.b32", lambda a, b: a | b),
        ("xor.b32", lambda a, b: a ^ b),
        ("shl.b32", lambda a, b: a << b if b < 32 else 0),
        ("shr.u32", lambda a, b: a >> min(b, 32)),
        ("shr.s32", lambda a, b: signed(a) >> min(b, 31)),
    ],
)
def test_two_source_integer(instruction, expected):
    check2(instruction, expected)


def test_wide_products():
    check2("mul.wide.u32", lambda a, b: a * b, bits=64)
    check2("mul.wide.s32", lambda a, b: signed(a) * signed(b), bits=64)


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def test_division_truncates_toward_zero():
    b = np.where(B == 0, 3, B).astype(np.uint32)
    quotient = run2("div.s32", b=b).outputs["o"]
    remainder = run2("rem.s32", b=b).outputs["o"]
    for x, y, q, r in zip(A, b, quotient, remainder, strict=True):
        expected = truncated(signed(int(x)), signed(int(y)))
        assert signed(int(q)) == signed(expected)
        assert signed(int(r)) == signed(signed(int(x)) - expected * signed(int(y)))
    assert (run2("div.u32", b=b).outputs["o"] == A // b).all()


def test_multiply_add():
    out = run_snippet(
        "mad.lo.s32 %o, %a, %b, %c; mad.wide.u32 %w, %a, %b, %e; mad.hi.u32 %h, %a, %b, %c;",
        inputs={"a": A, "b": B, "c": B[::-1].copy(), "e": A.astype(np.uint64) << np.uint64(7)},
        outputs={"o": np.uint32, "w": np.uint64, "h": np.uint32},
    ).outputs
    for i in range(32):
        a, b, c = int(A[i]), int(B[i]), int(B[31 - i])
        assert out["o"][i] == (a * b + c) % 2**32
        assert out["w"][i] == (a * b + (a << 7)) % 2**64
        assert out["h"][i] == ((a * b >> 32) + c) % 2**32


def test_one_source_integer():
    out = run_snippet(
        "neg.s32 %n, %a; abs.s32 %m, %a; not.b32 %i, %a; popc.b32 %p, %a; clz.b32 %z, %a;"
        " bfind.u32 %f, %a; brev.b32 %v, %a;",
        inputs={"a": A},
        outputs=dict.fromkeys("nmipzfv", np.uint32),
    ).outputs
    for i, a in enumerate(map(int, A)):
        assert out["n"][i] == -a % 2**32
        assert out["m"][i] == abs(signed(a)) % 2**32
        assert out["i"][i] == a ^ 0xFFFFFFFF
        assert out["p"][i] == a.bit_count()
        assert out["z"][i] == 32 - a.bit_length()
        assert out["f"][i] == (a.bit_length() - 1) % 2**32
        assert out["v"][i] == int(f"{a:032b}"[::-1], 2)


def test_bit_fields_and_permutes():
    out = run_snippet(
        "bfe.u32 %u, %a, 4, 8; bfe.s32 %s, %a, 4, 8; bfi.b32 %i, %a, %b, 8, 12;"
        " prmt.b32 %p, %a, %b, 0x7531; prmt.b32 %q, %a, %b, 0x8F40;"
        " lop3.b32 %l, %a, %b, %a, 0xE8; shf.l.wrap.b32 %f, %a, %b, 40;"
        " shf.r.clamp.b32 %g, %a, %b, 40;",
        inputs={"a": A, "b": B},
        outputs=dict.fromkeys("usipqlfg", np.uint32),
    ).outputs
    for i in range(32):
        a, b = int(A[i]), int(B[i])
        assert out["u"][i] == a >> 4 & 255
        assert out["s"][i] == signed(a >> 4 & 255, 8) % 2**32
        assert out["i"][i] == (b & ~0xFFF00) | (a & 0xFFF) << 8
        bytes_ = struct.pack("<II", a, b)
        assert out["p"][i] == int.from_bytes([bytes_[k] for k in (1, 3, 5, 7)], "little")
        sign = [255 if bytes_[k] & 128 else 0 for k in (7, 0)]
        assert out["q"][i] == int.from_bytes([bytes_[0], bytes_[4], sign[0], sign[1]], "little")
        assert out["l"][i] == (a & b | a & a | b & a) % 2**32
        assert out["f"][i] == ((b << 32 | a) << 8 >> 32) % 2**32
        assert out["g"][i] == b


def test_comparison_and_selection():
    out = run_snippet(
        "setp.lt.s32 %s, %a, %b; setp.lt.u32 %u, %a, %b; setp.ne.b32 %n, %a, %b;"
        " setp.ge.and.s32 %x|%y, %a, %b, %u; selp.b32 %o, %a, %b, %s;",
        inputs={"a": A, "b": B},
        outputs={"s": bool, "u": bool, "n": bool, "x": bool, "y": bool, "o": np.uint32},
    ).outputs
    for i in range(32):
        a, b = int(A[i]), int(B[i])
        less, below = signed(a) < signed(b), a < b
        assert out["s"][i] == less and out["u"][i] == below and out["n"][i] == (a != b)
        assert out["x"][i] == (not less and below) and out["y"][i] == (less and below)
        assert out["o"][i] == (a if less else b)


NAN = float("nan")
FLOATS = per_lane([0.0, -0.0, 1.5, -2.25, 3e38, 1e-40, -1e-40, NAN, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("operator", "with_nan", "one_two"),
    [
        ("eq", False, False),
        ("ne", False, True),
        ("lt", False, True),
        ("equ", True, False),
        ("neu", True, True),
        ("ltu", True, True),
        ("geu", True, False),
        ("nan", True, False),
        ("num", False, True),
    ],
)
def test_float_comparisons_with_nan(operator, with_nan, one_two):
    out = run_snippet(
        f"setp.{operator}.f32 %p, %a, %b; setp.{operator}.f32 %q, %c, %e;",
        inputs={
            "a": per_lane([NAN], np.float32),
            "b": per_lane([1.0], np.float32),
            "c": per_lane([1.0], np.float32),
            "e": per_lane([2.0], np.float32),
        },
        outputs={"p": bool, "q": bool},
    ).outputs
    assert bool(out["p"][0]) is with_nan and bool(out["q"][0]) is one_two


def nearest(value: Fraction, mode: str = "rn") -> float:
    """Rounds an exact value to float32."""
    low = np.float32(float(value))
    candidates = [
        np.nextafter(low, np.float32(-np.inf)),
        low,
        np.nextafter(low, np.float32(np.inf)),
    ]
    exact = [(Fraction(float(c)), c) for c in candidates]
    if mode == "rz":
        mode = "rm" if value >= 0 else "rp"
    if mode == "rm":
        return float(max(c for f, c in exact if f <= value))
    if mode == "rp":
        return float(min(c for f, c in exact if f >= value))
    return float(min(exact, key=lambda e: (abs(e[0] - value), e[1].view(np.uint32) & 1))[1])


RNG = np.random.default_rng(7)
X, Y, Z = (
    (RNG.standard_normal(32) * 10.0 ** RNG.integers(-6, 6, 32)).astype(np.float32) for _ in range(3)
)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float_rounding_modes(mode):
    out = run_snippet(
        f"add.{mode}.f32 %s, %x, %y; mul.{mode}.f32 %m, %x, %y; fma.{mode}.f32 %f, %x, %y, %z;",
        inputs={"x": X, "y": Y, "z": Z},
        outputs=dict.fromkeys("smf", np.float32),
    ).outputs
    for i in range(32):
        x, y, z = (Fraction(float(v[i])) for v in (X, Y, Z))
        assert out["s"][i] == nearest(x + y, mode)
        assert out["m"][i] == nearest(x * y, mode)
        assert out["f"][i] == nearest(x * y + z, mode)


def test_fma_rounds_once():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: with -1 the last term survives only if rounding is fused;
    # adding 2^-60 to a tie decides its direction only if rounding happens once.
    x = per_lane([1 + 2.0**-12, 1 + 2.0**-12], np.float32)
    z = per_lane([-1.0, 2.0**-60], np.float32)
    out = run_snippet(
        "fma.rn.f32 %o, %x, %x, %z;", inputs={"x": x, "z": z}, outputs={"o": np.float32}
    ).outputs["o"]
    assert out[0] == 2.0**-11 + 2.0**-24
    assert out[1] == np.float32(1 + 2.0**-11 + 2.0**-23)


def test_flush_to_zero():
    out = run_snippet(
        "add.ftz.f32 %f, %x, %z; add.f32 %k, %x, %z; mul.ftz.f32 %m, %y, %y;",
        inputs={
            "x": per_lane([1e-40, -1e-40], np.float32),
            "z": per_lane([-0.0], np.float32),
            "y": per_lane([1e-20], np.float32),
        },
        outputs=dict.fromkeys("fkm", np.float32),
    ).outputs
    assert out["f"][0] == 0 and not np.signbit(out["f"][0])
    assert out["f"][1] == 0 and np.signbit(out["f"][1])
    assert out["k"][0] == np.float32(1e-40)
    assert out["m"][0] == 0


def test_minimum_and_maximum_of_nan_and_zeros():
    a = per_lane([NAN, 1.0, -0.0, 0.0, -0.0], np.float32)
    b = per_lane([1.0, NAN, 0.0, -0.0, -0.0], np.float32)
    out = run_snippet(
        "max.f32 %x, %a, %b; max.NaN.f32 %y, %a, %b; min.f32 %z, %a, %b;",
        inputs={"a": a, "b": b},
        outputs=dict.fromkeys("xyz", np.float32),
    ).outputs
    assert out["x"][:2].tolist() == [1.0, 1.0] and np.isnan(out["y"][:2]).all()
    assert np.signbit(out["x"][2:5]).tolist() == [False, False, True]
    assert np.signbit(out["z"][2:5]).tolist() == [True, True, True]


def test_approximations_are_correctly_rounded():
    x = np.abs(X).clip(1e-6, 50).astype(np.float32)
    out = run_snippet(
        "ex2.approx.ftz.f32 %e, %x; lg2.approx.f32 %l, %x; rcp.approx.ftz.f32 %r, %x;"
        " rsqrt.approx.f32 %s, %x; sqrt.rn.f32 %q, %x;",
        inputs={"x": x},
        outputs=dict.fromkeys("elrsq", np.float32),
    ).outputs
    wide = x.astype(np.float64)
    for name, expected in (
        ("e", 2.0**wide),
        ("l", np.log2(wide)),
        ("r", 1 / wide),
        ("s", wide**-0.5),
        ("q", wide**0.5),
    ):
        assert out[name].tolist() == expected.astype(np.float32).tolist()
    special = run_snippet(
        "ex2.approx.ftz.f32 %e, %x; rcp.approx.ftz.f32 %r, %x; lg2.approx.ftz.f32 %l, %x;",
        inputs={"x": per_lane([-np.inf, np.inf, 0.0, -0.0, -200.0], np.float32)},
        outputs=dict.fromkeys("erl", np.float32),
    ).outputs
    assert special["e"][:5].tolist() == [0, np.inf, 1, 1, 0]
    assert special["r"][:4].tolist() == [0, 0, np.inf, -np.inf]
    assert special["l"][2] == -np.inf


def test_packed_pairs():
    pair = np.stack([X, Y], axis=1).view(np.uint64)[:, 0]
    other = np.stack([Z, X], axis=1).view(np.uint64)[:, 0]
    out = run_snippet(
        "fma.rn.f32x2 %f, %a, %b, %a; add.rn.ftz.f32x2 %s, %a, %b; mul.rn.f32x2 %m, %a, %b;",
        inputs={"a": pair, "b": other},
        outputs=dict.fromkeys("fsm", np.uint64),
    ).outputs
    for i in range(32):
        x, y, z = (Fraction(float(v[i])) for v in (X, Y, Z))
        low, high = struct.unpack("<ff", int(out["f"][i]).to_bytes(8, "little"))
        assert low == nearest(x * z + x) and high == nearest(y * x + y)
        low, high = struct.unpack("<ff", int(out["s"][i]).to_bytes(8, "little"))
        assert low == nearest(x + z) and high == nearest(y + x)
    halves = np.stack([X, Y], axis=1).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]
    out = run_snippet(
        "fma.rn.bf16x2 %f, %a, %a, %a; max.bf16x2 %m, %a, %b;",
        inputs={"a": halves, "b": halves[::-1].copy()},
        outputs={"f": np.uint32, "m": np.uint32},
    ).outputs
    values = halves.view(ml_dtypes.bfloat16).astype(np.float64)
    expected = (values * values + values).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert (out["f"].view(ml_dtypes.bfloat16) == expected).mean() > 0.95  # float32 rounds twice
    reverse = halves[::-1].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    assert (out["m"].view(ml_dtypes.bfloat16) == np.maximum(values, reverse)).all()
