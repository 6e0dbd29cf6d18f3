"""Thread blocks and clusters: shared memory, barriers, and what they own."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_flash.emulator.address_space import SHARED_BASE
from jax_flash.emulator.barrier_state import Mbarrier, NamedBarrier
from jax_flash.emulator.bulk_groups import BulkGroups
from jax_flash.emulator.clocks import ClockDomain, Shadow, WarpClock
from jax_flash.emulator.errors import BarrierFault, OutOfBounds
from jax_flash.emulator.memory import Memory
from jax_flash.emulator.program import Program
from jax_flash.emulator.tensor_memory import TensorMemory
from jax_flash.emulator.warp import Warp
from jax_flash.emulator.warpgroup import Warpgroup

if TYPE_CHECKING:
    from jax_flash.emulator.machine import Machine

_RANK_SHIFT = 24
_OFFSET_BITS = (1 << _RANK_SHIFT) - 1


@dataclass(slots=True, eq=False)
class Cluster:
    """Blocks that run together and reach each other's shared memory."""

    index_xyz: tuple[int, int, int]
    domain: ClockDomain
    blocks: list["Block"] = field(default_factory=list)
    barrier: NamedBarrier = field(default_factory=lambda: NamedBarrier(name="cluster barrier"))

    def running_warps(self) -> int:
        """Returns how many warps have not ended."""
        return sum(block.running for block in self.blocks)


class Block:
    """One thread block."""

    def __init__(
        self,
        machine: "Machine",
        program: Program,
        cluster: Cluster,
        index_xyz: tuple[int, int, int],
    ) -> None:
        """Takes the machine, the program, the cluster to join, and the block's index."""
        self.machine = machine
        self.program = program
        self.cluster = cluster
        self.rank = len(cluster.blocks)
        cluster.blocks.append(self)
        self.threads = machine.threads
        self.index_xyz = index_xyz
        x, y, _ = machine.grid
        self.index = index_xyz[0] + x * (index_xyz[1] + y * index_xyz[2])
        shape = machine.cluster_shape
        cx, cy, cz = (i % c for i, c in zip(index_xyz, shape, strict=True))
        self.cluster_index_xyz = (cx, cy, cz)
        size = program.dynamic_shared_offset + machine.dynamic_shared_bytes
        self.shared = Memory(size, f"shared memory of block {self.index}")
        self.shadow = Shadow(size, cluster.domain) if machine.checks.races else None
        self.mbarriers: dict[int, Mbarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        count = -(-int(np.prod(machine.threads)) // 32)
        self.warps = [
            Warp(
                self,
                i,
                WarpClock(cluster.domain, self.rank, i),
                int(np.prod(machine.threads)),
            )
            for i in range(count)
        ]
        self.running = count
        self.warpgroups = [Warpgroup(self, i) for i in range(-(-count // 4))]
        self.bulk_groups = BulkGroups()
        self.refusal: tuple[int, int] | None = None
        """Agent and time at which ``clusterlaunchcontrol`` answered that nothing is left."""
        self.thread_copies: dict[int, Any] = {}
        self.tensor_memory = TensorMemory(self)
        self.free_registers = machine.free_registers
        self.thread_registers = dict.fromkeys(range(count), machine.registers)

    def shared_address(self, offset: int) -> int:
        """Returns the shared::cluster address of an offset in this block's shared memory."""
        return self.rank << _RANK_SHIFT | offset

    def locate_shared(self, addresses: np.ndarray, what: str) -> tuple["Block", np.ndarray]:
        """Returns the block that shared addresses belong to, and the byte offsets in it.

        Raises:
          OutOfBounds: another block than those of the cluster, or the first KiB.
        """
        first = int(addresses[0]) >> _RANK_SHIFT
        if len(self.cluster.blocks) > 1 and ((addresses >> _RANK_SHIFT) != first).any():
            raise OutOfBounds(f"{what}: lanes address shared memory of different blocks")
        if first >= len(self.cluster.blocks):
            raise OutOfBounds(f"{what} at shared address {int(addresses[0]):#x}: no such block")
        offsets = (addresses & addresses.dtype.type(_OFFSET_BITS)).astype(np.int64)
        if int(offsets.min()) < SHARED_BASE:
            raise OutOfBounds(
                f"{what} at shared address {int(offsets.min()):#x}: below the block's memory"
            )
        block = self.cluster.blocks[first]
        if block.running == 0 and block is not self:
            raise OutOfBounds(f"{what}: block {block.index} of the cluster has ended")
        return block, offsets

    def mbarrier(self, offset: int) -> Mbarrier:
        """Returns the mbarrier at an offset.

        Raises:
          BarrierFault: there is none.
        """
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise BarrierFault(
                f"no mbarrier at offset {offset} of the shared memory of block {self.index}: "
                "not initialised"
            )
        return barrier

    def warp_ended(self, warp: Warp) -> None:
        """Called by a warp when its last thread exits."""
        self.running -= 1
        self.machine.events += 1
        self.machine.check_warp_end(warp)
        if self.running == 0:
            self.machine.block_ended(self)

    def on_async_write(
        self,
        warp: Warp,
        words: np.ndarray | slice,
        agent: int,
        time: int,
    ) -> None:
        """Checks and records an asynchronous write to this block's shared memory."""
        if self.shadow is not None and warp.clock is not None:
            self.shadow.write(words, warp.clock, agent, time, warp.line)

    def on_async_read(self, warp: Warp, words: np.ndarray | slice, agent: int, time: int) -> None:
        """Checks and records an asynchronous read of this block's shared memory."""
        if self.shadow is not None and warp.clock is not None:
            self.shadow.read(words, warp.clock, agent, time)
