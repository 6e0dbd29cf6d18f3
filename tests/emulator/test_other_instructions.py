"""Instructions that no other test names: special functions, fences, launches, sleeping, traps."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from jax_flash.emulator.errors import ConvergenceFault, ProgramFault, PtxError, UninitialisedRead
from jax_flash.emulator.schedule import Schedule

from .snippet import per_lane, run_snippet

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("name", "exact"), [("tanh", math.tanh), ("sin", math.sin), ("cos", math.cos)]
)
def test_special_functions(name: str, exact):
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    out = run_snippet(
        f"{name}.approx.f32 %o, %x;", inputs={"x": x}, outputs={"o": np.float32}
    ).outputs["o"]
    assert out.tolist() == [np.float32(exact(float(v))) for v in x]


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", np.dtype(np.float16)), ("bf16x2", BF16)])
def test_special_functions_of_pairs(kind: str, dtype: np.dtype):
    x = np.linspace(-2, 2, 64).astype(dtype)
    ftz = ".ftz" if kind == "bf16x2" else ""
    out = run_snippet(
        f"ex2.approx{ftz}.{kind} %o, %x; tanh.approx.{kind} %t, %x;",
        inputs={"x": x.view(np.uint32)},
        outputs={"o": np.uint32, "t": np.uint32},
    ).outputs
    for result, exact in (("o", lambda v: 2.0**v), ("t", math.tanh)):
        want = np.array([exact(float(v)) for v in x]).astype(np.float32).astype(dtype)
        assert (out[result].view(dtype) == want).all()


def test_signs_properties_and_comparisons_to_registers():
    x = per_lane([1.5, -2.0, 0.0, np.nan, np.inf, 1e-40], np.float32)
    out = run_snippet(
        "copysign.f32 %c, %x, %y; testp.finite.f32 %f, %x; testp.subnormal.f32 %s, %x;"
        " testp.normal.f32 %n, %x; testp.notanumber.f32 %q, %x; testp.infinite.f32 %i, %x;"
        " testp.number.f32 %m, %x; set.gt.u32.f32 %g, %x, 0f3F800000;"
        " set.lt.f32.s32 %h, %z, 3; cnot.b32 %k, %z;",
        inputs={"x": x, "y": np.full(32, 7.0, np.float32), "z": np.arange(32, dtype=np.int32)},
        outputs={
            "c": np.float32,
            **dict.fromkeys("fsnqim", bool),
            "g": np.uint32,
            "h": np.float32,
            "k": np.uint32,
        },
    ).outputs
    assert out["c"][:3].tolist() == [7, -7, 7]
    assert out["f"][:6].tolist() == [True, True, True, False, False, True]
    assert out["s"][:6].tolist() == [False] * 5 + [True]
    assert out["n"][:6].tolist() == [True, True, False, False, False, False]
    assert out["q"][:6].tolist() == [False, False, False, True, False, False]
    assert out["i"][:6].tolist() == [False] * 4 + [True, False]
    assert out["m"][:6].tolist() == [True, True, True, False, True, True]
    assert out["g"][:6].tolist() == [0xFFFFFFFF, 0, 0, 0, 0xFFFFFFFF, 0]
    assert out["h"][:4].tolist() == [1, 1, 1, 0] and out["k"][:2].tolist() == [1, 0]


def test_a_dependent_launch_needs_no_wait_here():
    """Kernels run one after another: both forms are accepted, and change nothing."""
    body = "griddepcontrol.wait; mov.b32 %o, %lane; griddepcontrol.launch_dependents;"
    out = run_snippet(body, outputs={"o": np.uint32}).outputs["o"]
    assert out.tolist() == list(range(32))
    with pytest.raises(PtxError, match="needs one of"):
        run_snippet("griddepcontrol.later;")


def test_fences_of_every_kind_are_accepted():
    run_snippet(
        "fence.sc.cta; fence.acq_rel.cluster; fence.acquire.gpu; fence.release.sys; membar.gl;"
        " fence.proxy.async.global; fence.proxy.async; fence.proxy.alias;"
        " fence.proxy.tensormap::generic.release.gpu;"
        " tcgen05.fence::before_thread_sync; tcgen05.fence::after_thread_sync; nanosleep.u32 20;"
    )
    for unknown in ("fence.acq_rel.warp;", "fence.proxy.fast;", "membar.acquire;"):
        with pytest.raises(PtxError):
            run_snippet(unknown)


def test_a_trap_is_a_fault():
    run_snippet("setp.eq.b32 %p1, %lane, 40; @%p1 trap;")
    with pytest.raises(ProgramFault, match="warp 0 of block 0 executes trap"):
        run_snippet("setp.eq.b32 %p1, %lane, 4; @%p1 trap;")


def test_barriers_under_their_long_names():
    """`barrier` without `.aligned` serves threads of a warp that arrive one by one."""
    body = (
        "shl.b32 %r1, %thread, 2; add.s32 %r1, %r1, %shared; xor.b32 %r2, %r1, 128;"
        "st.shared.b32 [%r1], %thread; barrier.cta.sync.aligned 2, 64; ld.shared.b32 %o, [%r2];"
    )
    out = run_snippet(body, outputs={"o": np.uint32}, threads=64, shared_bytes=256).outputs["o"]
    assert out.tolist() == [t ^ 32 for t in range(64)]


def test_barriers_of_a_warp_wait_for_their_members():
    """Lanes 0 to 15 store, the others read; a lane that is no member must not execute it."""
    body = (
        "setp.lt.u32 %p1, %lane, 16; and.b32 %r3, %lane, 15; shl.b32 %r1, %r3, 2;"
        " add.s32 %r1, %r1, %shared; mov.b32 %o, 0; @!%p1 bra READ; st.shared.b32 [%r1], %lane;"
        " READ: bar.warp.sync MASK; @%p1 bra END; ld.shared.b32 %o, [%r1]; END:"
    )
    for seed in range(5):
        out = run_snippet(
            body.replace("MASK", "-1"),
            outputs={"o": np.uint32},
            shared_bytes=64,
            schedule=Schedule(order="random", seed=seed),
        ).outputs["o"]
        assert out[16:].tolist() == list(range(16))
    with pytest.raises(ConvergenceFault, match="lacks a lane"):
        run_snippet(body.replace("MASK", "65535"), outputs={"o": np.uint32}, shared_bytes=64)


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(order="round_robin"), Schedule(landing="lazy")]
)
def test_waiting_for_all_thread_copies(schedule: Schedule):
    body = (
        "mul.wide.u32 %d1, %lane, 16; add.s64 %d1, %d1, %g; shl.b32 %r1, %lane, 4;"
        " add.s32 %r1, %r1, %shared; cp.async.ca.shared.global [%r1], [%d1], 16; WAIT"
        " ld.shared.b32 %o, [%r1];"
    )
    options = {
        "outputs": {"o": np.uint32},
        "buffers": {"g": np.arange(128, dtype=np.uint32)},
        "shared_bytes": 512,
        "schedule": schedule,
    }
    out = run_snippet(body.replace("WAIT", "cp.async.wait_all;"), **options).outputs["o"]
    assert out.tolist() == list(range(0, 128, 4))
    with pytest.raises(ProgramFault):
        run_snippet(body.replace("WAIT", ""), **options)


def test_ranks_of_shared_addresses():
    body = """
    mov.u32 %r1, %cluster_ctarank;
    xor.b32 %r2, %r1, 1;
    mapa.shared::cluster.u32 %r3, %shared, %r2;
    getctarank.shared::cluster.u32 %r4, %r3;
    cvt.u64.u32 %d1, %r3;
    cvta.shared::cluster.u64 %d1, %d1;
    getctarank.u64 %r5, %d1;
    mul.lo.s32 %r6, %r5, 10;
    add.s32 %r6, %r6, %r4;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d2, %d2, %g;
    st.global.b32 [%d2], %r6;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    out = run_snippet(
        body, buffers={"g": np.zeros(2, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1)
    )
    assert out.buffers["g"].tolist() == [11, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cvt.pack.sat.s8.s32.b32 %r1, %r2, %r3, %r4;", "cvt.pack is not implemented"),
        ("prefetch.global.L3 [%g];", "needs one of"),
        ("fma.rn.f64 %d1, %d2, %d3, %d4;", "fma.f64 is not implemented"),
        ("ld.local.b32 %r1, [%r2];", "local memory is not implemented"),
        ("red.global.xor.f16x2 [%g], %r1;", "does not exist"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "tcgen05.shift"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d2, %r2, 0;", "kind::"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, 0;", ".ws"),
    ],
)
def test_what_is_left_out_is_named(text: str, words: str):
    with pytest.raises(PtxError) as error:
        run_snippet(text, buffers={"g": np.zeros(4, np.uint32)})
    assert words in str(error.value) and "line" in str(error.value)


def test_reads_before_writes_of_generic_addresses_are_found():
    with pytest.raises(UninitialisedRead):
        run_snippet(
            "cvt.u64.u32 %d1, %shared; cvta.shared.u64 %d1, %d1; ld.b32 %r1, [%d1];",
            shared_bytes=16,
        )


def test_reductions_of_floats_over_lanes():
    """`redux.sync` of float32: magnitudes with `.abs`; NaN wins with `.NaN` and loses without."""
    x = np.linspace(-4, 3, 32, dtype=np.float32)
    x[7] = np.nan
    out = run_snippet(
        "redux.sync.min.f32 %a, %x, -1; redux.sync.max.abs.f32 %b, %x, -1;"
        " redux.sync.max.NaN.f32 %c, %x, -1; redux.sync.xor.b32 %e, %lane, -1;"
        " redux.sync.min.s32 %f, %z, -1; redux.sync.and.b32 %g, %z, -1;",
        inputs={"x": x, "z": np.arange(-9, 23, dtype=np.int32)},
        outputs={
            **dict.fromkeys("abc", np.float32),
            "e": np.uint32,
            "f": np.int32,
            "g": np.uint32,
        },
    ).outputs
    assert (out["a"] == -4).all() and (out["b"] == 4).all() and np.isnan(out["c"]).all()
    assert (out["e"] == 0).all() and (out["f"] == -9).all() and (out["g"] == 0).all()
    with pytest.raises(PtxError):
        run_snippet("redux.sync.add.f32 %r1, %r2, -1;")


def test_matches_votes_and_shuffles_with_their_predicates():
    out = run_snippet(
        "shr.u32 %r1, %lane, 3; match.any.sync.b32 %a, %r1, -1; mov.b32 %r2, 5;"
        " match.all.sync.b32 %b|%p, %r2, -1; match.all.sync.b32 %c|%q, %r1, -1;"
        " setp.lt.u32 %p1, %lane, 32; vote.sync.uni.pred %u, %p1, -1;"
        " setp.lt.u32 %p2, %lane, 3; vote.sync.uni.pred %v, !%p2, -1;"
        " shfl.sync.down.b32 %s|%t, %lane, 4, 0x1f, -1;",
        outputs={**dict.fromkeys("abcs", np.uint32), **dict.fromkeys("pquvt", bool)},
    ).outputs
    lane = np.arange(32)
    assert out["a"].tolist() == [0xFF << 8 * (n // 8) for n in range(32)]
    assert (out["b"] == 0xFFFFFFFF).all() and out["p"].all()
    assert (out["c"] == 0).all() and not out["q"].any()
    assert out["u"].all() and not out["v"].any()
    assert out["s"].tolist() == np.where(lane < 28, lane + 4, lane).tolist()
    assert (out["t"] == (lane < 28)).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_pairs_are_rounded_like_their_halves(mode: str):
    rng = np.random.default_rng(8)
    x, y = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    body = ""
    for name in ("add", "mul", "sub"):
        body += f"{name}.{mode}.f32x2 %{name}, %x, %y;"
    body += f"fma.{mode}.f32x2 %fma, %x, %y, %y;"
    names = ("add", "mul", "sub", "fma")
    paired = run_snippet(
        body,
        inputs={"x": x.view(np.uint64), "y": y.view(np.uint64)},
        outputs=dict.fromkeys(names, np.uint64),
    ).outputs
    for half in range(2):
        alone = run_snippet(
            body.replace("f32x2", "f32"),
            inputs={"x": x[half::2], "y": y[half::2]},
            outputs=dict.fromkeys(names, np.float32),
        ).outputs
        for name in names:
            assert (paired[name].view(np.float32)[half::2] == alone[name]).all(), name
