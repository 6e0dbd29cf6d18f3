"""Asynchronous matmuls of a warpgroup: issue by four warps, execution, groups.

A matmul executes when all four warps have issued it: at once, or when it is waited for, as the
schedule says. Matmuls execute in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax_flash.emulator.clocks import TENSOR
from jax_flash.emulator.errors import BarrierFault

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block
    from jax_flash.emulator.warp import Warp

WARPS = 4


@dataclass(slots=True, eq=False)
class Matmul:
    """One matmul; ``parts`` are the warps that have issued it, in order of their index."""

    key: Any
    """What must be equal for all four warps: instruction and uniform operands."""
    execute: Callable[[list[Any]], None]
    """Called with the four parts."""
    parts: list[Any] = field(default_factory=lambda: [None] * WARPS)
    done: bool = False


@dataclass(slots=True, eq=False)
class WarpIssue:
    """What one warp has issued."""

    count: int = 0
    groups: list[int] = field(default_factory=list)
    """For each committed group, how many matmuls had been issued at its end."""
    waited: int = 0
    """How many of the oldest matmuls the warp knows to be complete."""
    registers: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    """Accumulators and register operands of each matmul issued."""


class Warpgroup:
    """Four consecutive warps of a block."""

    def __init__(self, block: "Block", index: int) -> None:
        """Takes the block and the index of the warpgroup."""
        self.block = block
        self.index = index
        self.queue: list[Matmul] = []
        self.executed = 0
        self._issues = [WarpIssue() for _ in range(WARPS)]

    def group_number(self, warp: "Warp") -> int:
        """Returns the number, from 1, of the group that a warp's next matmul joins."""
        return len(self._issues[warp.index % WARPS].groups) + 1

    def issue(
        self,
        warp: "Warp",
        matmul: Matmul,
        part: Any,
        registers: tuple[frozenset[int], frozenset[int]],
    ) -> None:
        """Adds one warp's part of its next matmul.

        Args:
          warp: the warp that issues.
          matmul: used if this warp is the first to issue it.
          part: what ``execute`` needs from this warp.
          registers: accumulators and register operands, owned by the matmul until waited for.

        Raises:
          BarrierFault: the warps of the group issue different matmuls.
        """
        issue = self._issues[warp.index % WARPS]
        if issue.count == len(self.queue):
            self.queue.append(matmul)
        shared = self.queue[issue.count]
        if shared.key != matmul.key:
            raise BarrierFault(
                f"the warps of warpgroup {self.index} issue different matmuls: {shared.key} and "
                f"{matmul.key}"
            )
        shared.parts[warp.index % WARPS] = part
        issue.count += 1
        issue.registers.append(registers)
        accumulators, operands = registers
        warp.tensor.accumulators |= accumulators
        warp.tensor.operands |= operands
        if all(part is not None for part in shared.parts) and self._executes_early():
            self._execute_to(issue.count)

    def _executes_early(self) -> bool:
        return self.block.machine.schedule.matmul_is_early()

    def _execute_to(self, count: int) -> None:
        while self.executed < count:
            matmul = self.queue[self.executed]
            matmul.execute(matmul.parts)
            matmul.done = True
            matmul.parts = []
            self.executed += 1

    def commit(self, warp: "Warp") -> None:
        """Closes a warp's open group."""
        issue = self._issues[warp.index % WARPS]
        issue.groups.append(issue.count)

    def ready(self, warp: "Warp", newest: int) -> bool:
        """Whether all warps have issued what all but the ``newest`` groups of a warp hold."""
        needed = self._needed(warp, newest)
        return all(issue.count >= needed for issue in self._issues)

    def _needed(self, warp: "Warp", newest: int) -> int:
        groups = self._issues[warp.index % WARPS].groups
        return groups[-1 - newest] if len(groups) > newest else 0

    def wait(self, warp: "Warp", newest: int) -> None:
        """Executes what a warp waits for, and returns its registers to it."""
        issue = self._issues[warp.index % WARPS]
        needed = self._needed(warp, newest)
        self._execute_to(needed)
        for accumulators, _ in issue.registers[issue.waited : needed]:
            warp.mark_defined(accumulators, True)
        issue.waited = max(issue.waited, needed)
        tensor = warp.tensor
        tensor.accumulators, tensor.operands = set(), set()
        for accumulators, operands in issue.registers[issue.waited :]:
            tensor.accumulators |= accumulators
            tensor.operands |= operands
        if warp.clock is not None:
            done = max(0, len(issue.groups) - newest)
            warp.clock.complete(warp.clock.agent(TENSOR), done)

    def unfinished(self, warp: "Warp") -> bool:
        """Whether a warp has matmuls that it has not waited for."""
        issue = self._issues[warp.index % WARPS]
        return issue.waited < issue.count
