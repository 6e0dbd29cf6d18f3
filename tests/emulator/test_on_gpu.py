"""On a GPU: each kernel gives what the emulator says, up to the freedom that the ISA leaves.

Both run the same cubin's instructions on the same inputs, one kernel at a time: what a kernel reads
on the emulator is what the GPU's kernels before it wrote. Row statistics and the last step of dQ
are IEEE arithmetic in a fixed order, so their bits must agree. Elsewhere hardware may differ: in
the last bits of `ex2` and `lg2`, in the order and precision of a matmul's sums, and where ptxas
fuses a multiplication and an addition that PTX leaves unfused (it does in both main kernels).

    JAX_FLASH_REPORT=emulator.csv pytest -m gpu tests/emulator/test_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.emulator.launch import ELEMENT_TYPES, Options
from jax_flash.emulator.machine import Checks
from jax_flash.emulator.schedule import Schedule
from jax_flash.ops import registration
from jax_flash.ops.dispatch import KernelCall
from jax_flash.ops.ffi_calls import call_handler
from jax_flash.spec.launch_plan import Operation
from jax_flash.spec.variant import DType, KernelRole, KernelVariant

from .comparison import Row, difference, same_bits, write_row
from .kernel_runs import Arrays, Problem, run_with_statistics

OPTIONS = Options(
    schedule=Schedule(order="round_robin", landing="eager"), checks=Checks(races=False)
)
MASKS = {"full": {}, "causal": {"upper": 16}, "window": {"lower": -70, "upper": 30}}


def _plain_problems() -> Iterable[Problem]:
    """Every dtype, head dimension and mask, in both backward modes, with ragged tails."""
    for dtype, head_dim, mask, deterministic in product(
        DType, (64, 128), MASKS.values(), (False, True)
    ):
        yield Problem(
            dtype=dtype,
            head_dim=head_dim,
            query_length=200,
            key_length=216,
            query_heads=2,
            key_heads=1 if deterministic else 2,
            deterministic=deterministic,
            **mask,
        )


# Padding, offsets and sinks; what lies past the lengths is NaN. Heads narrower than their tile.
FEATURE_PROBLEMS = (
    Problem(
        query_length=200,
        key_length=216,
        batch=2,
        query_heads=2,
        upper=0,
        query_offset=(16, -30),
        query_lengths=(170, 200),
        key_lengths=(216, 99),
        sinks=True,
    ),
    Problem(
        query_length=200,
        key_length=216,
        head_dim=104,
        value_head_dim=72,
        query_heads=2,
        key_lengths=(200,),
        deterministic=True,
    ),
)
# The same on general kernels.
FEATURE_PROBLEMS += tuple(replace(problem, soft_cap=2.0) for problem in FEATURE_PROBLEMS)
WIDE_PROBLEMS = (
    Problem(query_length=200, key_length=216, head_dim=192, value_head_dim=128, upper=16),
    Problem(query_length=200, key_length=216, head_dim=256, query_heads=2, **MASKS["window"]),
    Problem(
        dtype=DType.F16,
        query_length=200,
        key_length=216,
        head_dim=256,
        batch=2,
        query_heads=3,
        query_lengths=(170, 200),
        key_lengths=(216, 99),
    ),
)
BACKWARD_PROBLEMS = (*_plain_problems(), *FEATURE_PROBLEMS, *WIDE_PROBLEMS)
FORWARD_PROBLEMS = tuple(p for p in BACKWARD_PROBLEMS if not p.deterministic or p.features)


def _backward_name(problem: Problem) -> str:
    kernel = problem.backward().kernels[1]
    return kernel.name.partition("/")[2] + _suffix(problem)


def _forward_name(problem: Problem) -> str:
    return problem.forward().kernels[0].name.partition("/")[2] + _suffix(problem)


def _suffix(problem: Problem) -> str:
    return "".join(f"_{name}" for name in sorted(f.name.lower() for f in problem.features))


def run_on_gpu(problem: Problem, operation: Operation, arrays: Arrays) -> Arrays:
    """Runs an operation's kernels through the FFI; returns every buffer, workspaces too."""
    call = KernelCall(
        forward=problem.forward(),
        backward=problem.backward(),
        scale=problem.scale,
        soft_cap=problem.soft_cap or 0.0,
        band=problem.band,
    )
    operands = {name: jnp.asarray(arrays[name]) for name in operation.operand_names}
    results = jax.jit(lambda named: call_handler(operation, call, named))(operands)
    return {name: np.asarray(result) for name, result in results.items()}


def emulate(
    problem: Problem,
    operation: Operation,
    kernels: tuple[KernelVariant, ...],
    outputs: tuple[str, ...],
    arrays: Arrays,
) -> Arrays:
    """Runs some of an operation's kernels on the emulator; results in `arrays` are operands."""
    given = tuple(buffer for buffer in operation.results if buffer.name in arrays)
    made = tuple(buffer for buffer in operation.results if buffer.name in outputs)
    part = replace(operation, kernels=kernels, operands=(*operation.operands, *given), results=made)
    directory = registration.REGISTRATION.directory
    results, _ = run_with_statistics(problem, part, arrays, directory, OPTIONS)
    return results


def _compare(
    problem: Problem,
    kernel: KernelVariant,
    name: str,
    pair: tuple[np.ndarray, np.ndarray],
    step_of: np.dtype,
    row_axes: tuple[int, ...],
) -> Row:
    """Compares an output of a kernel on the GPU and on the emulator, and reports it."""
    gpu, emulated = pair
    found = difference(gpu, emulated, step_of=step_of, row_axes=row_axes)
    row = Row(
        kernel=kernel.name,
        output=name,
        queries=problem.query_length,
        keys=problem.key_length,
        heads=problem.query_heads,
        key_heads=problem.key_heads,
        features=" ".join(sorted(f.name.lower() for f in problem.features)),
        step=np.dtype(step_of).name,
        values=gpu.size,
        equal_bits=round(found.equal_bits, 6),
        largest=float(f"{found.largest:.4g}"),
        largest_steps=float(f"{found.largest_steps:.4g}"),
    )
    write_row(row)
    return row


FLOAT32 = np.dtype(np.float32)
LIMITS = {"lse": (0.35, 4.0), "dq_accumulator": (0.25, 1.0)}
"""Least share of equal bits and most steps, by output; those of the others are below.

Measured on one H200 (benchmarks/results/2026-11-29_nvidia-h200_emulator.csv): lse 48 % and 3 steps,
the accumulator of dQ 32 % and 0.59 steps, output, dK and dV 98.5 % and 1 step. On 2026-11-30, with
D=256: lse 38 %, dK 97.8 %.
"""
DEFAULT_LIMITS = (0.97, 1.0)


def _check(row: Row) -> None:
    share, steps = LIMITS.get(row.output, DEFAULT_LIMITS)
    assert row.equal_bits >= share, row
    assert row.largest_steps <= steps, row


@pytest.mark.gpu
@pytest.mark.parametrize("problem", FORWARD_PROBLEMS, ids=_forward_name)
def test_forward_agrees(problem: Problem):
    operation, arrays = problem.forward(), problem.inputs()
    gpu = run_on_gpu(problem, operation, arrays)
    names = ("output", "lse")
    emulated = emulate(problem, operation, operation.kernels, names, arrays)
    steps = {"output": (ELEMENT_TYPES[problem.dtype], (-1,)), "lse": (FLOAT32, (-2,))}
    for name in names:
        pair = (gpu[name], emulated[name])
        _check(_compare(problem, operation.kernels[0], name, pair, *steps[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", BACKWARD_PROBLEMS, ids=_backward_name)
def test_backward_agrees(problem: Problem):
    """One kernel for dK and dV, which up to D = 128 adds to an accumulator of dQ, and one for dQ.

    The accumulator is stored tile by tile in an order of its own, so its rows are taken to extend
    over a whole head. That the row statistics zeroed it shows in what is added to it.
    """
    arrays = problem.inputs()
    forward = run_on_gpu(problem, problem.forward(), arrays)
    arrays |= {name: forward[name] for name in ("output", "lse")}
    operation = problem.backward()
    gpu = run_on_gpu(problem, operation, arrays)
    roles = {kernel.role: kernel for kernel in operation.kernels}
    split = KernelRole.BACKWARD_Q in roles
    statistics = roles[KernelRole.ROW_STATISTICS]
    gradients = roles[KernelRole.BACKWARD_KV if split else KernelRole.BACKWARD]
    last = roles[KernelRole.BACKWARD_Q if split else KernelRole.FINISH_DQ]
    element = ELEMENT_TYPES[problem.dtype]

    names = tuple(buffer.name for buffer in operation.results if buffer.name != "d_query")
    emulated = emulate(problem, operation, (statistics, gradients), names, arrays)
    for name in ("lse_log2", "delta"):
        row = _compare(problem, statistics, name, (gpu[name], emulated[name]), FLOAT32, ())
        assert row.equal_bits == 1, row
    axes = {"d_key": (-1,), "d_value": (-1,)} | ({} if split else {"dq_accumulator": (-2, -1)})
    for name, row_axes in axes.items():
        pair = (gpu[name], emulated[name])
        _check(_compare(problem, gradients, name, pair, element, row_axes))

    workspaces = ("lse_log2", "delta") if split else ("dq_accumulator",)
    from_gpu = arrays | {name: gpu[name] for name in workspaces}
    finished = emulate(problem, operation, (last,), ("d_query",), from_gpu)["d_query"]
    row = _compare(problem, last, "d_query", (gpu["d_query"], finished), element, (-1,))
    if split:
        _check(row)
    else:  # nothing but a scale and a rounding
        assert row.equal_bits == 1, row
    # What was compared was no constant.
    assert not same_bits(gpu["d_query"], np.zeros_like(gpu["d_query"])).all()
