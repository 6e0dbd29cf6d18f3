"""Tensor memory and tcgen05 matmuls against the layouts and descriptor tables of the PTX ISA."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import (
    DataRace,
    ProgramFault,
    PtxError,
    TensorMemoryFault,
    UninitialisedRead,
)
from jax_flash.emulator.instructions.tcgen05_memory import fragment
from jax_flash.emulator.instructions.tcgen05_mma import (
    decode_instruction_descriptor,
    result_places,
)
from jax_flash.emulator.matrix_descriptor import decode_descriptor
from jax_flash.emulator.schedule import Schedule

from .snippet import run_snippet

BF16 = ml_dtypes.bfloat16
SCHEDULES = [
    Schedule(order="round_robin", landing="eager"),
    Schedule(order="random", landing="random", seed=5),
    Schedule(order="starve", landing="lazy", starved=0),
]


def test_instruction_descriptor_fields():
    """Table "Instruction descriptor format": types, negation, majors, N / 8 and M / 16."""
    bits = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 1 << 16 | (192 >> 3) << 17 | (128 >> 4) << 24
    fields = decode_instruction_descriptor(bits, "kind::f16")
    assert (fields.rows, fields.columns, fields.depth) == (128, 192, 16)
    assert fields.a_dtype is BF16 and fields.b_dtype is BF16
    assert fields.a_k_major and not fields.b_k_major and fields.sign == -1
    narrow = decode_instruction_descriptor(1 << 4 | 1 << 10 | 8 << 17 | 4 << 24, "kind::f8f6f4")
    assert (narrow.rows, narrow.columns, narrow.depth) == (64, 64, 32)
    assert narrow.a_dtype is ml_dtypes.float8_e4m3fn and narrow.b_dtype is ml_dtypes.float8_e5m2
    for unknown in (bits | 4, bits | 8, bits & ~0x30, bits | 1 << 30, bits | 5 << 7):
        with pytest.raises(PtxError):
            decode_instruction_descriptor(unknown, "kind::f16")


def test_matrix_descriptor_fields():
    """Table "Shared memory descriptor": bits 46-48 are 0b001, the swizzle is in bits 61-63."""
    for mode, width in ((0, 0), (2, 128), (4, 64), (6, 32)):
        bits = 0x123 | 0x45 << 16 | 0x40 << 32 | 1 << 46 | mode << 61
        fields = decode_descriptor(bits, tcgen05=True)
        assert (fields.start, fields.leading_bytes) == (0x1230, 0x450)
        assert (fields.stride_bytes, fields.swizzle_bytes) == (0x400, width)
    with pytest.raises(PtxError, match="swizzle mode 1"):
        decode_descriptor(1 << 46 | 1 << 61, tcgen05=True)


def test_places_of_results():
    """ "Data path layouts" D (M = 128), A (M = 256, two blocks), F (M = 64), B (M = 128, two)."""
    for rows, blocks in ((128, 1), (256, 2)):
        lanes, columns = np.broadcast_arrays(*result_places(rows, 32, blocks))
        assert (lanes == np.arange(128)[:, None]).all() and (columns == np.arange(32)).all()
    lanes, columns = np.broadcast_arrays(*result_places(64, 32, 1))
    assert lanes[:, 0].tolist() == [32 * (r // 16) + r % 16 for r in range(64)]
    lanes, columns = np.broadcast_arrays(*result_places(128, 32, 2))
    for row in range(64):
        for column in range(32):
            expected = (row, column) if column < 16 else (row + 64, column - 16)
            assert (lanes[row, column], columns[row, column]) == expected


@pytest.mark.parametrize(
    ("shape", "registers", "place"),
    [
        ("32x32b", 4, lambda t, r: (t, r)),
        (
            "16x256b",
            8,
            lambda t, r: (t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2),
        ),
        ("16x128b", 4, lambda t, r: (t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4)),
        ("16x64b", 3, lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2)),
    ],
)
def test_fragments_of_loads(shape, registers, place):
    """Figures of the shapes: which lane and column register r of thread t holds."""
    lanes, columns = fragment(shape, {"32x32b": 4, "16x256b": 2, "16x128b": 2, "16x64b": 3}[shape])
    assert lanes.shape == columns.shape == (registers, 32)
    for t in range(32):
        for r in range(registers):
            assert (lanes[r, t], columns[r, t]) == place(t, r)


def test_fragments_have_at_most_128_registers():
    fragment("16x256b", 32)
    for shape, count in (("16x256b", 64), ("16x128b", 128)):
        with pytest.raises(PtxError, match="at most 128"):
            fragment(shape, count)


ALLOCATE = """
    setp.lt.u32 %p1, %thread, 32;
    @!%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%shared], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r1, [%shared];
    shr.u32 %r2, %thread, 5;
    shl.b32 %r2, %r2, 21;
    add.s32 %r2, %r2, %r1;
"""
"""%r1: address of the allocation; %r2: the part of it that this warp may access."""
RELEASE = """
    bar.sync 0;
    setp.lt.u32 %p1, %thread, 32;
    @!%p1 bra RELEASED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;
RELEASED:
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2+3], {%a, %b};"
VISIBLE = "tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%o, %q}, [%r2+3]; tcgen05.wait::ld.sync.aligned;"
THREADS = np.arange(128, dtype=np.uint32)


def run_memory(body: str, **options):
    return run_snippet(
        body,
        inputs={"a": THREADS, "b": THREADS + 1000},
        outputs={"o": np.uint32, "q": np.uint32},
        threads=128,
        shared_bytes=64,
        **options,
    ).outputs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_stored_is_loaded(schedule):
    out = run_memory(ALLOCATE + STORE + VISIBLE + LOAD + RELEASE, schedule=schedule)
    assert (out["o"] == THREADS).all() and (out["q"] == THREADS + 1000).all()


GOOD = ALLOCATE + STORE + VISIBLE + LOAD + RELEASE


@pytest.mark.parametrize(
    ("body", "fault", "words"),
    [
        (GOOD.replace(STORE, ""), UninitialisedRead, "tcgen05.ld"),
        (GOOD.replace(VISIBLE, ""), DataRace, "tcgen05.st of warp"),
        (GOOD.replace("[%r2+3]", "[%r2+63]"), TensorMemoryFault, "[63, 65)"),
        (GOOD.replace("[%r2+3]", "[%r1+3]"), TensorMemoryFault, "it may access [32, 64)"),
        (GOOD.replace("[%shared], 64;", "[%shared], 48;"), TensorMemoryFault, "power of two"),
        (ALLOCATE + STORE + VISIBLE + LOAD, TensorMemoryFault, "without releasing"),
        (GOOD.replace("%r1, 64;", "%r1, 32;"), TensorMemoryFault, "release of 32 columns"),
        (GOOD + RELEASE.replace("RELEASED", "TWICE"), TensorMemoryFault, "allocated are {}"),
    ],
)
def test_misuse_of_tensor_memory_is_reported(body, fault, words):
    with pytest.raises(fault) as error:
        run_memory(body, schedule=SCHEDULES[0])
    assert words in str(error.value)


# 16 columns of known words: %a is 1000 times the lane; a quarter of the lanes for each warp.
KNOWN_WORDS = "".join(
    f"add.s32 %r{20 + c}, %a, {c};" for c in range(16)
) + "tcgen05.st.sync.aligned.32x32b.x16.b32 [%r2], {{{}}};".format(
    ", ".join(f"%r{20 + c}" for c in range(16))
)


def loaded(form):
    """The two registers that each thread receives from a load of the known words."""
    body = ALLOCATE + KNOWN_WORDS + VISIBLE + f"tcgen05.ld.sync.aligned.{form}" + RELEASE
    return run_snippet(
        body,
        inputs={"a": 1000 * THREADS},
        outputs={"o": np.uint32, "q": np.uint32},
        threads=128,
        shared_bytes=64,
    ).outputs


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            "16x64b.x2.b32 {%o, %q}, [%r2+1];",
            lambda t, r: (t // 4 + 8 * (t % 2), 1 + 2 * r + t // 2 % 2),
        ),
        ("16x128b.x1.b32 {%o, %q}, [%r2+2];", lambda t, r: (t // 4 + 8 * r, 2 + t % 4)),
        ("16x32bx2.x2.b32 {%o, %q}, [%r2+3], 8;", lambda t, r: (t % 16, 3 + r + 8 * (t // 16))),
        ("32x32b.x2.b32 {%o, %q}, [%r2];", lambda t, r: (t, r)),
    ],
)
def test_loads_of_every_shape(form, words):
    """Which word each thread receives, in the two registers of a load."""
    out = loaded(form)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for r, name in enumerate("oq"):
            lane, column = words(t, r)
            assert out[name][thread] == 1000 * (32 * warp + lane) + column, (thread, r)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("32x32b.x2.pack::16b.b32 {%o, %q}, [%r2+1];", lambda t, r: (t, 1 + 2 * r)),
        ("16x128b.x1.pack::16b.b32 {%o, %q}, [%r2];", lambda t, r: (t // 4 + 8 * r, 2 * (t % 4))),
        (
            "16x32bx2.x2.pack::16b.b32 {%o, %q}, [%r2], 5;",
            lambda t, r: (t % 16, 2 * r + 5 * (t // 16)),
        ),
    ],
)
def test_loads_that_pack_two_columns(form, words):
    """The low halves of two neighbouring columns, the lower column in the low half."""
    out = loaded(form)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for r, name in enumerate("oq"):
            lane, column = words(t, r)
            low = (1000 * (32 * warp + lane) + column) % 65536
            assert out[name][thread] == low + ((low + 1) % 65536 << 16), (thread, r)


def test_stores_that_unpack_two_columns():
    store = "tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r2+3], %a;"
    out = run_snippet(
        ALLOCATE + store + VISIBLE + LOAD + RELEASE,
        inputs={"a": THREADS + (THREADS + 500 << 16)},
        outputs={"o": np.uint32, "q": np.uint32},
        threads=128,
        shared_bytes=64,
    ).outputs
    assert (out["o"] % 65536 == THREADS).all() and (out["q"] % 65536 == THREADS + 500).all()


RNG = np.random.default_rng(23)
A_VALUES = RNG.integers(-8, 9, (128, 16)).astype(np.float32)
B_VALUES = RNG.integers(-8, 9, (32, 16)).astype(np.float32)
DESCRIPTOR = 128 >> 4 << 16 | (256 >> 4) << 32 | 1 << 46
INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | (32 >> 3) << 17 | (128 >> 4) << 24

# A (128 x 16) is at shared offset 1024, B (32 x 16) at 5120, the mbarrier at 16; D is at column 0.
FILL = """
    mul.wide.u32 %d1, %thread, 32;
    add.s64 %d2, %d1, %g;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2];
    ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%d2+16];
    shl.b32 %r3, %thread, 5;
    add.s32 %r3, %r3, %shared;
    st.shared.v4.b32 [%r3+1024], {%r4, %r5, %r6, %r7};
    st.shared.v4.b32 [%r3+1040], {%r8, %r9, %r10, %r11};
    setp.lt.u32 %p2, %thread, 32;
    @!%p2 bra FILLED;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2+4096];
    ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%d2+4112];
    st.shared.v4.b32 [%r3+5120], {%r4, %r5, %r6, %r7};
    st.shared.v4.b32 [%r3+5136], {%r8, %r9, %r10, %r11};
FILLED:
    setp.eq.b32 %p3, %thread, 0;
    add.s32 %r12, %shared, 16;
    @!%p3 bra READY;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
READY:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    add.s32 %r13, %shared, 1024;
    shr.u32 %r13, %r13, 4;
    cvt.u64.u32 %d3, %r13;
    mov.b64 %d4, DESCRIPTOR;
    add.s64 %d3, %d3, %d4;
    add.s64 %d5, %d3, 256;
"""
ISSUE = """
    @!%p3 bra ISSUED;
    mov.b32 %r14, INSTRUCTION;
    tcgen05.mma.cta_group::1.kind::f16 [%r1], %d3, %d5, %r14, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r1], %d3, %d5, %r14, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
ISSUED:
"""
AWAIT = """
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12], 0;
    @!%p4 bra AGAIN;
"""
NAMES = [f"c{i}" for i in range(32)]
READ = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{', '.join('%' + n for n in NAMES)}}}, [%r2];"


def core_matrices(values: np.ndarray) -> np.ndarray:
    """K-major without swizzle: 8x8 blocks of 128 bytes, K blocks first."""
    rows, depth = values.shape
    blocks = values.reshape(rows // 8, 8, depth // 8, 8).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks.astype(BF16)).reshape(-1)


def run_matmul(body: str, schedule: Schedule) -> np.ndarray:
    text = body.replace("DESCRIPTOR", str(DESCRIPTOR)).replace("INSTRUCTION", str(INSTRUCTION))
    out = run_snippet(
        text,
        outputs=dict.fromkeys(NAMES, np.float32),
        buffers={
            "g": np.concatenate([core_matrices(A_VALUES), core_matrices(B_VALUES)]).view(np.uint32)
        },
        threads=128,
        shared_bytes=8192,
        schedule=schedule,
    )
    return np.stack([out.outputs[name] for name in NAMES], axis=1)


MATMUL = ALLOCATE + FILL + ISSUE + AWAIT + READ + RELEASE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matmul_of_shared_operands(schedule):
    assert (run_matmul(MATMUL, schedule) == 2 * (A_VALUES @ B_VALUES.T)).all()


# Each thread packs its row of A into 8 columns of tensor memory, two elements a word.
A_IN_TENSOR_MEMORY = """
    mul.wide.u32 %d6, %thread, 32;
    add.s64 %d6, %d6, %h;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d6];
    ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%d6+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r2+32],
        {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matmul_with_a_in_tensor_memory(schedule):
    body = ALLOCATE + FILL + A_IN_TENSOR_MEMORY + ISSUE + AWAIT + READ + RELEASE
    body = body.replace("[%r1], %d3, %d5", "[%r1], [%r1+32], %d5")
    text = body.replace("DESCRIPTOR", str(DESCRIPTOR)).replace("INSTRUCTION", str(INSTRUCTION))

    def run(text: str) -> np.ndarray:
        out = run_snippet(
            text,
            outputs=dict.fromkeys(NAMES, np.float32),
            buffers={
                "g": np.concatenate([core_matrices(A_VALUES), core_matrices(B_VALUES)]).view(
                    np.uint32
                ),
                "h": A_VALUES.astype(BF16).view(np.uint32),
            },
            threads=128,
            shared_bytes=8192,
            schedule=schedule,
        )
        return np.stack([out.outputs[name] for name in NAMES], axis=1)

    assert (run(text) == 2 * (A_VALUES @ B_VALUES.T)).all()
    with pytest.raises(DataRace, match=r"tcgen05\.st of warp"):
        run(text.replace("tcgen05.wait::st.sync.aligned;", ""))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("old", "new", "fault", "words"),
    [
        (AWAIT, "", ProgramFault, ""),
        ("fence.proxy.async.shared::cta;", "", DataRace, "no fence.proxy.async"),
        ("@!%p3 bra ISSUED;", "", ProgramFault, "must be issued by one thread"),
        (AWAIT, "st.shared.b32 [%r3+1024], 0;" + AWAIT, DataRace, "tensor core of warp 0"),
        ("%d5, %r14, 0;", "%d5, %r14, 1;", UninitialisedRead, "tcgen05.mma (D)"),
    ],
)
def test_misuse_of_matmuls_is_reported(old, new, fault, words, schedule):
    with pytest.raises(fault) as error:
        run_matmul(MATMUL.replace(old, new), schedule)
    assert words in str(error.value)
