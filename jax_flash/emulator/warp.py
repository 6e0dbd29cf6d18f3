"""A warp: registers, threads that may diverge, and the loop that executes instructions.

Threads of a warp run converged where they can: groups of threads at different places are kept in a
list, the group at the lowest place runs first, and groups that meet are joined. Instructions that
need convergence wait for the other threads, so every interleaving that the independent thread
scheduling of the hardware allows still reaches them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_flash.emulator.errors import ConvergenceFault, ProgramFault, RegisterFault
from jax_flash.emulator.program import BRANCH, NORMAL, Instruction
from jax_flash.emulator.ptx_types import FILES, LANES, VIEWS
from jax_flash.emulator.special_registers import fill_rows
from jax_flash.emulator.wait import Wait

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block
    from jax_flash.emulator.clocks import Knowledge, WarpClock

_FAIRNESS = 16
"""Of diverged groups, every 16th choice is another one than the lowest, so that spins end."""


@dataclass(slots=True, eq=False)
class Group:
    """Threads at the same place."""

    pc: int
    lanes: Any
    """True for all 32, else a bool array."""
    wait: Wait | None = None
    converging: bool = False
    """Waits for other threads of the warp at an instruction that needs them."""

    def mask(self) -> np.ndarray:
        """Returns the lanes as an array."""
        return np.ones(LANES, bool) if self.lanes is True else self.lanes


@dataclass(slots=True, eq=False)
class TensorCoreUse:
    """What a warp's asynchronous matmuls own, and its groups of them."""

    accumulators: set[int] = field(default_factory=set)
    operands: set[int] = field(default_factory=set)
    fenced: bool = False
    """Whether any wgmma.fence has been executed."""
    touched: set[int] = field(default_factory=set)
    """Registers read or written by other instructions since the last wgmma.fence."""
    written: set[int] = field(default_factory=set)
    """Those of them that were written."""
    trace: list[int] = field(default_factory=list)
    """Instructions since then that are not yet counted in ``touched``."""


class Warp:
    """One warp of a block."""

    def __init__(self, block: "Block", index: int, clock: "WarpClock | None", threads: int) -> None:
        """Takes the block, the warp's index in it, its clock, and the threads of the block."""
        program = block.program
        self.block = block
        self.machine = block.machine
        self.index = index
        self.clock = clock
        self.program = program
        self.code = program.code
        self.rows: dict[str, list[np.ndarray]] = {}
        self.files: dict[str, np.ndarray] = {}
        for file, views in FILES.items():
            width = 1 if file == "pred" else int(file) // 8
            shape = (program.table.sizes[file], LANES * width)
            storage = np.full(shape, 0 if file == "pred" else 0xCB, np.uint8)
            for view in views:
                self.files[view] = storage.view(VIEWS[view])
                self.rows[view] = list(self.files[view])
        fill_rows(self)
        present = np.arange(LANES) < threads - index * LANES
        self.groups = [Group(0, True if present.all() else present)]
        self.pc = 0
        self.counts = [0] * len(self.code)
        self.defined: dict[int, Any] = {}
        self.checked = bytearray(len(self.code))
        self.tensor = TensorCoreUse()
        self.poll = (-1, -1)
        self.cluster_generation: int | None = None
        self.tensor_stores = 0
        self.fenced: Knowledge | None = None
        """What the last release fence lets a relaxed arrival pass on."""
        self.observed: Knowledge | None = None
        """What relaxed tests of mbarriers have seen, and the next fence makes known."""
        self._choices = 0
        self._traces = program.uses_wgmma

    @property
    def name(self) -> str:
        """Words for this warp."""
        return f"warp {self.index} of block {self.block.index}"

    @property
    def line(self) -> int:
        """Line of the instruction being executed."""
        return self.code[self.pc].line

    def runnable(self) -> bool:
        """Whether some thread can go on."""
        for group in self.groups:
            if group.wait is None:
                if not group.converging:
                    return True
            elif group.wait.ready():
                return True
        return False

    def describe(self) -> str:
        """Says where the threads stand and what they wait for."""
        parts = []
        for group in self.groups:
            instruction = self.code[group.pc]
            reason = "can run"
            if group.converging:
                reason = "waits for the other threads of the warp"
            elif group.wait is not None:
                reason = f"waits for {group.wait.text}"
            lanes = "" if len(self.groups) == 1 else f" lanes {np.flatnonzero(group.mask())}"
            parts.append(
                f"{self.name}{lanes}: line {instruction.line}: {instruction.text}: {reason}"
            )
        return "\n    ".join(parts)

    def run(self, quantum: int) -> int:
        """Executes up to ``quantum`` instructions; returns how many it executed."""
        left = quantum
        while left > 0 and self.groups:
            group = self._choose()
            if group is None:
                break
            try:
                if group.wait is not None:
                    self._resume(group)
                left -= self._advance(group, left)
            except ProgramFault as fault:
                current = self.code[group.pc]
                raise fault.at(f"{self.name}, line {current.line}: {current.text}") from None
        return quantum - left

    def _resume(self, group: Group) -> None:
        wait = group.wait
        group.wait = None
        self.pc = group.pc
        if wait is not None and wait.finish is not None:
            wait.finish()
            group.pc += 1

    def _choose(self) -> Group | None:
        """Joins groups that met; returns the one to run, or None when all wait."""
        if len(self.groups) == 1:
            group = self.groups[0]
            if group.converging:
                group.converging = False
            if group.wait is None or group.wait.ready():
                return group
            return None
        self._join_groups()
        ready = [
            group
            for group in self.groups
            if not group.converging and (group.wait is None or group.wait.ready())
        ]
        if not ready:
            return None
        self._choices += 1
        ready.sort(key=lambda group: group.pc)
        if self._choices % _FAIRNESS == 0:
            return ready[self._choices // _FAIRNESS % len(ready)]
        return ready[0]

    def _join_groups(self) -> None:
        places: dict[int, Group] = {}
        for group in list(self.groups):
            other = places.get(group.pc)
            if group.wait is not None:
                continue
            if other is None:
                places[group.pc] = group
                continue
            lanes = other.mask() | group.mask()
            other.lanes = True if lanes.all() else lanes
            other.converging = False
            self.groups.remove(group)
        if len(self.groups) == 1:
            self.groups[0].converging = False

    def _advance(self, group: Group, quantum: int) -> int:
        """Runs one group until it waits, meets another group, splits, ends, or the quantum ends."""
        code, counts, checked, traces = self.code, self.counts, self.checked, self._traces
        predicates, tensor = self.rows["pred"], self.tensor
        places = {other.pc for other in self.groups if other is not group and other.wait is None}
        lanes, pc, executed = group.lanes, group.pc, 0
        if pc in places:  # after a wait, a group may stand where another one already is
            return 0
        while executed < quantum:
            instruction = code[pc]
            executed += 1
            counts[pc] += 1
            active = lanes
            if instruction.guard >= 0:
                chosen = predicates[instruction.guard] ^ instruction.guard_negated
                if lanes is not True:
                    chosen = chosen & lanes
                if not checked[pc]:
                    self._check_guard(instruction, lanes)
                if not chosen.any():
                    pc += 1
                    group.pc = pc
                    if pc in places:
                        break
                    continue
                if not (chosen.all() if lanes is True else (chosen == lanes).all()):
                    active = chosen
            group.pc = self.pc = pc
            if not checked[pc] or tensor.accumulators:
                self.check_registers(pc, instruction, active)
            if traces:
                tensor.trace.append(pc)
            kind = instruction.kind
            if kind == NORMAL:
                if instruction.converges and not self._converged(group, instruction, active):
                    break
                wait = instruction.run(self, active)
                if wait is not None:
                    group.wait = wait
                    break
                pc += 1
            elif kind == BRANCH:
                if active is not lanes:
                    self._split(group, instruction.target, pc + 1, np.asarray(active))
                    break
                pc = instruction.target
            elif self._exit(group, active, lanes):
                break
            else:
                lanes = group.lanes
                pc += 1
            group.pc = pc
            if pc in places:
                break
        return executed

    def _split(self, group: Group, target: int, following: int, taken: np.ndarray) -> None:
        rest = group.mask() & ~taken
        group.pc, group.lanes = following, rest
        self.groups.append(Group(target, taken))

    def _exit(self, group: Group, active: Any, lanes: Any) -> bool:
        if active is lanes:
            self.groups.remove(group)
            if not self.groups:
                self.block.warp_ended(self)
            return True
        group.lanes = group.mask() & ~active
        return False

    def _converged(self, group: Group, instruction: Instruction, active: Any) -> bool:
        """Whether all threads that an instruction needs are here; else the group waits."""
        if active is not group.lanes:
            raise ConvergenceFault(f"{instruction.opcode} is executed by part of the threads only")
        if len(self.groups) == 1:
            return True
        needed = self.block.machine.member_mask(self, instruction, group.mask())
        present = group.mask()
        others = np.zeros(LANES, bool)
        for other in self.groups:
            if other is not group:
                others |= other.mask()
        if (needed & others & ~present).any():
            group.converging = True
            return False
        return True

    def _check_guard(self, instruction: Instruction, lanes: Any) -> None:
        identity = instruction.guard * len(FILES)  # predicates are file 0
        if identity in instruction.reads:
            self._check_defined(identity, instruction, lanes)

    def _check_defined(self, identity: int, instruction: Instruction, active: Any) -> None:
        known = self.defined.get(identity)
        if known is True:
            return
        needed = np.ones(LANES, bool) if active is True else active
        if known is None or (needed & ~known).any():
            name = self.program.table.name_of(identity)
            raise RegisterFault(f"{name} is read before it was written")

    def check_registers(self, pc: int, instruction: Instruction, active: Any) -> None:
        """Checks that sources were written and that no matmul in flight owns a register."""
        tensor = self.tensor
        if tensor.accumulators and instruction.checks_registers:
            owned = instruction.accesses & tensor.accumulators
            owned |= instruction.writes & tensor.operands
            if owned:
                names = ", ".join(self.program.table.name_of(i) for i in sorted(owned))
                raise RegisterFault(f"{names} belongs to a wgmma that has not been waited for")
        if self.checked[pc] or self._moves_undefined(instruction):
            return
        if instruction.checks_registers:
            for identity in instruction.reads:
                self._check_defined(identity, instruction, active)
        self.mark_defined(instruction.writes, active)
        if active is True:
            self.checked[pc] = 1

    def _moves_undefined(self, instruction: Instruction) -> bool:
        """Whether a plain move copies a register that was never written.

        Compilers emit such moves for values that no path uses; what uses the copy is a fault.
        """
        if not instruction.opcode.startswith("mov.") or len(instruction.reads) != 1:
            return False
        (source,) = instruction.reads
        return source not in self.defined and instruction.guard < 0

    def mark_defined(self, identities: frozenset[int] | set[int], active: Any) -> None:
        """Records that the active lanes of registers hold values."""
        for identity in identities:
            known = self.defined.get(identity)
            if known is True:
                continue
            if active is True:
                self.defined[identity] = True
            else:
                lanes = active | known if known is not None else active.copy()
                self.defined[identity] = True if lanes.all() else lanes
