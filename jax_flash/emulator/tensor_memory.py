"""Tensor memory of a block: 128 lanes of 512 columns of 32 bits; PTX ISA, "Tensor Memory".

Also the queue of asynchronous tensor-core operations of each warp that issues them: they execute
in order, at moments that the schedule chooses, and ``tcgen05.commit`` arrives on an mbarrier when
all earlier ones are done.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jax_flash.emulator.clocks import Shadow
from jax_flash.emulator.errors import TensorMemoryFault, UninitialisedRead

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block
    from jax_flash.emulator.warp import Warp

TENSOR_LANES = 128
COLUMNS = 512
_LANE_SHIFT = 16
_MINIMUM = 32


@dataclass(slots=True, eq=False)
class TensorQueue:
    """Asynchronous tensor-core operations of one warp."""

    items: deque[tuple[Callable[[], None], bool]] = field(default_factory=deque)
    """What to execute, and whether it only reports completion (a commit)."""
    commits: int = 0
    """Number of commits so far; operations belong to the next one."""

    def execute_next(self) -> None:
        """Executes the oldest operation, if there is one."""
        if self.items:
            execute, _ = self.items.popleft()
            execute()


class TensorMemory:
    """Allocation, content and access checks."""

    def __init__(self, block: "Block") -> None:
        """Starts with nothing allocated and nothing written."""
        self.block = block
        self.allocations: dict[int, int] = {}
        self.permit_relinquished = False
        self._words: np.ndarray | None = None
        self.written = np.zeros((0, COLUMNS), bool)
        self.shadow: Shadow | None = None
        self._queues: dict[int, TensorQueue] = {}

    @property
    def words(self) -> np.ndarray:
        """Content ``(lanes, columns)`` as uint32."""
        if self._words is None:
            self._words = np.full((TENSOR_LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
            self.written = np.zeros((TENSOR_LANES, COLUMNS), bool)
            if self.block.machine.checks.races:
                self.shadow = Shadow(
                    4 * TENSOR_LANES * COLUMNS,
                    self.block.cluster.domain,
                    title="tensor memory",
                    across_proxies=False,
                )
        return self._words

    def queue(self, warp: "Warp") -> TensorQueue:
        """Returns the queue of operations that a warp has issued."""
        return self._queues.setdefault(warp.index, TensorQueue())

    def find_free(self, columns: int) -> int | None:
        """Returns the first column of a free range, or None.

        Raises:
          TensorMemoryFault: a number of columns that cannot be allocated.
        """
        if columns < _MINIMUM or columns > COLUMNS or columns & (columns - 1):
            raise TensorMemoryFault(
                f"allocation of {columns} columns: needs a power of two from {_MINIMUM} to "
                f"{COLUMNS}"
            )
        if self.permit_relinquished:
            raise TensorMemoryFault("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for start in range(0, COLUMNS, columns):
            taken = any(
                start < begin + size and begin < start + columns
                for begin, size in self.allocations.items()
            )
            if not taken:
                return start
        return None

    def release(self, start: int, columns: int) -> None:
        """Gives columns back."""
        if self.allocations.get(start) != columns:
            raise TensorMemoryFault(
                f"release of {columns} columns at {start}; allocated are {self.allocations}"
            )
        del self.allocations[start]
        _ = self.words
        self.written[:, start : start + columns] = False

    def check_columns(self, column: int, count: int, what: str) -> None:
        """Checks that columns are inside one allocation."""
        for start, size in self.allocations.items():
            if start <= column and column + count <= start + size:
                return
        raise TensorMemoryFault(
            f"{what} of columns [{column}, {column + count}) of the tensor memory of block "
            f"{self.block.index}; allocated are {self.allocations}"
        )

    def read(self, lanes: np.ndarray, columns: np.ndarray, what: str) -> np.ndarray:
        """Returns the words at the given lanes and columns (broadcast), which must be written."""
        content = self.words
        self.check_columns(int(columns.min()), int(np.ptp(columns)) + 1, what)
        if not self.written[lanes, columns].all():
            raise UninitialisedRead(f"{what} of tensor memory that was never written")
        return content[lanes, columns]

    def write(self, lanes: np.ndarray, columns: np.ndarray, values: np.ndarray, what: str) -> None:
        """Writes words at the given lanes and columns."""
        content = self.words
        self.check_columns(int(columns.min()), int(np.ptp(columns)) + 1, what)
        content[lanes, columns] = values
        self.written[lanes, columns] = True

    def note(
        self,
        warp: "Warp",
        lanes: np.ndarray,
        columns: np.ndarray,
        agent: int,
        time: int,
        *,
        writes: bool,
    ) -> None:
        """Checks an access for races, and records it."""
        _ = self.words
        if self.shadow is None or warp.clock is None:
            return
        words = (lanes * COLUMNS + columns).ravel()
        if writes:
            self.shadow.write(words, warp.clock, agent, time, warp.line)
        else:
            self.shadow.read(words, warp.clock, agent, time)

    def check_end(self) -> None:
        """Refuses the end of a block that has not released its tensor memory."""
        if self.allocations:
            raise TensorMemoryFault(
                f"block {self.block.index} ends without releasing tensor memory: columns "
                f"{self.allocations}"
            )
        for queue in self._queues.values():
            if not all(is_commit for _, is_commit in queue.items):
                raise TensorMemoryFault(
                    f"block {self.block.index} ends while tensor-core operations are in flight"
                )
            while queue.items:  # commits that nobody waits for
                queue.execute_next()


def split_address(address: int) -> tuple[int, int]:
    """Returns ``(lane, column)`` of a tensor-memory address."""
    return address >> _LANE_SHIFT, address & 0xFFFF
