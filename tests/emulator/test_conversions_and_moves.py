"""Conversions, packing, exchange between lanes, 8x8 matrices: expected values from the PTX ISA."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import ConvergenceFault, PtxError

from .snippet import per_lane, run_snippet

LANE = np.arange(32, dtype=np.uint32)


def one(instruction: str, a: np.ndarray, output) -> np.ndarray:
    return run_snippet(f"{instruction} %o, %a;", inputs={"a": a}, outputs={"o": output}).outputs[
        "o"
    ]


def test_float_to_integer_rounds_and_clamps():
    a = per_lane([2.5, 3.5, -2.5, -0.7, 1e10, -1e10, float("nan"), 0.5], np.float32)
    assert one("cvt.rni.s32.f32", a, np.int32)[:8].tolist() == [
        *(2, 4, -2, -1),
        *(2**31 - 1, -(2**31), 0, 0),
    ]
    assert one("cvt.rzi.s32.f32", a, np.int32)[:4].tolist() == [2, 3, -2, 0]
    assert one("cvt.rmi.s32.f32", a, np.int32)[:4].tolist() == [2, 3, -3, -1]
    assert one("cvt.rpi.s32.f32", a, np.int32)[:4].tolist() == [3, 4, -2, 0]
    assert one("cvt.rzi.u32.f32", a, np.uint32)[2:6].tolist() == [0, 0, 2**32 - 1, 0]


def test_integer_conversions_extend_and_truncate():
    a = per_lane([0x8001FFFE, 5], np.uint32)
    assert one("cvt.s64.s32", a, np.uint64)[0] == 0xFFFFFFFF8001FFFE
    assert one("cvt.u64.u32", a, np.uint64)[0] == 0x8001FFFE
    assert one("cvt.u16.u32", a, np.uint16)[0] == 0xFFFE
    assert one("cvt.s32.s16", per_lane([0xFFFE], np.uint16), np.uint32)[0] == 0xFFFFFFFE
    assert one("cvt.s32.s8", a, np.uint32)[0] == 0xFFFFFFFE  # low byte of a wider register
    assert one("cvt.sat.s16.s32", per_lane([70000, -70000], np.int32), np.int16)[:2].tolist() == [
        *(32767, -32768)
    ]
    assert one("cvt.rn.f32.s32", per_lane([16777217, -3], np.int32), np.float32)[:2].tolist() == [
        *(16777216.0, -3.0)
    ]
    assert one("cvt.rp.f32.u32", per_lane([16777217], np.uint32), np.float32)[0] == 16777218.0


def test_narrow_floats_round_to_nearest_even():
    # 1 + 2^-8 lies between bf16 neighbours 1 and 1 + 2^-7: a tie, to even.
    a = per_lane([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8], np.float32)
    got = one("cvt.rn.bf16.f32", a, np.uint16).view(ml_dtypes.bfloat16)[:4].astype(float)
    assert got.tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0]
    b = per_lane([1 + 2.0**-11, 1 + 3 * 2.0**-11, 70000.0, 2.0**-25], np.float32)
    got = one("cvt.rn.f16.f32", b, np.uint16).view(np.float16)[:4].astype(float)
    assert got.tolist() == [1.0, 1 + 2.0**-9, np.inf, 0.0]
    assert one("cvt.f32.bf16", per_lane([0x3FC0], np.uint16), np.float32)[0] == 1.5
    assert one("cvt.f32.f16", per_lane([0x3E00], np.uint16), np.float32)[0] == 1.5


def test_packed_conversion_puts_the_first_source_in_the_upper_half():
    out = run_snippet(
        "cvt.rn.bf16x2.f32 %x, %a, %b; cvt.rn.f16x2.f32 %y, %a, %b;"
        " cvt.rn.satfinite.e4m3x2.f32 %z, %a, %b; cvt.rn.f16x2.e4m3x2 %w, %z;"
        " cvt.rn.relu.bf16x2.f32 %v, %b, %c;",
        inputs={
            "a": per_lane([1.0], np.float32),
            "b": per_lane([1.5, 1000.0], np.float32),
            "c": per_lane([-2.0], np.float32),
        },
        outputs={"x": np.uint32, "y": np.uint32, "z": np.uint16, "w": np.uint32, "v": np.uint32},
    ).outputs
    assert out["x"][0] == 0x3F803FC0 and out["y"][0] == 0x3C003E00
    # e4m3: bias 7, 1.0 = 0x38, 1.5 = 0x3C, largest 448 = 0x7E.
    assert out["z"][0] == 0x383C and out["z"][1] == 0x387E
    assert out["w"].view(np.float16).reshape(32, 2)[1].tolist() == [448.0, 1.0]
    assert out["v"][0] == 0x3FC00000


def test_moves_pack_and_unpack():
    out = run_snippet(
        "mov.b64 %p, {%a, %b}; mov.b64 {%x, %y}, %p; mov.b32 {%s, %t}, %a; mov.b32 %q, {%t, %s};"
        " mov.b32 %f, 0f3FC00000; mov.b32 %n, -7;",
        inputs={"a": LANE * 0x10001 + 0x10000, "b": LANE ^ 0xFFFFFFFF},
        outputs={
            "p": np.uint64,
            "s": np.uint16,
            "t": np.uint16,
            "f": np.float32,
            "n": np.int32,
            **dict.fromkeys("xyq", np.uint32),
        },
    ).outputs
    a = LANE * 0x10001 + 0x10000
    assert (out["p"] == (a | (LANE ^ 0xFFFFFFFF).astype(np.uint64) << np.uint64(32))).all()
    assert (out["x"] == a).all() and (out["y"] == LANE ^ 0xFFFFFFFF).all()
    assert (out["s"] == (a & 0xFFFF)).all() and (out["t"] == a >> 16).all()
    assert (out["q"] == (a << 16 | a >> 16)).all()
    assert (out["f"] == 1.5).all() and (out["n"] == -7).all()


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("idx", 5, 31, lambda i: 5),
        ("idx", 3, 0x1C1F, lambda i: i & 28 | 3),  # segments of 4 lanes
        ("bfly", 1, 31, lambda i: i ^ 1),
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("up", 2, 0, lambda i: i - 2 if i >= 2 else i),
        ("down", 3, 31, lambda i: i + 3 if i + 3 <= 31 else i),
        ("down", 3, 0x181F, lambda i: i + 3 if i % 8 + 3 <= 7 else i),  # segments of 8
    ],
)
def test_shuffle(mode, b, c, source):
    out = run_snippet(
        f"shfl.sync.{mode}.b32 %o|%p, %a, {b}, {c}, -1;",
        inputs={"a": LANE * 100},
        outputs={"o": np.uint32, "p": bool},
    ).outputs
    assert out["o"].tolist() == [100 * source(i) for i in range(32)]
    if mode in ("up", "down"):
        assert out["p"].tolist() == [source(i) != i for i in range(32)]


def test_votes_and_reductions():
    out = run_snippet(
        "setp.ge.u32 %p1, %a, 30; vote.sync.any.pred %x, %p1, -1; vote.sync.all.pred %y, %p1, -1;"
        " vote.sync.ballot.b32 %b, %p1, -1; redux.sync.add.s32 %s, %a, -1;"
        " redux.sync.max.u32 %m, %a, -1; and.b32 %r1, %a, 1; match.any.sync.b32 %g, %r1, -1;"
        " activemask.b32 %k; elect.sync %l|%e, -1;",
        inputs={"a": LANE},
        outputs={"x": bool, "y": bool, "e": bool, **dict.fromkeys("bsmgkl", np.uint32)},
    ).outputs
    assert out["x"].all() and not out["y"].any()
    assert (out["b"] == 0xC0000000).all() and (out["s"] == 496).all() and (out["m"] == 31).all()
    assert out["g"][0] == 0x55555555 and out["g"][1] == 0xAAAAAAAA
    assert (out["k"] == 0xFFFFFFFF).all()
    assert out["e"].sum() == 1 and (out["l"] == np.argmax(out["e"])).all()


def test_shuffle_needs_all_members():
    body = "setp.lt.u32 %p1, %lane, 16; @%p1 shfl.sync.idx.b32 %o, %a, 0, 31, -1; mov.b32 %o, %a;"
    with pytest.raises(ConvergenceFault, match="part of the threads"):
        run_snippet(body, inputs={"a": LANE}, outputs={"o": np.uint32})


def test_threads_diverge_and_join():
    # Each lane counts down from its number; all meet again before the shuffle.
    body = """
    mov.b32 %o, 0;
    mov.b32 %r1, %a;
LOOP:
    setp.eq.b32 %p1, %r1, 0;
    @%p1 bra DONE;
    add.s32 %o, %o, %r1;
    add.s32 %r1, %r1, -1;
    bra LOOP;
DONE:
    shfl.sync.bfly.b32 %q, %o, 1, 31, -1;
"""
    out = run_snippet(body, inputs={"a": LANE}, outputs={"o": np.uint32, "q": np.uint32}).outputs
    sums = [i * (i + 1) // 2 for i in range(32)]
    assert out["o"].tolist() == sums
    assert out["q"].tolist() == [sums[i ^ 1] for i in range(32)]


def test_matrices_between_registers_and_shared_memory():
    # Row r of matrix m holds elements 100 m + 10 r + column, as in the ISA's fragment figure:
    # lane l of register m holds row l / 4, columns 2 (l % 4) and the next.
    rows = np.array([[100 * (i // 8) + 10 * (i % 8) + c for c in range(8)] for i in range(32)])
    data = rows.astype(np.uint16).view(np.uint32)  # (32, 4) words: lane i stores row i % 8 of i / 8
    body = """
    shl.b32 %r1, %lane, 4;
    add.s32 %r1, %r1, %shared;
    st.shared.v4.b32 [%r1], {%a, %b, %c, %e};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%w, %x, %y, %z}, [%r1];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%t}, [%r1];
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%w, %x, %y, %z};
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%u, %v}, [%r1];
    movmatrix.sync.aligned.m8n8.trans.b16 %s, %w;
"""
    out = run_snippet(
        body,
        inputs={name: data[:, i].copy() for i, name in enumerate("abce")},
        outputs=dict.fromkeys("wxyztuvs", np.uint32),
        shared_bytes=1024,
    ).outputs
    for m, name in enumerate("wxyz"):
        pairs = out[name].view(np.uint16).reshape(32, 2)
        for lane in range(32):
            first = 100 * m + 10 * (lane // 4) + 2 * (lane % 4)
            assert pairs[lane].tolist() == [first, first + 1]
    transposed = out["t"].view(np.uint16).reshape(32, 2)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        assert transposed[lane].tolist() == [10 * column + row, 10 * (column + 1) + row]
    assert (out["u"] == out["w"]).all() and (out["v"] == out["x"]).all()
    assert (out["s"] == out["t"]).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frob.b32 %r1, %r2;", "frob.b32 is not implemented"),
        ("add.q.s32 %r1, %r2, %r3;", "modifier .q is not implemented"),
        ("add.s32 %r1, %d1, %r3;", "b64 register"),
        ("mov.b32 %r1, %clock;", "special register %clock"),
        ("bra NOWHERE;", "unknown label"),
    ],
)
def test_what_is_unknown_is_an_error_that_names_it(text, words):
    with pytest.raises(PtxError, match=r"line 2[0-9]") as error:
        run_snippet(text)
    assert words in str(error.value)
