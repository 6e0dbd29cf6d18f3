"""What a run did: instructions by class and warp role, bytes, tensor-core operations."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_flash.emulator.warp import Warp


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums over all warps of a run."""

    instructions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Warp instructions by (role, class). The role is ``warpgroup <index>``."""
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
        role = f"warpgroup {warp.index // 4}"
        for instruction, count in zip(warp.code, warp.counts, strict=True):
            if count:
                self.instructions[role, instruction.category] += count
                self.opcodes[instruction.opcode] += count

    def merge(self, other: "Statistics") -> None:
        """Adds the sums of another run."""
        self.instructions += other.instructions
        self.opcodes += other.opcodes
        self.traffic += other.traffic
        self.tensor_operations += other.tensor_operations
        self.shared_passes += other.shared_passes
        self.notes += other.notes
        self.blocks += other.blocks
