"""Tensor-core matmuls of every operand form: types, majors, swizzles, registers, pairs of blocks.

Operands are placed in shared memory by the layouts that other tests check element by element, so
that here the instructions' own choices are tested: which descriptor fields, which registers, which
rows and columns go where.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import BarrierFault, ProgramFault, PtxError
from jax_flash.emulator.fragments import accumulator_to_rows
from jax_flash.emulator.matrix_descriptor import decode_descriptor, operand_offsets
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

TYPES: dict[str, Any] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
]
BASE = 1024
"""Offset of dynamic shared memory in a block."""
IMAGE = 16384
"""Bytes of operands in shared memory."""
RNG = np.random.default_rng(41)

# 128 threads bring the image to shared memory, at dynamic offset 1024.
BRING = """
    shl.b32 %r1, %thread, 4;
    add.s32 %r2, %r1, %shared;
    cvt.u64.u32 %d1, %r1;
    add.s64 %d1, %d1, %image;
    mov.b32 %r3, 0;
BRING:
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d1];
    st.shared.v4.b32 [%r2+1024], {%r4, %r5, %r6, %r7};
    add.s32 %r2, %r2, 2048;
    add.s64 %d1, %d1, 2048;
    add.s32 %r3, %r3, 2048;
    setp.lt.u32 %p1, %r3, 16384;
    @%p1 bra BRING;
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""


def integers(rows: int, depth: int) -> np.ndarray:
    """Small integers: exact in every type, and so are their sums in float32."""
    return RNG.integers(-4, 5, (rows, depth)).astype(np.float64)


def place(
    image: np.ndarray,
    matrix: np.ndarray,
    dtype: np.dtype,
    offset: int,
    *,
    k_major: bool,
    mode: int,
    tcgen05: bool,
) -> int:
    """Puts ``(rows, depth)`` into the image at a byte offset; returns its descriptor.

    ``mode`` is the swizzle: 0, 32, 64 or 128 bytes.
    """
    rows, depth = matrix.shape
    size = dtype.itemsize
    if mode == 0:
        # Core matrices of 128 bytes, those along the contiguous dimension next to each other.
        leading, stride = (
            (128, 128 * (depth * size // 16)) if k_major else (128 * rows * size // 16, 128)
        )
    elif k_major:
        leading, stride = 16, 8 * mode
    else:
        leading, stride = depth * mode, 8 * mode
    fields = (BASE + 1024 + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32
    if tcgen05:
        bits = fields | 1 << 46 | {0: 0, 128: 2, 64: 4, 32: 6}[mode] << 61
    else:
        bits = fields | {0: 0, 128: 1, 64: 2, 32: 3}[mode] << 62
    descriptor = decode_descriptor(bits, tcgen05=tcgen05)
    offsets = operand_offsets(descriptor, rows, depth, size, k_major=k_major) - BASE - 1024
    assert len(np.unique(offsets)) == offsets.size
    image.view(f"u{size}")[offsets // size] = matrix.astype(dtype).view(f"u{size}")
    return bits


WGMMA = """
    mov.b64 %d3, DESCRIPTOR_A;
    mov.b64 %d4, DESCRIPTOR_B;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64nCOLUMNSkDEPTH.f32.TYPES {RESULT}, A_OPERAND, %d4, 0, 1, 1FLAGS;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
"""


def run_wgmma(
    a: np.ndarray,
    b: np.ndarray,
    types: tuple[str, str],
    *,
    registers: bool = False,
    majors: tuple[bool, bool] = (True, True),
    modes: tuple[int, int] = (0, 0),
    schedule: Schedule = SCHEDULES[0],
) -> np.ndarray:
    """Returns the 64 x N result of one instruction; ``b`` is (N, K)."""
    image = np.zeros(IMAGE, np.uint8)
    a_type, b_type = (TYPES[name] for name in types)
    a_bits = 0
    inputs: dict[str, np.ndarray] = {}
    if registers:
        each = 4 // a_type.itemsize
        for register in range(4):
            # Figure of matrix A: registers 0 and 1 hold the left half of K, 1 and 3 rows from 8 on.
            thread = np.arange(128)
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
            column = each * (thread % 4) + a.shape[1] // 2 * (register // 2)
            parts = np.stack([a[row, column + e] for e in range(each)], axis=1)
            inputs[f"a{register}"] = np.ascontiguousarray(parts.astype(a_type)).view(np.uint32)[
                :, 0
            ]
    else:
        a_bits = place(image, a, a_type, 0, k_major=majors[0], mode=modes[0], tcgen05=False)
    b_bits = place(image, b, b_type, 8192, k_major=majors[1], mode=modes[1], tcgen05=False)
    names = [f"c{i}" for i in range(len(b) // 2)]
    flags = ""
    if a_type.itemsize == 2:
        flags = "".join(f", {int(not m)}" for m in (majors[1:] if registers else majors))
    body = WGMMA.replace("COLUMNS", str(len(b))).replace("FLAGS", flags)
    body = body.replace("DEPTH", str(a.shape[1])).replace("TYPES", ".".join(types))
    body = body.replace("DESCRIPTOR_A", str(a_bits)).replace("DESCRIPTOR_B", str(b_bits))
    body = body.replace("RESULT", ", ".join(f"%{n}" for n in names))
    body = body.replace("A_OPERAND", "{%a0, %a1, %a2, %a3}" if registers else "%d3")
    out = run_snippet(
        BRING + body,
        inputs=inputs,
        outputs=dict.fromkeys(names, np.float32),
        buffers={"image": image.view(np.uint32)},
        threads=128,
        shared_bytes=1024 + IMAGE,
        schedule=schedule,
    ).outputs
    fragments = np.stack([out[name].reshape(4, 32) for name in names], axis=1)
    return np.concatenate([accumulator_to_rows(part) for part in fragments])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(
    "types",
    [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")],
)
def test_wgmma_of_every_type(types: tuple[str, str], registers: bool, schedule: Schedule):
    depth = 32 // TYPES[types[0]].itemsize
    a, b = integers(64, depth), integers(40, depth)
    assert (run_wgmma(a, b, types, registers=registers, schedule=schedule) == a @ b.T).all()


@pytest.mark.parametrize(
    ("majors", "modes"),
    [
        ((True, True), (128, 64)),
        ((True, False), (32, 128)),
        ((False, True), (128, 0)),
        ((False, False), (64, 128)),
        ((False, False), (0, 0)),
    ],
)
def test_wgmma_of_every_major(majors: tuple[bool, bool], modes: tuple[int, int]):
    a, b = integers(64, 16), integers(64, 16)
    assert (run_wgmma(a, b, ("bf16", "bf16"), majors=majors, modes=modes) == a @ b.T).all()


@pytest.mark.parametrize("columns", [8, 104, 256])
def test_wgmma_of_every_width(columns: int):
    a, b = integers(64, 16), integers(columns, 16)
    result = run_wgmma(a, b, ("bf16", "bf16"), registers=True, modes=(0, 32))
    assert (result == a @ b.T).all()


def test_wgmma_forms_that_do_not_exist():
    a, b = integers(64, 16), integers(16, 16)
    with pytest.raises(PtxError, match="does not exist for these types"):
        run_wgmma(a, b, ("e4m3", "e4m3"))
    with pytest.raises(PtxError, match=r"inputs \['tf32', 'tf32'\]"):
        TYPES["tf32"] = np.dtype(np.float32)
        try:
            run_wgmma(integers(64, 8), integers(16, 8), ("tf32", "tf32"))
        finally:
            del TYPES["tf32"]


TCGEN05 = """
    setp.lt.u32 %p2, %thread, 32;
    @!%p2 bra ALLOCATED;
    tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [%shared], 256;
    tcgen05.relinquish_alloc_permit.GROUP.sync.aligned;
ALLOCATED:
    setp.eq.b32 %p3, %thread, 0;
    add.s32 %r12, %shared, 16;
    @!%p3 bra READY;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r20, %cluster_ctarank;
    ld.shared.b32 %r8, [%shared];
    mov.b64 %d3, DESCRIPTOR_A;
    mov.b64 %d4, DESCRIPTOR_B;
    mov.b32 %r14, INSTRUCTION;
    mov.b16 %h1, 3;
    setp.eq.and.b32 %p4, %r20, 0, %p3;
    @!%p4 bra ISSUED;
    tcgen05.mma.GROUP.KIND [%r8], %d3, %d4, %r14, 0;
    COMMIT
ISSUED:
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p5, [%r12], 0;
    @!%p5 bra AGAIN;
    shr.u32 %r9, %thread, 5;
    shl.b32 %r9, %r9, 21;
    add.s32 %r9, %r9, %r8;
    mad.lo.s32 %r10, %r20, 128, %thread;
    mul.wide.u32 %d5, %r10, ROW_BYTES;
    add.s64 %d5, %d5, %result;
    LOADS
    bar.sync 0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%p2 bra RELEASED;
    tcgen05.dealloc.GROUP.sync.aligned.b32 %r8, 256;
RELEASED:
"""
ONE = "tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.b64 [%r12];"
BOTH = (
    "tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r12], %h1;"
)
KINDS = {
    "f16": ("kind::f16", 0),
    "bf16": ("kind::f16", 1),
    "e4m3": ("kind::f8f6f4", 0),
    "e5m2": ("kind::f8f6f4", 1),
}


def run_tcgen05(
    operands: list[tuple[np.ndarray, np.ndarray]],
    types: tuple[str, str],
    shape: tuple[int, int],
    *,
    majors: tuple[bool, bool] = (True, True),
    modes: tuple[int, int] = (0, 0),
    schedule: Schedule = SCHEDULES[0],
    commit: str = "",
    group: str = "",
) -> np.ndarray:
    """Returns the tensor memory ``(blocks, lanes, columns)`` after one instruction.

    ``operands`` are A and B of each block: one block, or a pair.
    """
    blocks = len(operands)
    a_type, b_type = (TYPES[name] for name in types)
    images, bits = [], (0, 0)
    for a, b in operands:
        image = np.zeros(IMAGE, np.uint8)
        a_bits = place(image, a, a_type, 0, k_major=majors[0], mode=modes[0], tcgen05=True)
        b_bits = place(image, b, b_type, 8192, k_major=majors[1], mode=modes[1], tcgen05=True)
        images.append(image)
        bits = (a_bits, b_bits)
    rows, columns = shape
    kind, a_code = KINDS[types[0]]
    instruction = 1 << 4 | a_code << 7 | KINDS[types[1]][1] << 10
    instruction |= int(not majors[0]) << 15 | int(not majors[1]) << 16
    instruction |= columns >> 3 << 17 | rows >> 4 << 24
    width = columns // 2 if blocks == 2 and rows == 128 else columns
    read = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r30, %r31, %r32, %r33}}, [%r9+{c}];"
        f" st.global.v4.b32 [%d5+{4 * c}], {{%r30, %r31, %r32, %r33}};"
        for c in range(0, width, 4)
    )
    body = TCGEN05.replace("COMMIT", commit or (BOTH if blocks == 2 else ONE)).replace(
        "LOADS", read
    )
    body = body.replace("GROUP", group or f"cta_group::{blocks}").replace("KIND", kind)
    body = body.replace("DESCRIPTOR_A", str(bits[0])).replace("DESCRIPTOR_B", str(bits[1]))
    body = body.replace("INSTRUCTION", str(instruction)).replace("ROW_BYTES", str(4 * width))
    place_of_block = f"mov.u32 %r21, %cluster_ctarank; mul.wide.u32 %d8, %r21, {IMAGE};"
    place_of_block += " add.s64 %image, %image, %d8;"
    out = run_snippet(
        place_of_block + BRING + body,
        buffers={
            "image": np.concatenate(images).view(np.uint32),
            "result": np.zeros((blocks, 128, width), np.float32),
        },
        threads=128,
        shared_bytes=1024 + IMAGE,
        grid=(blocks, 1, 1),
        cluster=(blocks, 1, 1),
        schedule=schedule,
    )
    return out.buffers["result"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "types", [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e4m3"), ("e5m2", "e4m3")]
)
def test_tcgen05_of_every_type(types: tuple[str, str], schedule: Schedule):
    depth = 32 // TYPES[types[0]].itemsize
    a, b = integers(128, depth), integers(48, depth)
    result = run_tcgen05([(a, b)], types, (128, 48), schedule=schedule)
    assert (result[0] == a @ b.T).all()


@pytest.mark.parametrize(
    ("majors", "modes"),
    [
        ((True, True), (32, 64)),
        ((True, False), (64, 128)),
        ((False, True), (64, 0)),
        ((False, False), (128, 32)),
        ((False, False), (0, 0)),
    ],
)
def test_tcgen05_of_every_major(majors: tuple[bool, bool], modes: tuple[int, int]):
    a, b = integers(128, 16), integers(64, 16)
    result = run_tcgen05([(a, b)], ("bf16", "bf16"), (128, 64), majors=majors, modes=modes)
    assert (result[0] == a @ b.T).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tcgen05_of_pairs_with_256_rows(schedule: Schedule):
    """Each block holds 128 rows of A and D, and half of the rows of B; both are told."""
    a, b = integers(256, 16), integers(64, 16)
    operands = [(a[:128], b[:32]), (a[128:], b[32:])]
    result = run_tcgen05(operands, ("bf16", "bf16"), (256, 64), schedule=schedule)
    assert (result.reshape(256, 64) == a @ b.T).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tcgen05_of_pairs_with_128_rows(schedule: Schedule):
    """Data path layout B: 64 rows a block; the right half of the columns is in lanes 64 to 127."""
    a, b = integers(128, 16), integers(64, 16)
    operands = [(a[:64], b[:32]), (a[64:], b[32:])]
    result = run_tcgen05(operands, ("bf16", "bf16"), (128, 64), schedule=schedule)
    product = a @ b.T
    for block in range(2):
        rows = product[64 * block : 64 * block + 64]
        assert (result[block, :64] == rows[:, :32]).all()
        assert (result[block, 64:] == rows[:, 32:]).all()


def test_a_commit_to_one_block_leaves_the_other_waiting():
    a, b = integers(256, 16), integers(64, 16)
    operands = [(a[:128], b[:32]), (a[128:], b[32:])]
    with pytest.raises(ProgramFault, match="parity 0"):
        run_tcgen05(operands, ("bf16", "bf16"), (256, 64), commit=ONE)


def test_pairs_need_a_cluster_of_two():
    a, b = integers(128, 16), integers(64, 16)
    with pytest.raises(BarrierFault, match="without a pair"):
        run_tcgen05([(a, b)], ("bf16", "bf16"), (128, 64), group="cta_group::2")
