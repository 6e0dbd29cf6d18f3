"""128-bit registers, and atomics on every type, vector and state space."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import Misaligned, PtxError

from .snippet import run_snippet

BF16 = np.dtype(ml_dtypes.bfloat16)
LANE = np.arange(32, dtype=np.uint32)
AT_LANE = "mul.wide.u32 %d1, %lane, 16; add.s64 %d1, %d1, %g;"


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_loads_and_stores_of_128_bits(space: str):
    words = np.arange(128, dtype=np.uint32) * 0x01010101
    if space == "shared":
        move = """
            shl.b32 %r1, %lane, 4; add.s32 %r1, %r1, %shared;
            st.shared.b128 [%r1], %w; ld.shared.b128 %v, [%r1];"""
    else:
        word = ".global" if space == "global" else ""
        move = f"st{word}.b128 [%d1+512], %w; ld{word}.b128 %v, [%d1+512];"
    out = run_snippet(
        f".reg .b128 %w, %v; {AT_LANE} ld.global.b128 %w, [%d1]; {move}"
        "mov.b128 {%a, %b}, %v; mov.b128 %w, {%b, %a}; st.global.b128 [%d1+1024], %w;",
        outputs={"a": np.uint64, "b": np.uint64},
        buffers={"g": np.concatenate([words, np.zeros(256, np.uint32)])},
        shared_bytes=512,
    )
    halves = words.view(np.uint64).reshape(32, 2)
    assert (out.outputs["a"] == halves[:, 0]).all() and (out.outputs["b"] == halves[:, 1]).all()
    swapped = out.buffers["g"][256:].view(np.uint64).reshape(32, 2)
    assert (swapped == halves[:, ::-1]).all()


def test_128_bits_need_their_alignment():
    with pytest.raises(Misaligned, match="multiple of 16"):
        run_snippet(
            ".reg .b128 %w; ld.global.b128 %w, [%g+8];", buffers={"g": np.zeros(64, np.uint32)}
        )


def test_exchange_and_swap_of_128_bits():
    """Lanes are served in order: each receives what the one before it wrote."""
    body = """
        .reg .b128 %w, %v, %x;
        cvt.u64.u32 %d2, %lane; add.s64 %d3, %d2, 100;
        mov.b128 %w, {%d2, %d3};
        atom.global.exch.b128 %v, [%g], %w;
        mov.b128 {%a, %b}, %v;
        setp.eq.b32 %p1, %lane, 3;
        mov.b64 %d4, 31; mov.b64 %d5, 131; mov.b64 %d6, 7;
        mov.b128 %x, {%d4, %d5}; mov.b128 %w, {%d6, %d6};
        @%p1 atom.global.cas.b128 %v, [%g], %x, %w;
        @%p1 atom.global.cas.b128 %v, [%g], %x, %x;
    """
    out = run_snippet(
        body,
        outputs={"a": np.uint64, "b": np.uint64},
        buffers={"g": np.array([500, 600], np.uint64)},
    )
    assert out.outputs["a"].tolist() == [500, *range(31)]
    assert out.outputs["b"].tolist() == [600, *range(100, 131)]
    assert out.buffers["g"].tolist() == [7, 7]
    with pytest.raises(PtxError, match="does not exist"):
        run_snippet(body.replace("exch.b128", "add.b128"), buffers={"g": np.zeros(2, np.uint64)})


HALVES = [("f16", np.dtype(np.float16)), ("bf16", BF16)]


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_reductions_of_halves(name: str, dtype: np.dtype):
    """Each sum is rounded: in bfloat16 1 + 2^-9 is 1, and 1 + 2^-7 is not."""
    out = run_snippet(
        "mul.wide.u32 %d2, %lane, 4; add.s64 %d2, %d2, %g; mov.b32 {%h1, %h2}, %x;"
        f" red.global.add.noftz.{name}x2 [%d2], %x; red.global.max.noftz.{name}x2 [%d2+128], %x;"
        f" red.global.min.noftz.{name} [%d2+256], %h2;",
        inputs={"x": np.tile(np.array([2.0**-9, -2.0], dtype), 32).view(np.uint32)},
        buffers={"g": np.ones((3, 32, 2), dtype).view(np.uint32)},
    )
    got = out.buffers["g"].view(dtype).reshape(3, 32, 2).astype(np.float64)
    one = 1.0 if dtype == BF16 else 1 + 2.0**-9
    assert (got[0] == [one, -1]).all()
    assert (got[1] == 1).all()
    assert (got[2] == [-2, 1]).all()


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_vectors_and_old_values_of_halves(name: str, dtype: np.dtype):
    x = np.tile(np.array([1, 2], dtype), 32).view(np.uint32)
    out = run_snippet(
        f"red.global.add.noftz.v2.{name}x2 [%g], {{%x, %x}};"
        f" atom.global.add.noftz.{name}x2 %o, [%g+8], %x;",
        inputs={"x": x},
        outputs={"o": np.uint32},
        buffers={"g": np.zeros(3, np.uint32)},
    )
    assert out.buffers["g"].view(dtype).astype(int).tolist() == [32, 64] * 3
    old = out.outputs["o"].view(dtype).reshape(32, 2).astype(int)
    assert (old == LANE[:, None] * [1, 2]).all()


@pytest.mark.parametrize(
    ("operation", "kind", "start", "operand", "expected"),
    [
        ("add", "u32", 5, 3, 5 + 32 * 3),
        ("add", "s32", 5, 2**32 - 3, 2**32 + 5 - 96),
        ("add", "u64", 5, 3, 101),
        ("min", "s32", 5, 2**32 - 3, 2**32 - 3),
        ("min", "u32", 5, 2**32 - 3, 5),
        ("max", "u64", 5, 9, 9),
        ("and", "b32", 12, 10, 8),
        ("or", "b32", 12, 10, 14),
        ("xor", "b32", 12, 10, 12),
        ("inc", "u32", 0, 10, 32 % 11),
        ("dec", "u32", 0, 10, -32 % 11),
        ("exch", "b32", 0, 10, 10),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared", ""])
def test_atomics_by_type_and_space(
    operation: str, kind: str, start: int, operand: int, expected: int, space: str
):
    """32 lanes on one place: by the ISA's definitions of the operations."""
    bits, register = int(kind[1:]), "%r" if kind[1:] == "32" else "%d"
    place = "%shared" if space == "shared" else "%g"
    name = f"{space}.{operation}.{kind}".lstrip(".")
    body = f"""
        setp.eq.b32 %p1, %lane, 0;
        mov.b{bits} {register}4, {start}; mov.b{bits} {register}5, {operand};
        @%p1 st.shared.b{bits} [%shared], {register}4;
        bar.warp.sync -1;
        atom.{name} {register}6, [{place}], {register}5;
        ld.shared.b{bits} {register}7, [%shared];
        @%p1 st.global.b{bits} [%g+8], {register}7;
    """
    dtype: Any = np.uint32 if bits == 32 else np.uint64
    buffer = np.zeros(16 // (bits // 8), dtype)
    buffer[0] = start
    out = run_snippet(body, buffers={"g": buffer}, shared_bytes=16).buffers["g"]
    result = out[8 // (bits // 8)] if space == "shared" else out[0]
    assert int(result) == expected % (1 << bits)
