"""Groups of bulk copies: PTX ISA, "Asynchronous copy completion mechanisms: bulk async-groups".

The ISA keeps groups for each thread; here the threads of a warp share theirs, as compiled kernels
issue, commit and wait from one and the same place.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jax_flash.emulator.clocks import BULK_READ
from jax_flash.emulator.errors import BarrierFault

if TYPE_CHECKING:
    from jax_flash.emulator.warp import Warp


@dataclass(slots=True, eq=False)
class BulkOperation:
    """One copy out of shared memory."""

    read_done: bool = False
    done: bool = False


@dataclass(slots=True, eq=False)
class WarpGroups:
    """Groups of one warp."""

    open: list[BulkOperation] = field(default_factory=list)
    committed: list[list[BulkOperation]] = field(default_factory=list)
    read_waited: int = 0
    """How many of the oldest groups the warp knows to have been read."""


class BulkGroups:
    """Groups of all warps of a block."""

    def __init__(self) -> None:
        """Starts without any."""
        self._warps: dict[int, WarpGroups] = {}

    def of(self, warp: "Warp") -> WarpGroups:
        """Returns the groups of a warp."""
        return self._warps.setdefault(warp.index, WarpGroups())

    def add(self, warp: "Warp", operation: BulkOperation) -> int:
        """Adds a copy to the open group; returns the group's number, from 1."""
        groups = self.of(warp)
        groups.open.append(operation)
        return len(groups.committed) + 1

    def commit(self, warp: "Warp") -> None:
        """Closes the open group."""
        groups = self.of(warp)
        groups.committed.append(groups.open)
        groups.open = []

    def is_complete(self, warp: "Warp", newest: int, *, read: bool) -> bool:
        """Whether all groups but the ``newest`` are done, or have been read."""
        groups = self.of(warp).committed
        older = groups[: max(0, len(groups) - newest)]
        return all(op.read_done if read else op.done for group in older for op in group)

    def note_wait(self, warp: "Warp", newest: int) -> None:
        """Records that a warp has waited for all groups but the ``newest``."""
        groups = self.of(warp)
        groups.read_waited = max(groups.read_waited, len(groups.committed) - newest)
        if warp.clock is not None:
            warp.clock.complete(warp.clock.agent(BULK_READ), groups.read_waited)

    def check_end(self, warp: "Warp") -> None:
        """Refuses the end of a warp whose copies may still read the block's shared memory."""
        groups = self._warps.get(warp.index)
        if groups is None:
            return
        waited = groups.committed[: groups.read_waited]
        if groups.open or any(groups.committed[len(waited) :]):
            text = "ends without waiting for its bulk copies to read shared memory"
            if warp.machine.checks.unread_copies:
                raise BarrierFault(f"{warp.name} {text}")
            warp.machine.statistics.notes[f"a warp {text}"] += 1
