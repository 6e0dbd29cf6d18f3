"""Barriers, mbarriers, the register pool, fences and the race detector, on small programs."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash.emulator.errors import BarrierFault, DataRace, Deadlock, UninitialisedRead
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=1),
    Schedule(order="random", landing="lazy", seed=2),
    Schedule(order="starve", landing="lazy", starved=0, seed=3),
    Schedule(order="starve", landing="random", starved=1, seed=4),
]
PLACE = "shl.b32 %r1, %thread, 2; add.s32 %r1, %r1, %shared; xor.b32 %r2, %r1, 128; "
"""%r1: this thread's word; %r2: the word of the thread 32 away."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_makes_stores_visible(schedule):
    body = PLACE + "st.shared.b32 [%r1], %thread; bar.sync 0; ld.shared.b32 %o, [%r2];"
    out = run_snippet(
        body, outputs={"o": np.uint32}, threads=64, shared_bytes=256, schedule=schedule
    ).outputs["o"]
    assert out.tolist() == [t ^ 32 for t in range(64)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_barrier_stores_and_loads_race(schedule):
    body = PLACE + "st.shared.b32 [%r1], %thread; st.shared.b32 [%r2], %thread;"
    with pytest.raises(DataRace, match="conflicts with the write by warp"):
        run_snippet(body, threads=64, shared_bytes=256, schedule=schedule)


def test_a_write_after_an_unsynchronised_read_races():
    body = (
        PLACE + "st.shared.b32 [%r1], %thread; bar.sync 0; ld.shared.b32 %o, [%r2];"
        " st.shared.b32 [%r1], 0;"
    )
    with pytest.raises(DataRace, match=r"conflicts with the (read|write) by warp"):
        run_snippet(body, outputs={"o": np.uint32}, threads=64, shared_bytes=256)


def test_arrive_and_sync_order_one_direction():
    # Warp 1 arrives after its store; warp 0 waits before it reads.
    body = (
        PLACE + "setp.ge.u32 %p1, %thread, 32; mov.b32 %o, 0; @%p1 bra WRITER;"
        " bar.sync 3, 64; ld.shared.b32 %o, [%r2]; bra END;"
        " WRITER: st.shared.b32 [%r1], %thread; bar.arrive 3, 64; END:"
    )
    out = run_snippet(body, outputs={"o": np.uint32}, threads=64, shared_bytes=256).outputs["o"]
    assert out[:32].tolist() == list(range(32, 64))
    weak = body.replace("bar.arrive 3, 64; END:", "END:")
    with pytest.raises(Deadlock, match="barrier 3"):
        run_snippet(weak, outputs={"o": np.uint32}, threads=64, shared_bytes=256)


@pytest.mark.parametrize(
    ("body", "fault", "words"),
    [
        ("setp.lt.u32 %p1, %thread, 32; @%p1 bar.sync 0, 64;", Deadlock, "barrier 0"),
        ("bar.sync 1, 40;", BarrierFault, "multiple of 32"),
        ("bar.sync 17, 64;", BarrierFault, "a block has 16"),
        (
            "shr.u32 %r1, %thread, 5; shl.b32 %r1, %r1, 5; add.s32 %r1, %r1, 64; bar.sync 1, %r1;",
            BarrierFault,
            "by others with",
        ),
    ],
)
def test_barrier_counts_that_disagree(body, fault, words):
    with pytest.raises(fault) as error:
        run_snippet(body, threads=64)
    assert words in str(error.value)


def test_bytes_expected_at_the_end_of_a_block_are_noted():
    expect = "setp.eq.b32 %p5, %thread, 0;"
    expect += " @%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%shared], 64;"
    out = run_snippet(INIT.replace("COUNT", "1") + expect, shared_bytes=64)
    assert any("expects 64 bytes" in note for note in out.statistics.notes)


def test_arrivals_left_at_the_end_of_a_block_are_noted():
    out = run_snippet("setp.lt.u32 %p1, %thread, 32; @%p1 bar.arrive 1, 64;", threads=64)
    assert any("32 of 64 threads" in note for note in out.statistics.notes)


INIT = """
    setp.eq.b32 %p1, %thread, 0;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%shared], COUNT;
READY:
    bar.sync 0;
"""
WAIT = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%shared], PARITY;
    @!%p2 bra AGAIN;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mbarrier_phases_order_a_producer_and_a_consumer(schedule):
    # Warp 1 writes a word and arrives with every lane; warp 0 waits for the phase and reads it.
    body = (
        INIT.replace("COUNT", "32")
        + "add.s32 %r3, %shared, 64; mov.b32 %o, 0; setp.ge.u32 %p3, %thread, 32; @%p3 bra WRITER;"
        + WAIT.replace("PARITY", "0")
        + "ld.shared.b32 %o, [%r3]; bra END;"
        + "WRITER: setp.eq.b32 %p4, %lane, 5; @%p4 st.shared.b32 [%r3], 77;"
        + " mbarrier.arrive.shared.b64 %d1, [%shared]; END:"
    )
    out = run_snippet(
        body, outputs={"o": np.uint32}, threads=64, shared_bytes=128, schedule=schedule
    ).outputs["o"]
    assert out[:32].tolist() == [77] * 32
    early = body.replace(WAIT.replace("PARITY", "0"), "")
    with pytest.raises((DataRace, UninitialisedRead)):
        run_snippet(
            early, outputs={"o": np.uint32}, threads=64, shared_bytes=128, schedule=schedule
        )


def test_parity_of_the_phase_before_is_complete():
    out = run_snippet(
        INIT.replace("COUNT", "1")
        + "mbarrier.test_wait.parity.shared.b64 %a, [%shared], 1;"
        + " mbarrier.test_wait.parity.shared.b64 %b, [%shared], 0;"
        + " setp.eq.b32 %p3, %lane, 0; @%p3 mbarrier.arrive.shared.b64 _, [%shared];"
        + " mbarrier.test_wait.parity.shared.b64 %c, [%shared], 0;"
        + " mbarrier.test_wait.parity.shared.b64 %e, [%shared], 1;",
        outputs=dict.fromkeys("abce", bool),
        shared_bytes=64,
    ).outputs
    assert [bool(out[n].all()) for n in "abce"] == [True, False, True, False]


@pytest.mark.parametrize(
    ("body", "fault", "words"),
    [
        ("mbarrier.arrive.shared.b64 _, [%shared+8];", BarrierFault, "not initialised"),
        (
            INIT.replace("COUNT", "2") + "mbarrier.arrive.shared.b64 _, [%shared], 3;",
            BarrierFault,
            "more than are pending",
        ),
        (INIT.replace("COUNT", "0"), BarrierFault, "not in [1, 1048575]"),
        (INIT.replace("COUNT", "2") + WAIT.replace("PARITY", "0"), Deadlock, "2 of 2 arrivals"),
    ],
)
def test_mbarrier_faults(body, fault, words):
    with pytest.raises(fault) as error:
        run_snippet(body, shared_bytes=64, schedule=Schedule(order="round_robin"))
    assert words in str(error.value)


def test_a_phase_that_a_waiter_misses_is_reported():
    # Warp 0 waits for phase 0 while warp 1 completes phases 0 and 1.
    body = (
        INIT.replace("COUNT", "1")
        + "setp.ge.u32 %p3, %thread, 32; @%p3 bra WRITER;"
        + WAIT.replace("PARITY", "0")
        + "bra END; WRITER: setp.eq.b32 %p4, %lane, 0;"
        + " @%p4 mbarrier.arrive.shared.b64 _, [%shared];"
        + " @%p4 mbarrier.arrive.shared.b64 _, [%shared]; END:"
    )
    reports = 0
    for seed in range(12):
        try:
            run_snippet(
                body, threads=64, shared_bytes=64, schedule=Schedule(order="random", seed=seed)
            )
        except (BarrierFault, Deadlock) as fault:
            reports += "waiting warps have missed" in str(fault) or "parity" in str(fault)
    assert reports > 0


def test_registers_move_between_warps():
    body = (
        "setp.ge.u32 %p1, %thread, 32; @%p1 bra MORE; DEC setmaxnreg.dec.sync.aligned.u32 24;"
        " bra END; MORE: setmaxnreg.inc.sync.aligned.u32 200; END:"
    )
    run_snippet(body.replace("DEC", ""), threads=64, registers=112)
    with pytest.raises(Deadlock, match="free registers"):
        run_snippet(body.replace("DEC", "bra END;"), threads=64, registers=112)


CLUSTER = """
    mov.u32 %r4, %cluster_ctarank;
    shl.b32 %r1, %lane, 2;
    add.s32 %r1, %r1, %shared;
    xor.b32 %r5, %r4, 1;
    mapa.shared::cluster.u32 %r6, %r1, %r5;
    add.s32 %r7, %r4, 100;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    st.shared::cluster.b32 [%r6], %r7;
    SYNC
    ld.shared.b32 %r8, [%r1];
    mul.wide.u32 %d1, %r4, 4;
    add.s64 %d1, %d1, %g;
    st.global.b32 [%d1], %r8;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def test_blocks_of_a_cluster_reach_each_other():
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "shared_bytes": 128}
    buffers = {"g": np.zeros(2, np.uint32)}
    out = run_snippet(CLUSTER.replace("SYNC", SYNC), buffers=buffers, **launch)
    assert out.buffers["g"].tolist() == [101, 100]
    with pytest.raises((DataRace, UninitialisedRead)):
        run_snippet(CLUSTER.replace("SYNC", ""), buffers=buffers, **launch)


def test_groups_that_meet_after_a_wait_are_joined():
    """Lane 0 waits for another warp while the others already stand at the barrier after it."""
    body = (
        INIT.replace("COUNT", "1")
        + "setp.ge.u32 %p3, %thread, 32; @%p3 bra WRITER;"
        + "setp.ne.b32 %p4, %thread, 0; @%p4 bra MEET;"
        + "mbarrier.try_wait.parity.shared.b64 %p2, [%shared], 0; MEET:"
        + " bar.sync 1, 64; bra END;"
        + "WRITER: setp.eq.b32 %p5, %lane, 0;"
        + " @%p5 mbarrier.arrive.shared.b64 _, [%shared]; bar.sync 1, 64; END:"
    )
    for seed in range(20):
        for order in ("starve", "random"):
            schedule = Schedule(order=order, starved=0, seed=seed)
            run_snippet(body, threads=64, shared_bytes=64, schedule=schedule)
