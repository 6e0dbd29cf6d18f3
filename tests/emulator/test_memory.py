"""Loads, stores, atomics, and the faults of addresses."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash.emulator.errors import (
    Deadlock,
    Misaligned,
    OutOfBounds,
    RegisterFault,
    UninitialisedRead,
)
from jax_flash.emulator.machine import Checks
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

LANE = np.arange(32, dtype=np.uint32)
AT_LANE = "mul.wide.u32 %d1, %lane, 4; add.s64 %d1, %d1, %g; "
SHARED_LANE = "shl.b32 %r1, %lane, 2; add.s32 %r1, %r1, %shared; "


def test_loads_and_stores_of_every_width():
    data = np.arange(64, dtype=np.uint32) * 0x01010101
    out = run_snippet(
        AT_LANE + "ld.global.b32 %a, [%d1]; ld.global.v2.b32 {%b, %c}, [%g+8];"
        " ld.global.u8 %e, [%g+5]; ld.global.s8 %f, [%g+515]; ld.global.b64 %h, [%g+16];"
        " ld.global.v4.b32 {%i, %j, %k, %l}, [%g+32]; ld.global.nc.L1::no_allocate.u16 %m, [%g+6];"
        " mul.wide.u32 %d2, %lane, 8; add.s64 %d2, %d2, %s; st.global.v2.b32 [%d2], {%a, %a};",
        outputs={**dict.fromkeys("abcefijkl", np.uint32), "h": np.uint64, "m": np.uint16},
        buffers={"g": np.concatenate([data, np.full(70, 0x80808080, np.uint32)]), "s": data},
    )
    got = out.outputs
    assert (got["a"] == data[:32]).all() and got["b"][0] == data[2] and got["c"][0] == data[3]
    assert got["e"][0] == 1 and got["f"][0] == 0xFFFFFF80 and got["h"][0] == 0x0505050504040404
    assert [got[n][0] for n in "ijkl"] == data[8:12].tolist() and got["m"][0] == 0x0101
    assert (out.buffers["s"].reshape(32, 2) == data[:32, None]).all()
    assert out.statistics.traffic["global write by warps"] > 32 * 8


def test_shared_and_generic_addresses_name_the_same_memory():
    out = run_snippet(
        SHARED_LANE + "st.shared.b32 [%r1], %a; bar.sync 0; cvt.u64.u32 %d1, %r1;"
        " cvta.shared.u64 %d2, %d1; ld.b32 %b, [%d2]; mapa.shared::cluster.u32 %r2, %r1, 0;"
        " ld.shared::cluster.b32 %c, [%r2]; isspacep.shared %p, %d2;",
        inputs={"a": LANE * 3},
        outputs={"b": np.uint32, "c": np.uint32, "p": bool},
        shared_bytes=128,
    ).outputs
    assert (out["b"] == LANE * 3).all() and (out["c"] == LANE * 3).all() and out["p"].all()


def test_reductions_and_atomics():
    out = run_snippet(
        "red.relaxed.gpu.global.add.f32 [%g], %x; red.global.add.v4.f32 [%v], {%x, %x, %x, %x};"
        " atom.global.add.u32 %o, [%c], 2; atom.global.cas.b32 %s, [%c+4], 7, 9;"
        " atom.global.exch.b32 %e, [%c+8], %lane; red.global.max.s32 [%c+12], %lane;"
        " red.global.inc.u32 [%c+16], 10;",
        inputs={"x": np.full(32, 0.5, np.float32)},
        outputs={"o": np.uint32, "s": np.uint32, "e": np.uint32},
        buffers={
            "g": np.zeros(1, np.float32),
            "v": np.zeros(4, np.float32),
            "c": np.array([10, 7, 99, 3, 0], np.int32),
        },
    )
    assert out.buffers["g"][0] == 16 and (out.buffers["v"] == 16).all()
    assert sorted(out.outputs["o"]) == list(range(10, 74, 2)) and out.buffers["c"][0] == 74
    assert sorted(out.outputs["s"])[:2] == [7, 9] and out.buffers["c"][1] == 9
    # The exchanges form a chain: every value but the last is returned once.
    assert sorted([*out.outputs["e"], out.buffers["c"][2]]) == sorted([99, *range(32)])
    assert out.buffers["c"][3] == 31 and out.buffers["c"][4] == 32 % 11


@pytest.mark.parametrize(
    ("body", "fault", "words"),
    [
        ("ld.global.b32 %r2, [%g+256];", OutOfBounds, "offset 256 of g"),
        ("ld.global.b32 %r2, [%g+-4];", OutOfBounds, "belongs to no buffer"),
        ("st.global.b32 [%g+2], 0;", Misaligned, "multiple of 4"),
        ("ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%g+8];", Misaligned, "multiple of 16"),
        ("ld.shared.b32 %r2, [%shared];", UninitialisedRead, "never written"),
        ("st.shared.b32 [%shared+1024], 0;", OutOfBounds, "shared memory of block 0"),
        ("mov.b32 %r1, 8; ld.shared.b32 %r2, [%r1];", OutOfBounds, "below the block's memory"),
        ("mov.b64 %d1, 64; ld.global.b32 %r2, [%d1];", OutOfBounds, "belongs to no buffer"),
        ("add.s32 %r2, %r1, 1;", RegisterFault, "%r1 is read before"),
        ("mov.b32 %r2, %r1; add.s32 %r3, %r2, 1;", RegisterFault, "%r2 is read before"),
        ("setp.eq.b32 %p1, %lane, 0; @%p1 mov.b32 %r1, 0; add.s32 %r2, %r1, 1;", RegisterFault, ""),
    ],
)
def test_bad_accesses_are_reported_with_their_place(body, fault, words):
    with pytest.raises(fault) as error:
        run_snippet(body, buffers={"g": np.zeros(64, np.uint32)}, shared_bytes=1024)
    assert words in str(error.value)
    assert "warp 0 of block 0, line" in str(error.value)


def test_polling_a_value_that_nobody_changes_is_a_deadlock():
    body = """
AGAIN:
    ld.acquire.gpu.global.b32 %r1, [%g];
    setp.eq.b32 %p1, %r1, 0;
    @%p1 bra AGAIN;
"""
    with pytest.raises(Deadlock, match="a change of memory"):
        run_snippet(body, buffers={"g": np.zeros(1, np.uint32)})


def test_a_warp_sees_what_it_polls_for():
    body = """
    setp.lt.u32 %p1, %thread, 32;
    @%p1 bra AGAIN;
    st.release.gpu.global.b32 [%g], 5;
    bra END;
AGAIN:
    ld.acquire.gpu.global.b32 %o, [%g];
    setp.eq.b32 %p2, %o, 0;
    @%p2 bra AGAIN;
END:
    mov.b32 %o, 5;
"""
    for seed in range(4):
        out = run_snippet(
            body,
            outputs={"o": np.uint32},
            buffers={"g": np.zeros(1, np.uint32)},
            threads=64,
            schedule=Schedule(order="starve", starved=1, seed=seed),
        )
        assert out.buffers["g"][0] == 5


def passes_of(body: str) -> tuple[int, int]:
    """Returns the passes that one access of shared memory takes, and the fewest possible."""
    out = run_snippet(body, shared_bytes=8192, checks=Checks(bank_conflicts=True))
    counted = out.statistics.shared_passes
    return counted["passes"], counted["ideal passes"]


def test_bank_conflicts_are_counted():
    def store(stride: int, words: int) -> tuple[int, int]:
        vector = {1: "st.shared.b32 [%r1], 0;", 2: "st.shared.v2.b32 [%r1], {%r2, %r2};"}
        vector[4] = "st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};"
        place = f"mul.lo.s32 %r1, %lane, {stride}; add.s32 %r1, %r1, %shared; mov.b32 %r2, 0;"
        return passes_of(place + vector[words])

    assert store(4, 1) == (1, 1)  # one word a bank
    assert store(8, 1) == (2, 1)  # every second bank
    assert store(128, 1) == (32, 1)  # all in one bank
    assert store(0, 1) == (1, 1)  # one word for all
    # 8 and 16 bytes are served for 16 and 8 lanes at a time.
    assert store(8, 2) == (2, 2) and store(16, 2) == (4, 2)
    assert store(16, 4) == (4, 4) and store(128, 4) == (32, 4)


def test_bank_conflicts_of_matrix_moves():
    """Eight rows of 16 bytes: 128 bytes apart they meet in one place, a swizzle spreads them."""
    rows = "and.b32 %r2, %lane, 7; shl.b32 %r1, %r2, 7; add.s32 %r1, %r1, %shared;"
    swizzle = "shl.b32 %r3, %r2, 4; xor.b32 %r1, %r1, %r3;"
    store = "mov.b32 %r4, 0; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r4};"
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r1];"
    assert passes_of(rows + store) == (8, 1)
    assert passes_of(rows + swizzle + store) == (1, 1)
    assert passes_of(rows + store + load) == (16, 2)
    assert passes_of(rows + swizzle + store + load) == (2, 2)
