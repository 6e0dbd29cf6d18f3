"""`mma.sync` and `cp.async` against the PTX ISA's fragments and completion rules."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import DataRace, ProgramFault, UninitialisedRead
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

LANE = np.arange(32)
SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=0),
]


TYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize(
    ("name", "depth"),
    [("bf16", 16), ("f16", 16), ("bf16", 8), ("f16", 8), ("e4m3", 32), ("e5m2", 32), ("e4m3", 16)],
)
def test_mma(name: str, depth: int):
    """Figures "MMA .m16n8kK fragment layout" of A, B and C, element by element.

    A register holds neighbours along K, those of four lanes side by side; the second half of K,
    where there is one, is in further registers.
    """
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((16, depth), (depth, 8)))
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    group, place = LANE // 4, LANE % 4
    each = 4 // TYPES[name].itemsize
    halves = depth // (4 * each)
    inputs = {}

    def packed(elements: list[np.ndarray]) -> np.ndarray:
        return np.stack(elements, axis=1).astype(TYPES[name]).view(np.uint32)[:, 0]

    for half in range(halves):
        depths = [each * place + e + 4 * each * half for e in range(each)]
        for i in range(2):
            inputs[f"a{2 * half + i}"] = packed([a[group + 8 * i, k] for k in depths])
        inputs[f"b{half}"] = packed([b[k, group] for k in depths])
    for register in range(4):
        inputs[f"c{register}"] = c[group + 8 * (register // 2), 2 * place + register % 2]

    def vector(letter: str, count: int) -> str:
        return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"

    out = run_snippet(
        f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{name}.{name}.f32 {vector('o', 4)},"
        f" {vector('a', 2 * halves)}, {vector('b', halves)}, {vector('c', 4)};",
        inputs=inputs,
        outputs={f"o{register}": np.float32 for register in range(4)},
    ).outputs
    want = a @ b + c
    for register in range(4):
        expected = want[group + 8 * (register // 2), 2 * place + register % 2]
        assert (out[f"o{register}"] == expected).all()


START = """
    mul.wide.u32 %d1, %thread, 16;
    add.s64 %d1, %d1, %g;
    shl.b32 %r1, %thread, 4;
    add.s32 %r1, %r1, %shared;
    xor.b32 %r2, %r1, 512;
    cp.async.cg.shared.global [%r1], [%d1], 16;
    cp.async.commit_group;
"""
DONE = "cp.async.wait_group 0; bar.sync 0;"
READ = "ld.shared.v4.b32 {%a, %b, %c, %e}, [%r2];"
DATA = np.arange(256, dtype=np.uint32)


def run(body: str, schedule: Schedule):
    return run_snippet(
        body,
        outputs=dict.fromkeys("abce", np.uint32),
        buffers={"g": DATA},
        threads=64,
        shared_bytes=2048,
        schedule=schedule,
    ).outputs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_thread_copies_arrive_when_waited_for(schedule):
    out = run(START + DONE + READ, schedule)
    for index, name in enumerate("abce"):
        assert out[name].tolist() == [4 * (t ^ 32) + index for t in range(64)]
    for weaker in ("bar.sync 0;", "cp.async.wait_group 0;", "cp.async.wait_group 1; bar.sync 0;"):
        with pytest.raises((DataRace, UninitialisedRead, ProgramFault)):
            run(START + weaker + READ, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_thread_copies_fill_with_zeros(schedule):
    body = START.replace("[%d1], 16;", "[%d1], 16, %r3;")
    body = "and.b32 %r3, %thread, 1; shl.b32 %r3, %r3, 3;" + body + DONE + READ
    out = run(body, schedule)
    for t in range(64):
        first = 4 * (t ^ 32) if t % 2 else 0
        assert [out[n][t] for n in "abce"] == ([first, first + 1, 0, 0] if t % 2 else [0] * 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_thread_copies_arrive_on_an_mbarrier(schedule):
    body = """
    setp.eq.b32 %p1, %thread, 0;
    add.s32 %r8, %shared, 1024;
    @%p1 mbarrier.init.shared.b64 [%r8], 64;
    bar.sync 0;
"""
    wait = """
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0;
    @!%p2 bra AGAIN;
"""
    copy = START.replace("cp.async.commit_group;", "")
    out = run(body + copy + wait + READ, schedule)
    assert out["a"].tolist() == [4 * (t ^ 32) for t in range(64)]


EXCHANGE = """
    mov.u32 %r4, %cluster_ctarank;
    xor.b32 %r5, %r4, 1;
    setp.eq.b32 %p1, %thread, 0;
    add.s32 %r8, %shared, 256;
    @%p1 mbarrier.init.shared.b64 [%r8], 1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], BYTES;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    shl.b32 %r1, %thread, 3;
    add.s32 %r1, %r1, %shared;
    mapa.shared::cluster.u32 %r6, %r1, %r5;
    mapa.shared::cluster.u32 %r7, %r8, %r5;
    mad.lo.s32 %r9, %r4, 100, %thread;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r6], {%r9, %r4}, [%r7];
    WAIT
    ld.shared.v2.b32 {%r10, %r11}, [%r1];
    mad.lo.s32 %r12, %r4, 32, %thread;
    mul.wide.u32 %d1, %r12, 8;
    add.s64 %d1, %d1, %g;
    st.global.v2.b32 [%d1], {%r10, %r11};
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
AWAIT = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0;
    @!%p2 bra AGAIN;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stores_to_another_block_count_on_its_mbarrier(schedule):
    def run_pair(text: str):
        return run_snippet(
            text,
            buffers={"g": np.zeros(128, np.uint32)},
            shared_bytes=512,
            grid=(2, 1, 1),
            cluster=(2, 1, 1),
            schedule=schedule,
        ).buffers["g"]

    got = run_pair(EXCHANGE.replace("BYTES", "256").replace("WAIT", AWAIT)).reshape(2, 32, 2)
    for rank in range(2):
        assert got[rank, :, 0].tolist() == [100 * (1 - rank) + t for t in range(32)]
        assert (got[rank, :, 1] == 1 - rank).all()
    with pytest.raises((DataRace, UninitialisedRead)):
        run_pair(EXCHANGE.replace("BYTES", "256").replace("WAIT", ""))
    with pytest.raises(ProgramFault):
        run_pair(EXCHANGE.replace("BYTES", "264").replace("WAIT", AWAIT))
