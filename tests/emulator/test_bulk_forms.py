"""Forms of bulk copies: ranks, multicast, reductions, other blocks' memory, fills, prefetches."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import OutOfBounds, ProgramFault, PtxError
from jax_flash.emulator.machine import Launch, Machine
from jax_flash.emulator.memory import GlobalMemory
from jax_flash.emulator.parser import parse_ptx
from jax_flash.emulator.program import decode
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.tensor_map import TensorMap

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=0),
]
BF16 = np.dtype(ml_dtypes.bfloat16)
TILE = 16384
"""Bytes of shared memory for tiles; the mbarrier follows."""

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry copies(
    .param .align 64 .b8 map[128], .param .u64 source, .param .u64 result, .param .u32 bytes
)
.reqntid 32, 1, 1
{
    .reg .pred %p<8>;
    .reg .b16 %h<4>;
    .reg .b32 %r<32>;
    .reg .b64 %d<16>;
    mov.b32 %r1, dynamic;
    add.s32 %r2, %r1, 16384;
    mov.u32 %r3, %tid.x;
    mov.u32 %r20, %cluster_ctarank;
    setp.eq.b32 %p1, %r3, 0;
    mov.b64 %d1, map;
    cvta.param.u64 %d2, %d1;
    ld.param.b64 %d3, [source];
    ld.param.b64 %d4, [result];
    ld.param.b32 %r6, [bytes];
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r6;
READY:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
# Then the tile goes to the result, one result for each block of the cluster.
TAIL = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
    @!%p2 bra AGAIN;
    mad.lo.s32 %r7, %r20, %r6, 0;
    shl.b32 %r8, %r3, 2;
LOOP:
    setp.ge.u32 %p3, %r8, %r6;
    @%p3 bra DONE;
    add.s32 %r9, %r1, %r8;
    ld.shared.b32 %r10, [%r9];
    add.s32 %r11, %r8, %r7;
    cvt.u64.u32 %d5, %r11;
    add.s64 %d6, %d4, %d5;
    st.global.b32 [%d6], %r10;
    add.s32 %r8, %r8, 128;
    bra LOOP;
DONE:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ret; }
"""


def run(
    body: str,
    tensor: np.ndarray,
    tensor_map: dict | None = None,
    *,
    bytes_: int,
    blocks: int = 1,
    schedule: Schedule = SCHEDULES[0],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the results of the blocks ``[blocks, bytes]``, and the tensor afterwards."""
    memory = GlobalMemory()
    source = memory.allocate(tensor.nbytes, "tensor", tensor.reshape(-1).view(np.uint8))
    zeros = np.zeros(blocks * bytes_, np.uint8)
    result = memory.allocate(blocks * bytes_, "result", zeros)
    encoded = bytes(128)
    if tensor_map is not None:
        encoded = TensorMap(address=source, **tensor_map).encode()
    program = decode(parse_ptx(HEAD + body), "copies", allocate=lambda n, d: 0)
    launch = Launch(
        grid=(blocks, 1, 1),
        cluster=(blocks, 1, 1),
        threads=(32, 1, 1),
        parameters=encoded + struct.pack("<QQI", source, result, bytes_),
        dynamic_shared_bytes=TILE + 64,
    )
    Machine(program, launch, memory, schedule).run()
    out = memory.memory_at(result).bytes[: blocks * bytes_].copy().reshape(blocks, bytes_)
    after = memory.memory_at(source).bytes[: tensor.nbytes].copy().view(tensor.dtype)
    return out, after.reshape(tensor.shape)


EXTENTS = (16, 5, 4, 3, 2)
TENSOR = np.arange(np.prod(EXTENTS), dtype=np.float32).reshape(EXTENTS[::-1])
BOX = (8, 3, 2, 2, 2)
AT = (12, -1, 3, 1, -1)
"""The box sticks out at the upper end of dimensions 0, 2, 3 and the lower end of 1 and 4."""


def a_map(rank: int, **changes) -> dict:
    strides = [4 * int(np.prod(EXTENTS[:axis])) for axis in range(1, rank)]
    fields = {
        "dtype": "f32",
        "extents": EXTENTS[:rank],
        "strides": tuple(strides),
        "box": BOX[:rank],
    }
    return fields | changes


def expected_box(rank: int, fill: float) -> np.ndarray:
    """Element by element: coordinates in bounds, or the fill."""
    box = np.full(BOX[:rank][::-1], fill, np.float32)
    tensor = TENSOR[(0,) * (5 - rank)]
    for index in np.ndindex(*box.shape):
        place = tuple(AT[rank - 1 - axis] + i for axis, i in enumerate(index))
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            box[index] = tensor[place]
    return box


def load(rank: int, cast: str = "", tail: str = "") -> str:
    coordinates = ", ".join(str(c) for c in AT[:rank])
    return f"""
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast}
        [%r1], [%d2, {{{coordinates}}}], [%r2]{tail};
    """


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_loads_of_every_rank(rank: int, schedule: Schedule):
    size = 4 * int(np.prod(BOX[:rank]))
    out, _ = run(load(rank) + TAIL, TENSOR, a_map(rank), bytes_=size, schedule=schedule)
    assert (out[0].view(np.float32) == expected_box(rank, 0.0).reshape(-1)).all()


def test_fills_of_nan():
    size = 4 * int(np.prod(BOX))
    out, _ = run(load(5) + TAIL, TENSOR, a_map(5, fill_nan=True), bytes_=size)
    want = expected_box(5, np.nan).reshape(-1)
    assert np.array_equal(out[0].view(np.float32), want, equal_nan=True) and np.isnan(want).any()


STORED = """
    @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], %r6;
    shl.b32 %r8, %r3, 2;
FILL:
    setp.ge.u32 %p3, %r8, %r6;
    @%p3 bra FILLED;
    add.s32 %r9, %r1, %r8;
    cvt.u64.u32 %d5, %r8;
    add.s64 %d6, %d3, %d5;
    ld.global.b32 %r10, [%d6];
    st.shared.b32 [%r9], %r10;
    add.s32 %r8, %r8, 128;
    bra FILL;
FILLED:
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    @!%p1 bra STORED;
    STORE
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
STORED:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ret; }
"""
"""Brings the tensor's first bytes to shared memory, and from there back by STORE."""


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_stores_of_every_rank(rank: int):
    """The box is written with the tensor's first elements, in box order, where it is in bounds."""
    size = 4 * int(np.prod(BOX[:rank]))
    coordinates = ", ".join(str(c) for c in AT[:rank])
    store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
    store += f" [%d2, {{{coordinates}}}], [%r1];"
    _, after = run(STORED.replace("STORE\n", store), TENSOR, a_map(rank), bytes_=size)
    want = TENSOR.copy()
    inner = want[(0,) * (5 - rank)]
    for number, index in enumerate(np.ndindex(*BOX[:rank][::-1])):
        place = tuple(AT[rank - 1 - axis] + i for axis, i in enumerate(index))
        if all(0 <= p < n for p, n in zip(place, inner.shape, strict=True)):
            inner[place] = number
    assert (after == want).all()


@pytest.mark.parametrize(
    ("operation", "element", "dtype", "expected"),
    [
        ("add", "f32", np.dtype(np.float32), np.add),
        ("add", "f16", np.dtype(np.float16), np.add),
        ("add", "bf16", BF16, np.add),
        ("min", "s32", np.dtype(np.int32), np.minimum),
        ("max", "f16", np.dtype(np.float16), np.maximum),
        ("add", "u64", np.dtype(np.uint64), np.add),
        ("and", "u32", np.dtype(np.uint32), np.bitwise_and),
        ("or", "u32", np.dtype(np.uint32), np.bitwise_or),
        ("xor", "s32", np.dtype(np.int32), np.bitwise_xor),
        ("inc", "u32", np.dtype(np.uint32), lambda a, b: np.where(a >= b, 0, a + 1)),
        ("dec", "u32", np.dtype(np.uint32), lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
    ],
)
def test_tensor_reductions(operation, element, dtype, expected):
    """The first 64 elements are reduced into the second 64."""
    tensor = np.random.default_rng(1).integers(0, 50, 128).astype(dtype)
    body = STORED.replace(
        "STORE\n",
        f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{operation}.tile.bulk_group"
        " [%d2, {64}], [%r1];",
    )
    fields = {"dtype": element, "extents": (128,), "strides": (), "box": (64,)}
    _, after = run(body, tensor, fields, bytes_=64 * dtype.itemsize)
    want = expected(tensor[64:], tensor[:64]).astype(dtype)
    assert (after[:64] == tensor[:64]).all() and (after[64:] == want).all()


@pytest.mark.parametrize(
    ("operation", "element", "dtype", "expected"),
    [
        ("add.noftz", "bf16", BF16, np.add),
        ("add", "f64", np.dtype(np.float64), np.add),
        ("add", "s32", np.dtype(np.int32), np.add),
        ("min", "u64", np.dtype(np.uint64), np.minimum),
        ("xor", "b32", np.dtype(np.uint32), np.bitwise_xor),
        ("and", "b64", np.dtype(np.uint64), np.bitwise_and),
    ],
)
def test_flat_reductions(operation, element, dtype, expected):
    tensor = np.random.default_rng(2).integers(0, 50, 64).astype(dtype)
    size = 32 * dtype.itemsize
    store = (
        f"add.s64 %d7, %d3, {size}; cp.reduce.async.bulk.global.shared::cta.bulk_group."
        f"{operation}.{element} [%d7], [%r1], {size};"
    )
    _, after = run(STORED.replace("STORE\n", store), tensor, bytes_=size)
    want = expected(tensor[32:], tensor[:32]).astype(dtype)
    assert (after[:32] == tensor[:32]).all() and (after[32:] == want).all()


@pytest.mark.parametrize(("operation", "element"), [("min", "f32"), ("add", "b32"), ("inc", "s32")])
def test_reductions_that_do_not_exist(operation: str, element: str):
    store = (
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{element}"
        " [%d3], [%r1], 128;"
    )
    with pytest.raises(PtxError, match="does not exist"):
        run(STORED.replace("STORE\n", store), np.zeros(64, np.uint32), bytes_=128)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_goes_to_the_blocks_of_the_mask(schedule: Schedule):
    """Block 0 loads for blocks 1 and 3, block 1 for 0 and 2: the same offsets, own mbarriers."""
    size = 4 * int(np.prod(BOX[:2]))
    masks = "setp.eq.b32 %p4, %r20, 0; selp.b16 %h1, 10, 5, %p4; setp.lt.and.u32 %p1, %r20, 2, %p1;"
    cast = load(2, ".multicast::cluster", ", %h1")
    flat = f"""
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1], [%d3], {size}, [%r2], %h1;
    """
    for body, want in ((cast, expected_box(2, 0.0).reshape(-1)), (flat, TENSOR.reshape(-1)[:24])):
        out, _ = run(
            masks + body + TAIL, TENSOR, a_map(2), bytes_=size, blocks=4, schedule=schedule
        )
        assert (out.view(np.float32) == want).all()
    with pytest.raises(OutOfBounds, match=r"block [23] of the cluster"):
        run(masks + cast + TAIL, TENSOR, a_map(2), bytes_=size, blocks=2, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_to_another_blocks_shared_memory(schedule: Schedule):
    """Each block fills 96 bytes behind its tile, and copies them to the other block's tile."""
    body = """
    shl.b32 %r8, %r3, 2;
    add.s32 %r9, %r1, %r8;
    setp.lt.u32 %p4, %r3, 24;
    mad.lo.s32 %r10, %r20, 100, %r3;
    @%p4 st.shared.b32 [%r9+1024], %r10;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    xor.b32 %r11, %r20, 1;
    mapa.shared::cluster.u32 %r12, %r1, %r11;
    mapa.shared::cluster.u32 %r13, %r2, %r11;
    @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r12], [%r1+1024], %r6, [%r13];
    """
    run_pair = {"bytes_": 96, "blocks": 2, "schedule": schedule}
    out, _ = run(body + TAIL, TENSOR, **run_pair)
    assert (out.view(np.uint32) == [np.arange(100, 124), np.arange(24)]).all()
    with pytest.raises(ProgramFault):
        run(body.replace("[%r13]", "[%r2]") + TAIL, TENSOR, **run_pair)


def test_hints_and_prefetches_change_nothing():
    hint = """
    createpolicy.fractional.L2::evict_first.b64 %d8, 1.0;
    prefetch.param.tensormap [map];
    prefetch.global.L2::evict_last [%d3];
    prefetchu.L1 [%d3];
    applypriority.global.L2::evict_normal [%d3], 128;
    cp.async.bulk.prefetch.L2.global [%d3], 64;
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d2, {0, 0}];
    """.replace("b64 %d8, 1.0;", "b64 %d8;")
    size = 4 * int(np.prod(BOX[:2]))
    body = hint + load(2, ".L2::cache_hint", ", %d8") + TAIL
    out, _ = run(body, TENSOR, a_map(2), bytes_=size)
    assert (out[0].view(np.float32) == expected_box(2, 0.0).reshape(-1)).all()
    with pytest.raises(PtxError, match="modifier"):
        run("prefetch.global.L2.fast [%d3];" + body, TENSOR, a_map(2), bytes_=size)


READ_BACK = """
    cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r1+1024], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_groupREAD 0;
    ld.global.b32 %r10, [%d3];
    st.global.b32 [%d4], %r10;
    cp.async.bulk.wait_group 0;
"""


def test_a_read_is_not_yet_a_write():
    """`.read` lets the source be overwritten; only the full wait makes the destination new."""

    def seen(read: str, schedule: Schedule) -> int:
        body = STORED.replace("cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;", "")
        body = body.replace("[%r9], %r10;", "[%r9+1024], %r9;")
        body = body.replace("STORE\n", READ_BACK.replace("READ", read))
        out, _ = run(body, np.full(32, 7, np.uint32), bytes_=128, schedule=schedule)
        return int(out[0].view(np.uint32)[0])

    schedules = [
        Schedule(order="random", landing=k, seed=s) for k in ("lazy", "random") for s in (1, 2)
    ]
    assert all(seen("", schedule) == 1024 for schedule in schedules)
    early = {seen(".read", schedule) for schedule in schedules}
    assert 7 in early and early <= {7, 1024}
