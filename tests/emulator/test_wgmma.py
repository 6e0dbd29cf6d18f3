"""Warpgroup matmuls against the fragment and shared-memory layouts of the PTX ISA."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import DataRace, ProgramFault, PtxError, RegisterFault
from jax_flash.emulator.fragments import (
    accumulator_to_rows,
    operand_a_to_rows,
    rows_to_accumulator,
)
from jax_flash.emulator.matrix_descriptor import decode_descriptor, operand_offsets
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(11)
A_VALUES = RNG.integers(-8, 9, (64, 16)).astype(np.float32)
B_VALUES = RNG.integers(-8, 9, (16, 16)).astype(np.float32)  # (N, K)
SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=2),
]


def test_accumulator_fragment():
    """Figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D"."""
    for lane in range(32):
        for register in range(8):
            registers = np.zeros((8, 32))
            registers[register, lane] = 1
            (row,), (column,) = np.nonzero(accumulator_to_rows(registers))
            assert row == lane // 4 + 8 * (register // 2 % 2)
            assert column == 8 * (register // 4) + 2 * (lane % 4) + register % 2
    matrix = np.arange(16 * 24).reshape(16, 24)
    assert (accumulator_to_rows(rows_to_accumulator(matrix)) == matrix).all()


def test_operand_a_fragment():
    """Figure "WGMMA .m64nNk16 register fragment layout for matrix A": a0..a7 in four registers."""
    for lane in range(32):
        for element in range(8):
            registers = np.zeros((4, 32, 2), BF16)
            registers[element // 2, lane, element % 2] = 1
            rows = operand_a_to_rows(registers.view(np.uint32)[..., 0], BF16)
            (row,), (column,) = np.nonzero(rows)
            assert row == lane // 4 + (8 if element in (2, 3, 6, 7) else 0)
            assert column == 2 * (lane % 4) + element % 2 + (8 if element >= 4 else 0)


def descriptor(start, leading, stride, mode):
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


@pytest.mark.parametrize(
    ("mode", "k_major", "leading", "stride"),
    [
        (0, True, 128, 256),
        (3, True, 16, 256),
        (2, True, 16, 512),
        (1, True, 16, 1024),
        (0, False, 128, 256),
        (3, False, 512, 256),
        (2, False, 1024, 512),
        (1, False, 2048, 1024),
    ],
)
def test_canonical_layouts(mode, k_major, leading, stride):
    """ "Canonical Layouts" of the ISA, as CuTe layouts of 128-bit units, then the swizzle."""
    width = {0: 16, 3: 32, 2: 64, 1: 128}[mode]
    offsets = operand_offsets(
        decode_descriptor(descriptor(2048, leading, stride, mode)), 64, 16, 2, k_major=k_major
    )
    for row in range(64):
        for k in range(16):
            if k_major:
                # ((8, m), (T, 2k)) : ((T * units, SBO), (1, LBO or T))
                linear = row % 8 * width + row // 8 * stride + 2 * (k % 8)
                linear += k // 8 * (leading if mode == 0 else 16)
            elif mode == 0:
                # ((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))
                linear = 2 * (row % 8) + row // 8 * stride + k % 8 * 16 + k // 8 * leading
            else:
                # ((T, units, m), (8, k)) : ((1, T, LBO), (units * T, SBO))
                per_atom = width // 2
                linear = 2 * (row % per_atom) + row // per_atom * leading
                linear += k % 8 * width + k // 8 * stride
            address = 2048 + linear
            lines = {0: 1, 3: 2, 2: 4, 1: 8}[mode]
            address ^= (address // 128 % lines) * 16
            assert offsets[row, k] == address


def test_descriptor_fields_that_are_not_implemented():
    with pytest.raises(PtxError, match="base offset"):
        decode_descriptor(1 << 49)
    with pytest.raises(PtxError, match="bits 46-48"):
        decode_descriptor(0, tcgen05=True)


FILL = """
    mul.wide.u32 %d1, %thread, 16;
    add.s64 %d2, %d1, %g;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];
    shl.b32 %r5, %thread, 4;
    add.s32 %r5, %r5, %shared;
    st.shared.v4.b32 [%r5], {%r1, %r2, %r3, %r4};
    add.s64 %d2, %d2, 2048;
    setp.lt.u32 %p1, %thread, 32;
    @%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];
    @%p1 st.shared.v4.b32 [%r5+2048], {%r1, %r2, %r3, %r4};
    fence.proxy.async;
    bar.sync 0;
    shr.u32 %r6, %shared, 4;
    cvt.u64.u32 %d3, %r6;
    mov.b64 %d4, DESC_A;
    add.s64 %d3, %d3, %d4;
    add.s64 %d5, %d3, 128;
"""
"""A (64 x 16) at offset 0 and B (16 x 16) at offset 2048, K-major without swizzle."""

MATMUL = """
    mov.b32 %r10, 0f3F800000; mov.b32 %r11, 0f3F800000; mov.b32 %r12, 0f3F800000;
    mov.b32 %r13, 0f3F800000; mov.b32 %r14, 0f3F800000; mov.b32 %r15, 0f3F800000;
    mov.b32 %r16, 0f3F800000; mov.b32 %r17, 0f3F800000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
        {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, %d3, %d5, SCALE, 1, SIGN, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %c0, %r10; mov.b32 %c1, %r11; mov.b32 %c2, %r12; mov.b32 %c3, %r13;
    mov.b32 %c4, %r14; mov.b32 %c5, %r15; mov.b32 %c6, %r16; mov.b32 %c7, %r17;
"""
NAMES = [f"c{i}" for i in range(8)]


def core_matrices(values: np.ndarray) -> np.ndarray:
    """Stores a matrix K-major without swizzle: 8x8 blocks of 128 bytes, K blocks first."""
    rows, depth = values.shape
    blocks = values.reshape(rows // 8, 8, depth // 8, 8).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks.astype(BF16)).reshape(-1)


def run_matmul(body: str, schedule: Schedule):
    buffer = np.concatenate([core_matrices(A_VALUES), core_matrices(B_VALUES)]).view(np.uint32)
    text = (FILL + body).replace("DESC_A", str(descriptor(0, 128, 256, 0)))
    out = run_snippet(
        text,
        outputs=dict.fromkeys(NAMES, np.float32),
        buffers={"g": buffer},
        threads=128,
        shared_bytes=2560,
        schedule=schedule,
    )
    registers = np.stack([out.outputs[name].reshape(4, 32) for name in NAMES], axis=1)
    return np.concatenate([accumulator_to_rows(part) for part in registers]), out.statistics


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("scale", "sign"), [(0, 1), (1, 1), (1, -1)])
def test_matmul_of_shared_operands(scale, sign, schedule):
    body = MATMUL.replace("SCALE", str(scale)).replace("SIGN", str(sign))
    result, statistics = run_matmul(body, schedule)
    assert (result == sign * (A_VALUES @ B_VALUES.T) + scale).all()
    assert statistics.tensor_operations["wgmma bfloat16"] == 64 * 16 * 16


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
ONE = MATMUL.replace("SCALE", "1").replace("SIGN", "1")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("old", "new", "fault", "words"),
    [
        (FENCE, "", RegisterFault, "no wgmma.fence"),
        (COMMIT, "", RegisterFault, "has not been waited for"),
        (WAIT, "", RegisterFault, "has not been waited for"),
        (WAIT, "wgmma.wait_group.sync.aligned 1;", RegisterFault, "has not been waited for"),
        (WAIT, "st.shared.b32 [%r5], 0;" + WAIT, DataRace, "tensor core"),
        (WAIT, "mov.b32 %r10, 0;" + WAIT, RegisterFault, "%r10 belongs to a wgmma"),
        ("%d3, %d5, 1", "%d3, %d3, 1", ProgramFault, None),
        (FENCE, FENCE + "mov.b32 %r10, 0;", RegisterFault, "no wgmma.fence between other uses"),
    ],
)
def test_missing_synchronisation_is_reported(old, new, fault, words, schedule):
    if words is None:  # a right program with other operands: no report
        result, _ = run_matmul(ONE.replace(old, new), schedule)
        assert (result == A_VALUES @ A_VALUES[:16].T + 1).all()
        return
    with pytest.raises(fault) as error:
        run_matmul(ONE.replace(old, new), schedule)
    assert words in str(error.value)


def test_shared_operands_need_the_proxy_fence():
    buffer = np.zeros(640, np.uint32)
    text = (FILL.replace("fence.proxy.async;", "") + ONE).replace(
        "DESC_A", str(descriptor(0, 128, 256, 0))
    )
    with pytest.raises(DataRace, match=r"or no fence\.proxy\.async"):
        run_snippet(
            text,
            outputs=dict.fromkeys(NAMES, np.float32),
            buffers={"g": buffer},
            threads=128,
            shared_bytes=2560,
        )
