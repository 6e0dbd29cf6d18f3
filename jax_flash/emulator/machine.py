"""Runs a grid: residency of clusters, scheduling of warps, landing of asynchronous operations."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from jax_flash.emulator.async_operation import AsyncOperation
from jax_flash.emulator.block import Block, Cluster
from jax_flash.emulator.clocks import ClockDomain
from jax_flash.emulator.errors import BarrierFault, Deadlock, ProgramFault
from jax_flash.emulator.memory import GlobalMemory, Memory
from jax_flash.emulator.program import Instruction, Program
from jax_flash.emulator.ptx_types import LANES
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.statistics import Statistics
from jax_flash.emulator.warp import Warp


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Checks that cost time or that known-good programs fail; all others are always on."""

    races: bool = True
    """Vector clocks on every access of shared memory."""
    bank_conflicts: bool = False
    """Counts the passes that accesses of shared memory need."""
    unread_copies: bool = True
    """A warp must wait for its bulk copies to have read shared memory before it ends; else it is a
    note. The ISA wants it, but released kernels that work do without at their very end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a kernel is started with."""

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    parameters: bytes
    dynamic_shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    registers: int = 0
    """Registers of a thread at launch, for ``setmaxnreg``; 0 leaves them uncounted."""
    resident_clusters: int = 3
    """Clusters that run at the same time; the others start, in order, when one ends."""
    instruction_limit: int = 1 << 28
    """Most warp instructions of the run: past it, a loop is taken to be endless."""


@dataclass(slots=True, eq=False)
class Machine:
    """One launch of one program."""

    program: Program
    launch: Launch
    memory: GlobalMemory
    schedule: Schedule = field(default_factory=Schedule)
    checks: Checks = field(default_factory=Checks)
    statistics: Statistics = field(default_factory=Statistics)
    events: int = 0
    """Counts what other warps can observe; a warp that polls waits for it to change."""
    pending: list[AsyncOperation] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    """Clusters that run."""
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    """Indices of clusters that have not started, the next one last."""
    parameter_memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        """Checks the launch against the program."""
        entry, launch = self.program.entry, self.launch
        size = max((p.offset + p.size for p in entry.parameters), default=0)
        if len(launch.parameters) != size:
            raise ValueError(
                f"{len(launch.parameters)} bytes of parameters; {entry.name} takes {size}"
            )
        if entry.threads is not None and entry.threads != launch.threads:
            raise ValueError(f"{launch.threads} threads; {entry.name} requires {entry.threads}")
        if any(n % c for n, c in zip(launch.grid, launch.cluster, strict=True)):
            raise ValueError(f"grid {launch.grid} is not a multiple of cluster {launch.cluster}")
        self.parameter_memory = Memory(max(size, 1), "kernel parameters")
        self.parameter_memory.fill(np.frombuffer(launch.parameters.ljust(1, b"\0"), np.uint8))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of the grid."""
        return self.launch.grid

    @property
    def threads(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return self.launch.threads

    @property
    def cluster_shape(self) -> tuple[int, int, int]:
        """Blocks of a cluster."""
        return self.launch.cluster

    @property
    def clusters_xyz(self) -> tuple[int, int, int]:
        """Clusters of the grid."""
        x, y, z = (n // c for n, c in zip(self.grid, self.cluster_shape, strict=True))
        return x, y, z

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.launch.dynamic_shared_bytes

    @property
    def registers(self) -> int:
        """Registers of a thread at launch."""
        return self.launch.registers

    @property
    def free_registers(self) -> int:
        """Registers of a block's pool that no thread holds at launch."""
        return 0

    def member_mask(self, warp: Warp, instruction: Instruction, lanes: np.ndarray) -> np.ndarray:
        """Returns the lanes that have to execute an instruction together."""
        if instruction.member_mask < 0:
            return np.ones(LANES, bool)
        mask = int(warp.rows["u32"][instruction.member_mask][int(np.argmax(lanes))])
        return (mask >> np.arange(LANES)) & 1 != 0

    def run(self) -> Statistics:
        """Runs the grid to its end.

        Raises:
          ProgramFault: what the program did wrong, with its location.
        """
        x, y, z = self.clusters_xyz
        self.waiting = [(i, j, k) for k, j, i in product(range(z), range(y), range(x))]
        self.waiting.reverse()
        executed = 0
        with np.errstate(all="ignore"):
            while self.waiting or self.clusters:
                while self.waiting and len(self.clusters) < self.launch.resident_clusters:
                    self._start(self.waiting.pop())
                executed += self._step()
                if executed > self.launch.instruction_limit:
                    raise Deadlock(f"{executed} warp instructions and no end:\n    {self._where()}")
            while self.pending:
                self._land(0)
        return self.statistics

    def cancel_waiting(self) -> tuple[int, int, int] | None:
        """Takes a cluster out of those that wait to start; returns the index of its first block.

        None when there is none left, or when the schedule has the hardware refuse.
        """
        if not self.waiting or self.schedule.refuses_to_cancel():
            return None
        index = self.waiting.pop(-1 - self.schedule.pick(len(self.waiting)))
        x, y, z = (i * c for i, c in zip(index, self.cluster_shape, strict=True))
        return x, y, z

    def _start(self, index: tuple[int, int, int]) -> None:
        cx, cy, cz = self.cluster_shape
        warps = -(-int(np.prod(self.threads)) // LANES)
        cluster = Cluster(index_xyz=index, domain=ClockDomain(cx * cy * cz, warps))
        for k, j, i in product(range(cz), range(cy), range(cx)):
            place = (index[0] * cx + i, index[1] * cy + j, index[2] * cz + k)
            Block(self, self.program, cluster, place)
        self.clusters.append(cluster)

    def _step(self) -> int:
        runnable = [
            warp
            for cluster in self.clusters
            for block in cluster.blocks
            if block.running
            for warp in block.warps
            if warp.groups and warp.runnable()
        ]
        if self.pending and (not runnable or self.schedule.lands()):
            self._land(self.schedule.pick(len(self.pending)))
            return 0
        if not runnable:
            raise Deadlock(f"no warp can run:\n    {self._where()}")
        warp, quantum = self.schedule.choose(runnable)
        return warp.run(quantum)

    def _land(self, index: int) -> None:
        operation = self.pending.pop(index)
        self.events += 1
        try:
            operation.land()
        except ProgramFault as fault:
            raise fault.at(operation.text) from None

    def _where(self) -> str:
        warps = [
            warp.describe()
            for cluster in self.clusters
            for block in cluster.blocks
            for warp in block.warps
            if warp.groups
        ]
        barriers = [
            str(barrier)
            for cluster in self.clusters
            for block in cluster.blocks
            for barrier in block.mbarriers.values()
            if barrier.waiting
        ]
        return "\n    ".join(warps + barriers)

    def check_warp_end(self, warp: Warp) -> None:
        """Checks what a warp must not leave behind."""
        self.statistics.add_counts(warp)
        warpgroup = warp.block.warpgroups[warp.index // 4]
        if warpgroup.unfinished(warp):
            raise BarrierFault(f"{warp.name} ends with matmuls it has not waited for")
        warp.block.bulk_groups.check_end(warp)

    def block_ended(self, block: Block) -> None:
        """Checks what a block must not leave behind, and frees it."""
        for barrier in block.barriers.values():
            if barrier.arrived:
                # Allowed: hardware resets its barriers when a block ends.
                self.statistics.notes[
                    f"blocks end while {barrier.arrived} of {barrier.expected} threads have "
                    f"arrived at {barrier.name} (lines {sorted(set(barrier.members.values()))})"
                ] += 1
        left = [item.text for item in self.pending if item.block is block]
        if left and self.checks.unread_copies:
            raise BarrierFault(
                f"block {block.index} ends while copies use its shared memory: {left[0]}"
            )
        for mbarrier in block.mbarriers.values():
            if mbarrier.transactions:
                # Allowed: the end of a known-good pipeline expects bytes that it does not send.
                self.statistics.notes[
                    f"blocks end while an mbarrier at offset {mbarrier.offset} expects "
                    f"{mbarrier.transactions} bytes"
                ] += 1
        block.tensor_memory.check_end()
        if all(other.running == 0 for other in block.cluster.blocks):
            self.clusters.remove(block.cluster)
