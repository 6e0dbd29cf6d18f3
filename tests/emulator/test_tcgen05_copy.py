"""`tcgen05.cp`: shapes, multicast, order with matmuls, and what goes wrong without waiting."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import DataRace, ProgramFault, PtxError, TensorMemoryFault
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=0),
]
BYTES = 4096
"""Of the source in shared memory, at dynamic offset 1024; another matrix may follow it.

The mbarrier is at offset 16."""

# Every thread moves 32 of the 4096 bytes to shared memory, thread 0 copies them to columns 3 on.
BODY = """
    setp.lt.u32 %p1, %thread, 32;
    @!%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%shared], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    mul.wide.u32 %d1, %thread, 32;
    add.s64 %d2, %d1, %source;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2];
    ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%d2+16];
    shl.b32 %r3, %thread, 5;
    add.s32 %r3, %r3, %shared;
    st.shared.v4.b32 [%r3+1024], {%r4, %r5, %r6, %r7};
    st.shared.v4.b32 [%r3+1040], {%r8, %r9, %r10, %r11};
    setp.eq.b32 %p3, %thread, 0;
    add.s32 %r12, %shared, 16;
    @!%p3 bra READY;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
READY:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r1, [%shared];
    shr.u32 %r2, %thread, 5;
    shl.b32 %r2, %r2, 21;
    add.s32 %r2, %r2, %r1;
    CLEAR
    add.s32 %r13, %shared, 1024;
    shr.u32 %r13, %r13, 4;
    cvt.u64.u32 %d3, %r13;
    mov.b64 %d4, DESCRIPTOR;
    add.s64 %d3, %d3, %d4;
    @!%p3 bra ISSUED;
    tcgen05.cp.cta_group::1.SHAPE [%r1+FIRST], %d3;
    THEN
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
ISSUED:
    WAIT
    tcgen05.ld.sync.aligned.32x32b.xWIDTH.b32 {NAMES}, [%r2+3];
    bar.sync 0;
    @!%p1 bra RELEASED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;
RELEASED:
"""
WAIT = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12], 0;
    @!%p4 bra AGAIN;
"""
CLEAR = """
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r2+3], {%r60, %r60, %r60, %r60, %r60, %r60, %r60, %r60};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
"""
PAST = 0xABCD
"""What tensor memory holds where a copy does not write."""


def descriptor(leading: int, stride: int, mode: int = 0) -> int:
    """Table "Shared memory descriptor" of the ISA; the start address is added by the program."""
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | mode << 61


def run_copy(
    shape: str,
    source: np.ndarray,
    bits: int,
    width: int,
    schedule: Schedule,
    edit: Callable[[str], str] = lambda body: body,
    then: str = "",
) -> np.ndarray:
    """Returns the 128 lanes and ``width`` columns of tensor memory after the copy."""
    names = [f"c{i}" for i in range(width)]
    body = BODY.replace("CLEAR", f"mov.b32 %r60, {PAST};" + CLEAR).replace("SHAPE", shape)
    body = body.replace("WAIT", WAIT)
    body = body.replace("DESCRIPTOR", str(bits)).replace("WIDTH", str(width))
    body = body.replace("NAMES", ", ".join("%" + n for n in names)).replace("THEN", then)
    out = run_snippet(
        edit(body).replace("FIRST", "3"),
        outputs=dict.fromkeys(names, np.uint32),
        buffers={"source": np.ascontiguousarray(source).view(np.uint32)},
        threads=128,
        shared_bytes=1024 + BYTES + 512,
        schedule=schedule,
    )
    return np.stack([out.outputs[name] for name in names], axis=1)


def values(rows: int, words: int) -> np.ndarray:
    """A matrix whose word says where it is from."""
    return (1000 * np.arange(rows)[:, None] + np.arange(words)).astype(np.uint32)


def in_core_matrices(matrix: np.ndarray) -> np.ndarray:
    """Without swizzle: 8 rows of 16 bytes make 128 bytes; those along the rows come first."""
    rows, words = matrix.shape
    padded = np.zeros((-(-rows // 8) * 8, words), np.uint32)
    padded[:rows] = matrix
    blocks = padded.reshape(-1, 8, words // 4, 4).transpose(0, 2, 1, 3)
    flat = np.zeros(BYTES // 4, np.uint32)
    flat[: padded.size] = blocks.reshape(-1)
    return flat


LEADING, STRIDE = 128, 256  # of two core matrices a row of 256 bits
WARP_PAIRS = {"warpx2::02_13": [0, 1, 0, 1], "warpx2::01_23": [0, 0, 1, 1]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("shape", "rows", "words"),
    [
        ("128x256b", 128, 8),
        ("128x128b", 128, 4),
        ("64x128b.warpx2::02_13", 64, 4),
        ("64x128b.warpx2::01_23", 64, 4),
        ("32x128b.warpx4", 32, 4),
        ("4x256b", 4, 8),
    ],
)
def test_shapes(shape: str, rows: int, words: int, schedule: Schedule):
    """Which lane receives which row, quarter of the lanes by quarter."""
    matrix = values(rows, words)
    stride = STRIDE if words == 8 else 128
    result = run_copy(shape, in_core_matrices(matrix), descriptor(LEADING, stride), 8, schedule)
    for lane in range(128):
        quarter, place = divmod(lane, 32)
        if shape == "4x256b":
            expected = matrix[quarter] if place == 0 else np.full(8, PAST)
        elif "warpx2" in shape:
            expected = matrix[32 * WARP_PAIRS[shape.partition(".")[2]][quarter] + place]
        elif "warpx4" in shape:
            expected = matrix[place]
        else:
            expected = matrix[lane]
        assert result[lane, :words].tolist() == expected.tolist(), lane
        assert (result[lane, words:] == PAST).all()


@pytest.mark.parametrize("mode", [2, 4, 6])
def test_swizzled_sources(mode: int):
    """Rows of 32 bytes of a swizzled matrix; 16-byte chunks are permuted within the pattern."""
    width = {2: 128, 4: 64, 6: 32}[mode]
    matrix, source = values(32, 4), np.zeros(BYTES // 16, "V16")
    for row in range(32):
        linear = row * width
        # Bits 4 to 6 are xored with bits 7 to 9, as many of them as the pattern is wide.
        where = linear ^ (linear >> 7 & (width // 16 - 1)) << 4
        source[where // 16] = matrix[row].view("V16")[0]
    result = run_copy("32x128b.warpx4", source, descriptor(16, 8 * width, mode), 4, SCHEDULES[0])
    assert (result == np.tile(matrix, (4, 1))).all()


def test_four_lanes_from_an_odd_lane():
    """`4x256b` at lane 31 refreshes the last lane of each quarter."""
    matrix = values(4, 8)
    address = f"{31 << 16 | 3}"
    result = run_copy(
        "4x256b",
        in_core_matrices(matrix),
        descriptor(LEADING, STRIDE),
        8,
        SCHEDULES[0],
        lambda body: body.replace("[%r1+FIRST]", f"[%r1+{address}]"),
    )
    assert (result[31::32] == matrix).all() and (
        np.delete(result, [31, 63, 95, 127], 0) == PAST
    ).all()


RNG = np.random.default_rng(29)
A_VALUES = RNG.integers(-8, 9, (128, 16)).astype(ml_dtypes.bfloat16)
IDENTITY = np.eye(16).astype(ml_dtypes.bfloat16)
INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | (16 >> 3) << 17 | (128 >> 4) << 24
BRING_IDENTITY = """
    setp.lt.u32 %p5, %thread, 16;
    @!%p5 bra BROUGHT;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2+4096];
    ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%d2+4112];
    st.shared.v4.b32 [%r3+5120], {%r4, %r5, %r6, %r7};
    st.shared.v4.b32 [%r3+5136], {%r8, %r9, %r10, %r11};
BROUGHT:
    setp.eq.b32 %p3, %thread, 0;
"""
MULTIPLY = f"""
    mov.b32 %r14, {INSTRUCTION};
    add.s64 %d5, %d3, 256;
    tcgen05.mma.cta_group::1.kind::f16 [%r1+32], [%r1+3], %d5, %r14, 0;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_matmul_after_a_copy_sees_its_data(schedule: Schedule):
    """Copies and matmuls of one thread execute in order; A is copied, B the identity: D = A."""
    source = np.concatenate(
        [
            in_core_matrices(A_VALUES.view(np.uint32)),
            in_core_matrices(IDENTITY.view(np.uint32))[:128],
        ]
    )

    def edit(body: str) -> str:
        body = body.replace("setp.eq.b32 %p3, %thread, 0;", BRING_IDENTITY)
        return body.replace("[%r2+3];", "[%r2+32];")

    bits = descriptor(LEADING, STRIDE)
    result = run_copy("128x256b", source, bits, 16, schedule, edit, MULTIPLY)
    assert (result.view(np.float32) == A_VALUES.astype(np.float32)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("old", "new", "fault", "words"),
    [
        ("fence.proxy.async.shared::cta;", "", DataRace, "no fence.proxy.async"),
        (WAIT, "", DataRace, "tensor core of warp 0"),
        ("@!%p3 bra ISSUED;", "", ProgramFault, "must be issued by one thread"),
        ("AGAIN:", "st.shared.b32 [%r3+1024], 0; AGAIN:", DataRace, "tensor core of warp 0"),
        ("FIRST", "60", TensorMemoryFault, "[60, 68)"),
        ("[%r1+FIRST]", "[%r1+65536]", TensorMemoryFault, "reaches lane 128"),
        ("128x256b", "128x256b.warpx4", PtxError, "needs .no multicast"),
        ("128x256b", "64x128b", PtxError, "warpx2::02_13 or .warpx2::01_23"),
        ("128x256b", "128x256b.b8x16.b6x16_p32", PtxError, "source format .b6x16_p32"),
    ],
)
def test_misuse_is_reported(old, new, fault, words, schedule):
    matrix = in_core_matrices(values(128, 8))
    with pytest.raises(fault) as error:
        run_copy(
            "128x256b",
            matrix,
            descriptor(LEADING, STRIDE),
            8,
            schedule,
            lambda body: body.replace(old, new),
        )
    assert words in str(error.value)


PAIR = {
    "cta_group::1": "cta_group::2",
    # The second block's matrix is the first one's plus 7.
    "st.shared.v4.b32 [%r3+1024]": """
    mov.u32 %r20, %cluster_ctarank;
    mul.lo.s32 %r21, %r20, 7;
    add.s32 %r4, %r4, %r21;
    add.s32 %r8, %r8, %r21;
    st.shared.v4.b32 [%r3+1024]""",
    "@!%p3 bra ISSUED;": """
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.and.b32 %p3, %r20, 0, %p3;
    mov.b16 %h1, 3;
    @!%p3 bra ISSUED;""",
    "shared::cluster.b64 [%r12];": "shared::cluster.multicast::cluster.b64 [%r12], %h1;",
    "bar.sync 0;\n    @!%p1 bra RELEASED;": """
    shl.b32 %r22, %r20, 7;
    add.s32 %r22, %r22, %thread;
    mul.wide.u32 %d6, %r22, 4;
    add.s64 %d6, %d6, %pair;
    st.global.b32 [%d6], %c0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%p1 bra RELEASED;""",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_block_of_a_pair_copies_its_own_matrix(schedule: Schedule):
    matrix = values(128, 8)
    body = BODY.replace("CLEAR", "").replace("SHAPE", "128x256b").replace("FIRST", "3")
    body = body.replace("WAIT", WAIT).replace("THEN", "").replace("WIDTH", "1")
    body = body.replace("DESCRIPTOR", str(descriptor(LEADING, STRIDE))).replace("NAMES", "%c0")
    for old, new in PAIR.items():
        assert old in body
        body = body.replace(old, new)
    out = run_snippet(
        body,
        outputs={"c0": np.uint32},
        buffers={"source": in_core_matrices(matrix), "pair": np.zeros((2, 128), np.uint32)},
        threads=128,
        shared_bytes=1024 + BYTES,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        schedule=schedule,
    )
    assert (out.buffers["pair"] == matrix[:, 0] + np.array([[0], [7]])).all()
