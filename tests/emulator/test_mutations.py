"""Kernels with one barrier, fence, wait or byte count missing: the emulator must say so.

A statement that synchronises is dropped or weakened, alone. What no run shows is listed with its
reason.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jax_flash.emulator.errors import ProgramFault
from jax_flash.emulator.launch import Options
from jax_flash.emulator.schedule import Schedule
from jax_flash.spec.kernel_args import kernel_arguments
from jax_flash.spec.launch_plan import Operation
from jax_flash.spec.variant import KernelRole

from .kernel_runs import Arrays, Problem, run_with_statistics
from .mutation import Mutant, mutants_of

ROUNDS = "backward, in rounds"
"""Of the kernel of all gradients; without turns, its blocks work through several key tiles."""

ROLES = {
    "forward": KernelRole.FORWARD,
    "backward": KernelRole.BACKWARD,
    ROUNDS: KernelRole.BACKWARD,
    "backward_kv": KernelRole.BACKWARD_KV,
    "backward_q": KernelRole.BACKWARD_Q,
}
# The stages of every pipeline are used again, three key tiles add to each query tile, and there is
# padding to clear in shared memory. Forward is a ragged kernel, backward with a soft cap a general
# one; the other of each has the same statements that synchronise.
PROBLEMS = {
    "forward": (
        Problem(query_length=400, key_length=650, key_lengths=(540,)),
        # A producer that loads one key tile for each query tile can be a round ahead.
        Problem(query_length=1000, key_length=90, query_lengths=(990,)),
    ),
    ROUNDS: (Problem(query_length=190, key_length=300, head_dim=128),),
    "backward": (
        Problem(
            query_length=330,
            key_length=300,
            head_dim=128,
            query_lengths=(310,),
            key_lengths=(290,),
            soft_cap=2.0,
            deterministic=True,
        ),
        # Keys that no query sees: nothing but the ranks of tiles holds back the producer.
        Problem(
            query_length=128,
            key_length=600,
            head_dim=128,
            upper=0,
            soft_cap=2.0,
            deterministic=True,
        ),
    ),
    "backward_kv": (
        Problem(
            query_length=420,
            key_length=90,
            head_dim=136,
            value_head_dim=128,
            query_lengths=(400,),
            key_lengths=(80,),
        ),
    ),
    "backward_q": (
        Problem(
            query_length=90,
            key_length=420,
            head_dim=136,
            value_head_dim=128,
            query_lengths=(80,),
            key_lengths=(400,),
        ),
    ),
}
"""What the mutants of a kernel run; one of the problems has to show each."""
MULTIPROCESSORS = {"backward": (3, 1)}
"""On how many they run each, if not on one. With one, a block works through several tiles, where
kernels can; with more, blocks have to wait for each other's turns."""
SCHEDULES = [
    Schedule(order="random", landing="lazy", seed=1),
    Schedule(order="random", landing="random", seed=2),
    Schedule(order="starve", starved=8, landing="random", seed=3),
    Schedule(order="starve", starved=5, landing="eager", seed=4),
    Schedule(order="starve", starved=0, landing="lazy", seed=9),
    Schedule(order="starve", starved=2, landing="eager", seed=5),
    Schedule(order="round_robin", landing="eager"),
]

SILENT = {
    "forward": {
        # The release of queries that see no key: not executed here.
        r"drop: mbarrier\.arrive": 1,
        # Clearing values by their segment id, before the loop and in it: not executed here.
        r"do not wait: mbarrier\.try_wait": 2,
        r"drop: fence\.proxy\.async": 2,
        r"drop: bar\.sync\s+1, 256": 2,
        # No register changes between the two matmuls of a step: the first one's fence serves both.
        r"drop: wgmma\.fence": 1,
    },
    "backward": {
        # Q and dO of a stage are released together, and Q's is waited for first.
        r"count one arrival less: mbarrier\.init": 2,
        # Likewise; the wait for room for the first rank, which returns at once; and one where
        # queries are cleared by their segment id: not executed here.
        r"do not wait: mbarrier\.try_wait": 3,
        # Clearing queries and keys by their segment ids: not executed here. Those of a turn are for
        # global memory, which is not tracked. And of clearing keys past their length: the last
        # queries come first, and clearing theirs does for both; without it this one is reported.
        r"drop: fence\.proxy\.async": 5,
        # Clearing by segment ids.
        r"drop: bar\.sync\s+1, 256": 1,
        # Clearing keys, as above.
        r"drop: bar\.sync\s+%r\d+, 128": 2,
        # A later commit closes the group, and what is waited for is waited for in full.
        r"drop: wgmma\.commit_group": 1,
        r"drop: cp\.async\.bulk\.commit_group": 1,
        # Lanes of a warp share a clock, and warps execute in one order (docs/emulator.md).
        r"drop: bar\.warp\.sync": 2,
    },
    ROUNDS: {
        # As above. Everything that separates one key tile from the next is reported.
        r"count one arrival less: mbarrier\.init": 2,
        r"do not wait: mbarrier\.try_wait": 1,
        r"drop: wgmma\.commit_group": 1,
        r"drop: cp\.async\.bulk\.commit_group": 1,
        r"drop: bar\.warp\.sync": 2,
    },
    "backward_kv": {
        # General kernels wait for Q and dO before they clear padding, and again where they read
        # them. Clearing by segment id, and in the first tile, is not executed here. The first wait
        # for a buffer of P returns at once.
        r"do not wait: mbarrier\.try_wait": 16,
        r"drop: fence\.proxy\.async": 7,
        r"drop: bar\.sync\s+1, 256": 6,
        # Clearing keys past their length: see "backward".
        r"drop: bar\.sync\s+3, 128": 1,
        # Lanes of a warp share a clock (docs/emulator.md).
        r"drop: bar\.warp\.sync": 4,
    },
    "backward_q": {
        # Clearing the padding of the first key tile visited: not executed here.
        r"do not wait: mbarrier\.try_wait": 1,
        r"drop: fence\.proxy\.async": 1,
        r"drop: bar\.sync\s+1, 256": 1,
        # A later commit closes the group, and what is waited for is waited for in full.
        r"drop: wgmma\.commit_group": 1,
        # General kernels read no scores before they have waited for dP, but with a soft cap.
        r"drop: wgmma\.wait_group\.sync\.aligned\s+1": 2,
        r"wait for one group less: wgmma\.wait_group\.sync\.aligned\s+1": 2,
    },
}
"""Changes that may go unreported, as patterns, how many of them at most, and why."""


class Case(NamedTuple):
    """A problem, what runs the kernel on it, and its inputs."""

    problem: Problem
    operation: Operation
    arrays: Arrays
    multiprocessors: int

    def run(self, directory: Path, schedule: Schedule) -> Arrays:
        """Runs the operation with the kernels of a directory."""
        problem, operation, arrays, multiprocessors = self
        options = Options(schedule=replace(schedule), multiprocessors=multiprocessors)
        return run_with_statistics(problem, operation, arrays, directory, options)[0]


def case_of(problem: Problem, role: KernelRole, directory: Path, multiprocessors: int = 1) -> Case:
    """Returns how a kernel of a role runs a problem."""
    inputs = problem.inputs()
    if role is KernelRole.FORWARD:
        return Case(problem, problem.forward(), inputs, multiprocessors)
    forward, _ = run_with_statistics(
        problem, problem.forward(), inputs, directory, Options(schedule=SCHEDULES[-1])
    )
    arrays = inputs | {"output": forward["output"], "lse": forward["lse"]}
    return Case(problem, only_up_to(role, problem.backward()), arrays, multiprocessors)


def only_up_to(role: KernelRole, operation: Operation) -> Operation:
    """Returns the operation without the kernels of gradients other than that of a role."""
    wanted = (KernelRole.ROW_STATISTICS, role)
    kernels = tuple(kernel for kernel in operation.kernels if kernel.role in wanted)
    taken = {argument.as_row()[1] for kernel in kernels for argument in kernel_arguments(kernel)}
    results = tuple(buffer for buffer in operation.results if buffer.name in taken)
    return replace(operation, kernels=kernels, results=results)


def copied_kernels(operation: Operation, source: Path, target: Path) -> None:
    """Copies the manifest and the PTX of an operation's kernels."""
    shutil.copy(source / "manifest.json", target)
    for kernel in operation.kernels:
        path = target / f"{kernel.name}.ptx"
        path.parent.mkdir(exist_ok=True)
        shutil.copy(source / f"{kernel.name}.ptx", path)


def unreported(name: str, source: Path, directory: Path, every: int) -> Iterator[Mutant]:
    """Yields, of each ``every``-th mutant of a kernel, those that no problem and schedule shows."""
    cases = [
        case_of(problem, ROLES[name], source, multiprocessors)
        for problem, multiprocessors in zip(
            PROBLEMS[name], MULTIPROCESSORS.get(name, repeat(1)), strict=False
        )
    ]
    copied_kernels(cases[0].operation, source, directory)
    (kernel,) = {
        kernel for case in cases for kernel in case.operation.kernels if kernel.role is ROLES[name]
    }
    path = directory / f"{kernel.name}.ptx"
    original = path.read_text()
    expected = [case.run(directory, SCHEDULES[-1]) for case in cases]
    for number, mutant in enumerate(mutants_of(original)):
        if number % every == 0:
            path.write_text(mutant.text)
            if not any(
                shows(case, directory, schedule, results)
                for case, results in zip(cases, expected, strict=True)
                for schedule in SCHEDULES
            ):
                yield mutant


def shows(case: Case, directory: Path, schedule: Schedule, expected: Arrays) -> bool:
    """Whether a schedule makes a mutant fault, or give other bits."""
    try:
        results = case.run(directory, schedule)
    except ProgramFault:
        return True
    return any(
        not np.array_equal(results[name].view(np.uint8), array.view(np.uint8))
        for name, array in expected.items()
        if name in ("output", "lse", "dq_accumulator", "d_query", "d_key", "d_value")
    )


def assert_only_known(mutants: Iterator[Mutant], name: str) -> None:
    """Asserts that no run showed only what `SILENT` lists, and no more of it."""
    left, surprises = Counter(SILENT[name]), []
    for mutant in mutants:
        known = next((p for p in SILENT[name] if re.match(p, mutant.change)), None)
        if known is None or not left[known]:
            surprises.append(f"line {mutant.line}: {mutant.change}")
        else:
            left[known] -= 1
    assert not surprises, "no run showed:\n" + "\n".join(surprises)


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_mutants_are_reported(name: str, kernel_directory: Path, tmp_path: Path):
    """Every sixth mutant; `JAX_FLASH_MUTANT_STEP=1` runs them all."""
    step = int(os.environ.get("JAX_FLASH_MUTANT_STEP", "6"))
    assert_only_known(unreported(name, kernel_directory, tmp_path, every=step), name)
