"""What a run did: instructions by class and warp role, bytes, tensor-core operations."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_flash.emulator.warp import Warp


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums over all warps of a run."""

    instructions: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Warp instructions by (warp's index in its block, class)."""
    lines: dict[int, set[int]] = field(default_factory=dict)
    """Lines of the program that each warp has executed, by its index."""
    opcodes: Counter[str] = field(default_factory=Counter)
    """Warp instructions by opcode."""
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes by ``<space> <read|write> by <unit>``."""
    tensor_operations: Counter[str] = field(default_factory=Counter)
    """Multiply-adds of the tensor cores by kind, e.g. ``wgmma bf16``."""
    shared_passes: Counter[str] = field(default_factory=Counter)
    """``accesses`` of shared memory by warps, and the ``passes`` that their banks need."""
    notes: Counter[str] = field(default_factory=Counter)
    """What is allowed but unusual, and how often it happened."""
    blocks: int = 0

    def add_counts(self, warp: "Warp") -> None:
        """Adds the instructions of a warp that has ended."""
        lines = self.lines.setdefault(warp.index, set())
        for instruction, count in zip(warp.code, warp.counts, strict=True):
            if count:
                self.instructions[warp.index, instruction.category] += count
                self.opcodes[instruction.opcode] += count
                lines.add(instruction.line)

    def roles(self) -> dict[str, Counter[str]]:
        """Returns instructions by class for each role: neighbouring warps that share most code.

        Two warps share a role when at least half of the lines that either executes are executed by
        both: an elected warp's extra instructions do not set it apart, another branch does.
        """
        groups: list[list[int]] = []
        for warp in sorted(self.lines):
            mine = self.lines[warp]
            theirs = self.lines[groups[-1][-1]] if groups else set[int]()
            if groups and 2 * len(mine & theirs) >= len(mine | theirs):
                groups[-1].append(warp)
            else:
                groups.append([warp])
        roles: dict[str, Counter[str]] = {}
        for group in groups:
            name = f"warps {group[0]} to {group[-1]}" if len(group) > 1 else f"warp {group[0]}"
            roles[name] = Counter()
            for (warp, kind), count in self.instructions.items():
                if warp in group:
                    roles[name][kind] += count
        return roles

    def merge(self, other: "Statistics") -> None:
        """Adds the sums of another run."""
        self.instructions += other.instructions
        for warp, lines in other.lines.items():
            self.lines.setdefault(warp, set()).update(lines)
        self.opcodes += other.opcodes
        self.traffic += other.traffic
        self.tensor_operations += other.tensor_operations
        self.shared_passes += other.shared_passes
        self.notes += other.notes
        self.blocks += other.blocks
