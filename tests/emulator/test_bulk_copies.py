"""Bulk and tensor copies: tiles, swizzles, bounds, completion, and what must be waited for."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from jax_flash.emulator.errors import (
    BarrierFault,
    DataRace,
    Misaligned,
    OutOfBounds,
    ProgramFault,
    PtxError,
)
from jax_flash.emulator.machine import Launch, Machine
from jax_flash.emulator.memory import GlobalMemory
from jax_flash.emulator.parser import parse_ptx
from jax_flash.emulator.program import decode
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.tensor_map import TensorMap
from jax_flash.emulator.tensor_map import decode as decode_map

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=0),
]

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry copies(
    .param .align 64 .b8 map[128], .param .u64 source, .param .u64 result, .param .u32 c0,
    .param .u32 c1, .param .u32 bytes
)
.reqntid 64, 1, 1
{
    .reg .pred %p<8>;
    .reg .b32 %r<32>;
    .reg .b64 %d<16>;
    mov.b32 %r1, dynamic;
    add.s32 %r2, %r1, 16384;
    mov.u32 %r3, %tid.x;
    setp.eq.b32 %p1, %r3, 0;
    mov.b64 %d1, map;
    cvta.param.u64 %d2, %d1;
    ld.param.b64 %d3, [source];
    ld.param.b64 %d4, [result];
    ld.param.b32 %r4, [c0];
    ld.param.b32 %r5, [c1];
    ld.param.b32 %r6, [bytes];
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
LOAD = """
    @!%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r6;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%d2, {%r4, %r5}], [%r2];
ISSUED:
"""
WAIT = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
    @!%p2 bra AGAIN;
"""
# Each thread copies 16 bytes at a time of the tile to the result, in shared-memory order.
COPY_OUT = """
    shl.b32 %r7, %r3, 4;
    add.s32 %r8, %r1, %r7;
    cvt.u64.u32 %d5, %r7;
    add.s64 %d6, %d4, %d5;
    mov.b32 %r13, 0;
LOOP:
    ld.shared.v4.b32 {%r9, %r10, %r11, %r12}, [%r8];
    st.global.v4.b32 [%d6], {%r9, %r10, %r11, %r12};
    add.s32 %r8, %r8, 1024;
    add.s64 %d6, %d6, 1024;
    add.s32 %r13, %r13, 1024;
    setp.lt.u32 %p3, %r13, %r6;
    @%p3 bra LOOP;
"""
# Fills the tile with its own byte offsets (in 4-byte words), then stores it as a tensor copy.
STORE = """
    shl.b32 %r7, %r3, 4;
    mov.b32 %r13, 0;
LOOP:
    add.s32 %r8, %r1, %r7;
    st.shared.v4.b32 [%r8], {%r7, %r7, %r7, %r7};
    add.s32 %r7, %r7, 1024;
    setp.lt.u32 %p3, %r7, %r6;
    @%p3 bra LOOP;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra STORED;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {%r4, %r5}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
STORED:
"""


def run(body: str, tensor: np.ndarray, box, at, *, swizzle=0, schedule=SCHEDULES[0], bytes_=None):
    """Runs a program on a 2-D tensor ``(rows, columns)`` of 16-bit words.

    Returns:
      The result buffer as bytes and the tensor afterwards.
    """
    memory = GlobalMemory()
    source = memory.allocate(tensor.nbytes, "tensor", tensor.reshape(-1).view(np.uint8))
    tile_bytes = 2 * box[0] * box[1]
    result = memory.allocate(tile_bytes, "result")
    tensor_map = TensorMap(
        address=source,
        dtype="u16",
        extents=(tensor.shape[1], tensor.shape[0]),
        strides=(2 * tensor.shape[1],),
        box=box,
        swizzle_bytes=swizzle,
    )
    size = tile_bytes if bytes_ is None else bytes_
    parameters = tensor_map.encode() + struct.pack("<QQiiI", source, result, *at, size)
    program = decode(parse_ptx(HEAD + body + "ret; }"), "copies", allocate=lambda n, d: 0)
    launch = Launch(
        grid=(1, 1, 1),
        threads=(64, 1, 1),
        parameters=parameters,
        dynamic_shared_bytes=16384 + 64,
    )
    Machine(program, launch, memory, schedule).run()
    out = memory.memory_at(result).bytes[:tile_bytes].copy()
    after = memory.memory_at(source).bytes[: tensor.nbytes].copy().view(np.uint16)
    return out, after.reshape(tensor.shape)


TENSOR = np.arange(40 * 72, dtype=np.uint16).reshape(40, 72)


def expected_tile(at, box) -> np.ndarray:
    """The box row by row, zeros outside: PTX ISA, "Tiled mode"."""
    tile = np.zeros((box[1], box[0]), np.uint16)
    for r in range(box[1]):
        for c in range(box[0]):
            row, column = at[1] + r, at[0] + c
            if 0 <= row < TENSOR.shape[0] and 0 <= column < TENSOR.shape[1]:
                tile[r, c] = TENSOR[row, column]
    return tile


# Chunks of 16 bytes of consecutive 128-byte lines, from the tables of "Swizzling modes": entry
# [line][place] is the chunk that is stored there.
TABLE_128 = [[place ^ line for place in range(8)] for line in range(8)]
TABLE_64 = [[place ^ (line % 4) for place in range(8)] for line in range(8)]
TABLE_32 = [[place ^ (line % 2) for place in range(8)] for line in range(8)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (-8, -2), (32, 30), (80, 0)])
def test_tiles_arrive_with_zeros_outside(at, schedule):
    box = (64, 16)
    out, _ = run(LOAD + WAIT + COPY_OUT, TENSOR, box, at, schedule=schedule)
    assert (out.view(np.uint16).reshape(16, 64) == expected_tile(at, box)).all()


@pytest.mark.parametrize(
    ("swizzle", "columns", "table"), [(128, 64, TABLE_128), (64, 32, TABLE_64), (32, 16, TABLE_32)]
)
def test_swizzles_exchange_chunks(swizzle, columns, table):
    box = (columns, 16 * 64 // columns)
    out, _ = run(LOAD + WAIT + COPY_OUT, TENSOR, box, (0, 0), swizzle=swizzle)
    linear = expected_tile((0, 0), box).reshape(-1).view(np.uint8).reshape(-1, 8, 16)
    stored = out.reshape(-1, 8, 16)
    for line in range(len(linear)):
        for place in range(8):
            chunk = table[line % 8][place]
            assert (stored[line, place] == linear[line, chunk]).all(), (line, place)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stores_write_the_part_that_exists(schedule):
    box, at = (64, 16), (16, 32)
    _, after = run(STORE, TENSOR, box, at, schedule=schedule)
    want = TENSOR.copy()
    for r in range(8):
        for c in range(56):
            offset = 2 * (64 * r + c) // 16 * 16
            word = np.array([offset], np.uint32).view(np.uint16)[(64 * r + c) % 2]
            want[32 + r, 16 + c] = word
    assert (after == want).all()


@pytest.mark.parametrize(
    ("body", "change", "fault", "words"),
    [
        (LOAD + WAIT + COPY_OUT, {"bytes_": 1024}, ProgramFault, "-1024 bytes missing"),
        (LOAD + WAIT + COPY_OUT, {"bytes_": 4096}, ProgramFault, "2048 bytes missing"),
        (LOAD + COPY_OUT, {}, ProgramFault, "offset 1"),
        (LOAD.replace("[%r1]", "[%r1+64]") + WAIT, {}, Misaligned, "multiple of 128"),
        (LOAD.replace("[%r1]", "[%r1+15360]") + WAIT, {}, OutOfBounds, "ends at"),
        (LOAD.replace("%d2, {", "%d4, {") + WAIT, {}, PtxError, "no tensor map"),
        (STORE.replace("fence.proxy.async.shared::cta;", ""), {}, DataRace, "fence.proxy.async"),
        (STORE.replace("async.shared::cta;", "async.global;"), {}, DataRace, "fence.proxy.async"),
        (STORE.replace("bar.sync 0;", ""), {}, ProgramFault, ""),
        (STORE.replace("cp.async.bulk.wait_group.read 0;", ""), {}, BarrierFault, "ends without"),
    ],
)
def test_misuse_is_reported(body, change, fault, words):
    with pytest.raises(fault) as error:
        run(body, TENSOR, (64, 16), (0, 0), **change)
    assert words in str(error.value)


TWO_LOADS = """
    @!%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r6;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%d2, {%r4, %r5}], [%r2];
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1+2048], [%d2, {%r4, %r5}], [%r2];
ISSUED:
"""


def test_a_phase_that_ends_before_its_copies_is_reported():
    with pytest.raises(BarrierFault, match="fewer than the bytes copied"):
        run(TWO_LOADS + WAIT, TENSOR, (64, 16), (0, 0), bytes_=2048)
    run(TWO_LOADS + WAIT, TENSOR, (64, 16), (0, 0), bytes_=4096)


def test_the_mbarrier_must_be_published():
    body = HEAD.replace("fence.mbarrier_init.release.cluster;", "") + LOAD + WAIT + "ret; }"
    program = decode(parse_ptx(body), "copies", allocate=lambda n, d: 0)
    memory = GlobalMemory()
    source = memory.allocate(TENSOR.nbytes, "tensor", TENSOR.reshape(-1).view(np.uint8))
    tensor_map = TensorMap(
        address=source, dtype="u16", extents=(72, 40), strides=(144,), box=(64, 16)
    )
    launch = Launch(
        grid=(1, 1, 1),
        threads=(64, 1, 1),
        parameters=tensor_map.encode() + struct.pack("<QQiiI", source, source, 0, 0, 2048),
        dynamic_shared_bytes=16448,
    )
    with pytest.raises(BarrierFault, match="not visible to the async proxy"):
        Machine(program, launch, memory, SCHEDULES[0]).run()


FLAT = """
    @!%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r6;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d3], %r6, [%r2];
ISSUED:
"""
FLAT_BACK = """
    fence.proxy.async;
    bar.sync 0;
    @!%p1 bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r1], %r6;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d4], [%r1], %r6;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
STORED:
"""


def test_flat_copies_and_reductions():
    out, _ = run(FLAT + WAIT + COPY_OUT, TENSOR, (64, 16), (0, 0))
    assert (out.view(np.uint16) == TENSOR.reshape(-1)[:1024]).all()
    once = FLAT_BACK.replace(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d4], [%r1], %r6;", ""
    )
    out, _ = run(FLAT + WAIT + once, TENSOR, (64, 16), (0, 0), schedule=SCHEDULES[1])
    assert (out.view(np.uint16) == TENSOR.reshape(-1)[:1024]).all()
    with pytest.raises(Misaligned, match="multiples of 16"):
        run(FLAT.replace("[%d3]", "[%d3+8]"), TENSOR, (64, 16), (0, 0))


def test_tensor_maps_survive_encoding_and_are_checked():
    tensor_map = TensorMap(
        address=1 << 37,
        dtype="bf16",
        extents=(128, 1000, 8, 3),
        strides=(2048, 256, 2048000),
        box=(64, 128, 1, 1),
        swizzle_bytes=128,
        element_strides=(1, 1, 1, 1),
    )
    assert decode_map(tensor_map.encode()) == tensor_map and len(tensor_map.encode()) == 128
    with pytest.raises(Misaligned):
        TensorMap(address=8, dtype="bf16", extents=(64,), strides=(), box=(64,))
    with pytest.raises(ValueError, match="at most the swizzle"):
        TensorMap(address=0, dtype="bf16", extents=(64,), strides=(), box=(64,), swizzle_bytes=64)
