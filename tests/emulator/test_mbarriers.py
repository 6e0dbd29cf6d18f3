"""mbarriers by the ISA: opaque states, dropped arrivals, transactions, relaxed operations."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash.emulator.errors import BarrierFault, DataRace, Deadlock, PtxError
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=1),
    Schedule(order="starve", landing="lazy", starved=0, seed=3),
    Schedule(order="starve", landing="lazy", starved=1, seed=3),
]
INIT = """
    setp.eq.b32 %p1, %thread, 0;
    @%p1 mbarrier.init.shared.b64 [%shared], COUNT;
    bar.sync 0;
"""


def run(body: str, count: int = 1, **options):
    options = {"shared_bytes": 128, **options}
    return run_snippet(INIT.replace("COUNT", str(count)) + body, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_names_the_phase_of_its_arrival(schedule: Schedule):
    """64 threads arrive and wait with their own states, three phases in a row."""
    phase = """
    st.shared.b32 [%r1], %r3;
    mbarrier.arrive.shared.b64 %d1, [%shared];
AGAIN{0}:
    mbarrier.try_wait.shared.b64 %p2, [%shared], %d1;
    @!%p2 bra AGAIN{0};
    ld.shared.b32 %r4, [%r2];
    add.s32 %o, %o, %r4;
    bar.sync 0;
    add.s32 %r3, %r3, 1000;
"""
    body = "shl.b32 %r1, %thread, 2; add.s32 %r1, %r1, %shared; add.s32 %r1, %r1, 256;"
    body += "xor.b32 %r2, %r1, 128; mov.b32 %r3, %thread; mov.b32 %o, 0;"
    body += "".join(phase.format(i) for i in range(3))
    out = run(
        body,
        64,
        outputs={"o": np.uint32},
        threads=64,
        shared_bytes=512,
        schedule=schedule,
    ).outputs["o"]
    assert out.tolist() == [3 * (t ^ 32) + 3000 for t in range(64)]


def test_states_of_complete_and_incomplete_phases():
    body = (
        "@%p1 mbarrier.arrive.shared.b64 %d1, [%shared];"
        "@!%p1 mbarrier.arrive.shared.b64 %d2, [%shared], 1;"
        " selp.b64 %d1, %d1, %d2, %p1;"
        " mbarrier.pending_count.b64 %n, %d1;"
        " mbarrier.test_wait.shared.b64 %done, [%shared], %d1;"
        " @%p1 mbarrier.arrive.shared.b64 %d3, [%shared];"
        " @!%p1 mov.b64 %d3, %d1;"
        " mbarrier.test_wait.shared.b64 %next, [%shared], %d3;"
    )
    body = "mov.b64 %d1, 0; mov.b64 %d2, 0;" + body
    out = run(body, 32, outputs={"n": np.uint32, "done": bool, "next": bool}).outputs
    assert sorted(out["n"]) == list(range(1, 33))  # each saw one arrival less to come
    assert out["done"].all()
    assert not out["next"][0] and out["next"][1:].all()


def test_dropped_arrivals_are_not_expected_again():
    """Of 32 lanes 31 drop out in the first phase; then one arrival completes a phase."""
    body = (
        "@%p1 mbarrier.arrive.shared.b64 _, [%shared];"
        "@!%p1 mbarrier.arrive_drop.shared.b64 _, [%shared];"
        " mbarrier.test_wait.parity.shared.b64 %a, [%shared], 0;"
        " mbarrier.test_wait.parity.shared.b64 %b, [%shared], 1;"
        " @%p1 mbarrier.arrive.shared.b64 _, [%shared];"
        " mbarrier.test_wait.parity.shared.b64 %c, [%shared], 1;"
    )
    out = run(body, 32, outputs=dict.fromkeys("abc", bool)).outputs
    assert [bool(out[n].all()) for n in "abc"] == [True, False, True]
    dropped = "@%p1 mbarrier.arrive_drop.shared.b64 _, [%shared];"
    with pytest.raises(BarrierFault, match="more than are"):
        run(dropped + dropped)


def test_arrivals_that_must_not_complete():
    run("@%p1 mbarrier.arrive.noComplete.shared.b64 %d1, [%shared], 2;", 3)
    with pytest.raises(BarrierFault, match="noComplete would complete"):
        run("@%p1 mbarrier.arrive.noComplete.shared.b64 %d1, [%shared], 3;", 3)


def test_transactions_hold_a_phase_open():
    body = (
        "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%shared], 48;"
        " @%p1 mbarrier.arrive.shared.b64 _, [%shared];"
        " mbarrier.test_wait.parity.shared.b64 %a, [%shared], 0;"
        " @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%shared], 32;"
        " mbarrier.test_wait.parity.shared.b64 %b, [%shared], 0;"
        " @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%shared], 16;"
        " mbarrier.test_wait.parity.shared.b64 %c, [%shared], 0;"
    )
    out = run(body, outputs=dict.fromkeys("abc", bool)).outputs
    assert [bool(out[n].all()) for n in "abc"] == [False, False, True]


def test_invalidated_mbarriers_are_plain_memory():
    body = "@%p1 mbarrier.inval.shared.b64 [%shared]; @%p1 st.shared.b64 [%shared], 5;"
    run(body + "ld.shared.b64 %d1, [%shared];")
    with pytest.raises(BarrierFault, match="not initialised"):
        run(body + "@%p1 mbarrier.arrive.shared.b64 _, [%shared];")
    busy = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%shared], 48;"
    with pytest.raises(BarrierFault, match="while copies complete"):
        run(busy + body)


# Warp 1 writes a word and arrives; warp 0 waits and reads it.
EXCHANGE = """
    add.s32 %r3, %shared, 64; mov.b32 %o, 0;
    setp.ge.u32 %p3, %thread, 32;
    @%p3 bra WRITER;
AGAIN:
    mbarrier.try_wait.parity.ACQUIRE.cta.shared.b64 %p2, [%shared], 0;
    @!%p2 bra AGAIN;
    AFTER
    ld.shared.b32 %o, [%r3];
    bra END;
WRITER:
    setp.eq.b32 %p4, %lane, 5;
    @%p4 st.shared.b32 [%r3], 77;
    BEFORE
    @%p4 mbarrier.arrive.RELEASE.cta.shared.b64 _, [%shared];
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("acquire", "after", "before", "release", "ordered"),
    [
        ("acquire", "", "", "release", True),
        ("acquire", "", "fence.acq_rel.cta;", "relaxed", True),
        ("relaxed", "fence.acq_rel.cta;", "", "release", True),
        ("relaxed", "fence.acquire.cta;", "fence.release.cta;", "relaxed", True),
        ("acquire", "", "", "relaxed", False),
        ("relaxed", "", "", "release", False),
        ("acquire", "", "membar.cta;", "relaxed", True),
    ],
)
def test_relaxed_operations_order_nothing_without_a_fence(
    acquire: str, after: str, before: str, release: str, ordered: bool, schedule: Schedule
):
    body = EXCHANGE.replace("ACQUIRE", acquire).replace("RELEASE", release)
    body = body.replace("AFTER", after).replace("BEFORE", before)

    def read() -> list[int]:
        out = run(body, outputs={"o": np.uint32}, threads=64, schedule=schedule)
        return out.outputs["o"][:32].tolist()

    if ordered:
        assert read() == [77] * 32
    else:
        with pytest.raises(DataRace):
            read()


REMOTE = """
    mov.u32 %r4, %cluster_ctarank;
    xor.b32 %r5, %r4, 1;
    mapa.shared::cluster.u32 %r6, %shared, %r5;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    add.s32 %r7, %r6, 64;
    setp.eq.b32 %p3, %thread, 3;
    add.s32 %r8, %r4, 10;
    @%p3 st.shared::cluster.b32 [%r7], %r8;
    @%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%shared], 0;
    @!%p2 bra AGAIN;
    ld.shared.b32 %r9, [%shared+64];
    mul.wide.u32 %d1, %r4, 4;
    add.s64 %d1, %d1, %g;
    st.global.b32 [%d1], %r9;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_arrive_on_each_others_mbarriers(schedule: Schedule):
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "schedule": schedule}
    out = run(REMOTE, buffers={"g": np.zeros(2, np.uint32)}, **launch)
    assert out.buffers["g"].tolist() == [11, 10]
    with pytest.raises(Deadlock, match="1 of 2 arrivals"):
        run(REMOTE, 2, buffers={"g": np.zeros(2, np.uint32)}, **launch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_arrive_in_different_blocks(schedule: Schedule):
    """Lane i of block 0 arrives at block i: each block's phase needs this one arrival."""
    body = """
    mov.u32 %r4, %cluster_ctarank;
    mapa.shared::cluster.u32 %r6, %shared, %lane;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.lt.u32 %p3, %lane, 2;
    setp.eq.and.b32 %p3, %r4, 0, %p3;
    @%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%shared], 0;
    @!%p2 bra AGAIN;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    run(body, grid=(2, 1, 1), cluster=(2, 1, 1), schedule=schedule)
    with pytest.raises(Deadlock, match="1 of 1 arrivals"):
        run(body.replace("%lane, 2;", "%lane, 1;"), grid=(2, 1, 1), cluster=(2, 1, 1))


def test_expected_bytes_need_a_number():
    with pytest.raises(PtxError, match="needs a number of bytes"):
        run("mbarrier.arrive.expect_tx.shared.b64 _, [%shared];")
