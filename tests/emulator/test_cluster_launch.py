"""`clusterlaunchcontrol`: every cluster is worked on once, by itself or by another one."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash.emulator.errors import BarrierFault, DataRace, OutOfBounds, ProgramFault, PtxError
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=3),
    Schedule(order="random", landing="lazy", seed=4),
    Schedule(order="starve", landing="random", starved=0, seed=5),
]

# As in the ISA's example, in three dimensions: thread 0 of the first block of the cluster asks, all
# blocks wait for the answer and go on with the cancelled cluster's blocks, until one is refused.
BODY = """
    .reg .b128 %answer;
    setp.eq.b32 %p1, %thread, 0;
    mov.u32 %r9, %cluster_ctarank;
    setp.eq.and.b32 %p2, %r9, 0, %p1;
    add.s32 %r8, %shared, 16;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%shared], 1;
    fence.mbarrier_init.release.cluster;
READY:
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %ctaid.z;
    mov.b32 %r4, 0;
LOOP:
    mov.u32 %r5, %nctaid.y;
    mad.lo.s32 %r5, %r3, %r5, %r2;
    mov.u32 %r6, %nctaid.x;
    mad.lo.s32 %r5, %r5, %r6, %r1;
    mul.wide.u32 %d1, %r5, 4;
    add.s64 %d1, %d1, %count;
    @%p1 red.global.add.u32 [%d1], 1;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%shared], 16;
    @%p2 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytesCAST.b128
        [%r8], [%shared];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p3, [%shared], %r4;
    @!%p3 bra AGAIN;
    ld.shared.b128 %answer, [%r8];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %answer;
    @!%p4 bra DONE;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, %answer;
    add.s32 %r1, %r1, %r9;
    xor.b32 %r4, %r4, 1;
    fence.proxy.async.shared::cta;
    bra LOOP;
DONE:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
ALL = ".multicast::cluster::all"


def run_grid(body: str, grid: tuple[int, int, int], cluster: int, schedule: Schedule) -> np.ndarray:
    """Returns how often each block of the grid ``[z, y, x]`` was worked on."""
    out = run_snippet(
        body,
        buffers={"count": np.zeros(grid[::-1], np.uint32)},
        shared_bytes=32,
        grid=grid,
        cluster=(cluster, 1, 1),
        resident_clusters=2,
        schedule=schedule,
    )
    return out.buffers["count"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [(9, 1, 1), (4, 3, 2), (1, 1, 1)])
def test_every_block_is_worked_on_once(grid: tuple[int, int, int], schedule: Schedule):
    assert (run_grid(BODY.replace("CAST", ""), grid, 1, schedule) == 1).all()
    assert (run_grid(BODY.replace("CAST", ALL), grid, 1, schedule) == 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_blocks_of_a_cluster_receive_the_answer(schedule: Schedule):
    assert (run_grid(BODY.replace("CAST", ALL), (8, 3, 1), 2, schedule) == 1).all()


SINGLE_AXES = """
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %answer;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r2, %answer;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 %r3, %answer;
"""
VECTOR = (
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, %answer;"
)


def test_axes_alone_and_halves_of_the_answer():
    """The answer may be loaded as two 64-bit registers and packed, as CuTe-DSL does."""
    body = BODY.replace("CAST", ALL).replace(VECTOR, SINGLE_AXES)
    load = "ld.shared.v2.b64 {%d5, %d6}, [%r8]; mov.b128 %answer, {%d5, %d6};"
    body = body.replace("ld.shared.b128 %answer, [%r8];", load)
    assert (run_grid(body, (4, 3, 2), 2, SCHEDULES[1]) == 1).all()


def test_a_kernel_that_never_asks_is_launched_as_usual():
    body = BODY[: BODY.index("barrier.cluster.arrive.release")]
    assert (run_grid(body, (4, 2, 1), 2, SCHEDULES[1]) == 1).all()


ASK_AGAIN = "@!%p4 xor.b32 %r4, %r4, 1; @!%p4 bra LOOP;"


@pytest.mark.parametrize(
    ("old", "new", "fault", "words"),
    [
        ("[%r8], [%shared];", "[%r8+8], [%shared];", ProgramFault, "16-byte alignment"),
        ("@!%p4 bra DONE;", ASK_AGAIN, BarrierFault, "after it was seen to fail"),
        (VECTOR, VECTOR.replace("v4.b32", "b32"), PtxError, "v4"),
        (VECTOR, VECTOR.replace("get_first", "get_last"), PtxError, "is_canceled"),
        ("_, [%shared], 16;", "_, [%shared], 32;", ProgramFault, "16 bytes"),
        ("@%p2 clusterlaunch", "@%p1 clusterlaunch", ProgramFault, "bytes"),
        ("fence.mbarrier_init.release.cluster;", "", BarrierFault, "not visible to the async"),
        (
            "mbarrier.try_wait.parity.shared.b64 %p3, [%shared], %r4;\n    @!%p3 bra AGAIN;",
            "",
            ProgramFault,
            "",
        ),
        (
            "query_cancel.is_canceled.pred.b128 %p4, %answer;",
            "query_cancel.is_canceled.pred.b128 %p4, %answer; mov.b128 %answer, {%d1, %d1};",
            BarrierFault,
            "no answer of try_cancel",
        ),
    ],
)
def test_misuse_is_reported(old: str, new: str, fault: type[Exception], words: str):
    body = BODY.replace("CAST", ALL)
    assert old in body
    with pytest.raises(fault) as error:
        run_grid(body.replace(old, new), (8, 1, 1), 2, SCHEDULES[0])
    assert words in str(error.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_answer_that_others_may_still_read_is_not_overwritten_unnoticed(schedule: Schedule):
    """Without the cluster's barrier, the other block may still read the answer before."""
    body = BODY.replace("CAST", ALL)
    barrier = "barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;"
    assert barrier in body
    # One barrier stays: before the first request, both mbarriers must be there.
    body = body.replace(barrier, "").replace("LOOP:", barrier + "\nLOOP:")
    with pytest.raises((DataRace, BarrierFault)):
        run_grid(body, (8, 1, 1), 2, schedule)


def test_answers_go_to_the_own_block():
    body = BODY.replace("CAST", "").replace(
        "[%r8], [%shared];", "[%r8+16777216], [%shared+16777216];"
    )
    with pytest.raises(OutOfBounds, match="its own block"):
        run_grid(body, (8, 1, 1), 2, SCHEDULES[0])
