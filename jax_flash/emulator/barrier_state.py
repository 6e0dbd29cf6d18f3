"""State of named barriers and mbarriers; PTX ISA, "Parallel Synchronization Instructions"."""

from dataclasses import dataclass, field

from jax_flash.emulator.clocks import Knowledge
from jax_flash.emulator.errors import BarrierFault

MAX_PENDING = (1 << 20) - 1
"""Largest pending count of an mbarrier, and largest magnitude of its transaction count."""


@dataclass(slots=True, eq=False)
class NamedBarrier:
    """A ``bar``/``barrier`` resource of a block, or the barrier of a cluster."""

    name: str
    expected: int = 0
    """Threads of the current use; 0 before its first arrival."""
    arrived: int = 0
    generation: int = 0
    gathered: Knowledge | None = None
    released: Knowledge | None = None
    """What the last completed use passes to its waiters."""
    members: dict[str, int] = field(default_factory=dict)
    """Who arrived in the current use, and at which line."""

    def arrive(
        self, who: str, line: int, threads: int, expected: int, known: Knowledge | None
    ) -> int:
        """Adds threads; returns the generation that they belong to.

        Raises:
          BarrierFault: the count differs from that of others in this use, or more threads arrive
            than it says. A warp may arrive twice: known-good kernels do, with arrive, then sync.
        """
        if self.arrived and expected != self.expected:
            raise BarrierFault(
                f"{self.name} is used with {expected} threads, but by others with {self.expected}: "
                f"{self.members}"
            )
        self.expected = expected
        self.arrived += threads
        self.members[who] = line
        if known is not None:
            if self.gathered is None:
                self.gathered = known
            else:
                self.gathered.join(known)
        if self.arrived > expected:
            raise BarrierFault(f"{self.arrived} threads arrive at {self.name} of {expected}")
        generation = self.generation
        if self.arrived == expected:
            self.generation += 1
            self.arrived = 0
            self.released, self.gathered = self.gathered, None
            self.members = {}
        return generation


@dataclass(slots=True, eq=False)
class Mbarrier:
    """An mbarrier object: PTX ISA, "Asynchronous Barriers: mbarrier"."""

    offset: int
    block: int
    expected: int
    agent: int
    """Number that the clocks give to the copies that complete on it."""
    initialiser: str
    pending: int = 0
    transactions: int = 0
    phase: int = 0
    """Phases completed so far."""
    published: bool = False
    """Whether a fence has made the initialisation visible to the async proxy."""
    in_flight: int = 0
    """Copies started in the current phase that have not landed."""
    gathered: Knowledge | None = None
    released: Knowledge | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    """Phase that each waiting warp waits for."""

    def __post_init__(self) -> None:
        """Starts the first phase."""
        if not 1 <= self.expected <= MAX_PENDING:
            raise BarrierFault(f"{self}: count {self.expected} is not in [1, {MAX_PENDING}]")
        self.pending = self.expected

    def __str__(self) -> str:
        """Returns words for the barrier and its state."""
        return (
            f"mbarrier at offset {self.offset} of block {self.block} (phase {self.phase}, "
            f"{self.pending} of {self.expected} arrivals and {self.transactions} bytes missing)"
        )

    def arrive(self, count: int, known: Knowledge | None) -> bool:
        """Counts arrivals; returns whether that completed the phase.

        Raises:
          BarrierFault: more arrivals than the phase expects.
        """
        if count > self.pending:
            raise BarrierFault(f"{count} arrivals are more than are pending: {self}")
        self._gather(known)
        self.pending -= count
        return self._complete_if_done()

    def drop(self, count: int) -> None:
        """Takes arrivals out of those that later phases expect.

        Raises:
          BarrierFault: more than they expect.
        """
        if count > self.expected:
            raise BarrierFault(f"{count} arrivals dropped are more than are expected: {self}")
        self.expected -= count

    def expect(self, count: int) -> None:
        """Adds to the bytes that the phase waits for."""
        self.transactions += count
        self._check_transactions()

    def complete(self, count: int) -> bool:
        """Counts bytes that have landed; returns whether that completed the phase."""
        self.transactions -= count
        self._check_transactions()
        return self._complete_if_done()

    def _check_transactions(self) -> None:
        if abs(self.transactions) > MAX_PENDING:
            raise BarrierFault(f"transaction count out of range: {self}")

    def _gather(self, known: Knowledge | None) -> None:
        if known is None:
            return
        if self.gathered is None:
            self.gathered = known
        else:
            self.gathered.join(known)

    def _complete_if_done(self) -> bool:
        if self.pending or self.transactions:
            return False
        if self.in_flight:
            raise BarrierFault(
                f"the phase completes while {self.in_flight} copies that belong to it have not "
                f"landed: the bytes expected are fewer than the bytes copied: {self}"
            )
        late = {who: phase for who, phase in self.waiting.items() if phase < self.phase}
        if late:
            raise BarrierFault(f"a phase completes that waiting warps have missed: {late}: {self}")
        self.phase += 1
        self.pending = self.expected
        released = self.gathered
        if released is not None:
            for vector in (released.happens_before, released.async_visible):
                vector[self.agent] = max(int(vector[self.agent]), self.phase)
        # A waiter of any later phase has also seen the earlier ones.
        if self.released is not None and released is not None:
            released.join(self.released)
        self.released, self.gathered = released or self.released, None
        return True

    def completed(self, parity: int) -> bool:
        """Whether the phase of a parity (the current or the one before it) has completed."""
        return self.phase % 2 != parity % 2
