"""Vector clocks of a cluster, and the shadow of shared memory that finds races with them.

Agents are the warps (generic proxy) and, for each warp, what it starts and does not wait for: its
tensor-core operations, its bulk copies out of shared memory, its ``cp.async`` copies, and one agent
for each mbarrier, which stands for the bulk copies that complete on it. Each agent counts its own
time; a warp knows of each agent the time up to which everything happened before it.

Every warp has two vectors. ``happens_before`` is the ordinary one. ``async_visible`` is how much of
the generic-proxy writes may be used by the async proxy: a warp's fence.proxy.async raises it to
``happens_before``, and synchronisation passes both on (PTX ISA, "Memory Consistency Model",
proxy-preserved base causality order). A bulk copy or tensor-core operation that uses memory needs
the generic writes to it to be ``async_visible`` to the warp that starts it.
"""

from dataclasses import dataclass, field

import numpy as np

from jax_flash.emulator.errors import BarrierFault, DataRace

MBARRIERS = 192
"""Most mbarriers of one block that the emulator tracks."""

_KINDS = (
    "warp",
    "tensor core of warp",
    "bulk copy from shared memory of warp",
    "cp.async of warp",
    "tcgen05.st of warp",
)
GENERIC, TENSOR, BULK_READ, CP_ASYNC, TENSOR_STORE = range(5)


class ClockDomain:
    """Numbers the agents of one cluster: all warps first, then the asynchronous agents."""

    def __init__(self, blocks: int, warps: int) -> None:
        """Takes the number of blocks of the cluster and of warps of a block."""
        self.warps = warps
        self.generic = blocks * warps
        self.size = self.generic * len(_KINDS) + blocks * MBARRIERS
        self._next_mbarrier = [0] * blocks

    def agent(self, kind: int, block: int, warp: int) -> int:
        """Returns the number of an agent of a warp."""
        return kind * self.generic + block * self.warps + warp

    def is_pipelined(self, agent: int) -> bool:
        """Whether an agent's operations execute in the order they were started in."""
        return agent // self.generic in (TENSOR, TENSOR_STORE)

    def new_mbarrier(self, block: int) -> int:
        """Returns a fresh number for the copies that complete on an mbarrier."""
        used = self._next_mbarrier[block]
        if used == MBARRIERS:
            raise BarrierFault(f"more than {MBARRIERS} mbarriers initialised by one block")
        self._next_mbarrier[block] = used + 1
        return len(_KINDS) * self.generic + block * MBARRIERS + used

    def name(self, agent: int) -> str:
        """Returns words for an agent."""
        kind, index = divmod(agent, self.generic)
        if kind >= len(_KINDS):
            block, number = divmod(agent - len(_KINDS) * self.generic, MBARRIERS)
            return f"bulk copy that completes on mbarrier {number} of block {block}"
        return f"{_KINDS[kind]} {index % self.warps} of block {index // self.warps}"


@dataclass(slots=True)
class Knowledge:
    """What an agent knows of the others: the two vectors."""

    happens_before: np.ndarray
    async_visible: np.ndarray

    @staticmethod
    def nothing(domain: ClockDomain) -> "Knowledge":
        """Returns vectors of zeros."""
        return Knowledge(np.zeros(domain.size, np.int32), np.zeros(domain.size, np.int32))

    def join(self, other: "Knowledge") -> None:
        """Learns what another one knows."""
        np.maximum(self.happens_before, other.happens_before, out=self.happens_before)
        np.maximum(self.async_visible, other.async_visible, out=self.async_visible)

    def copy(self) -> "Knowledge":
        """Returns an independent copy."""
        return Knowledge(self.happens_before.copy(), self.async_visible.copy())


@dataclass(slots=True)
class WarpClock:
    """One warp's knowledge and its own agents."""

    domain: ClockDomain
    block: int
    warp: int
    known: Knowledge = field(init=False)
    me: int = field(init=False)

    def __post_init__(self) -> None:
        """Starts at time 1, knowing nothing of others."""
        self.known = Knowledge.nothing(self.domain)
        self.me = self.domain.agent(GENERIC, self.block, self.warp)
        self.known.happens_before[self.me] = 1

    @property
    def now(self) -> int:
        """This warp's own time."""
        return int(self.known.happens_before[self.me])

    def agent(self, kind: int) -> int:
        """Returns the number of one of this warp's asynchronous agents."""
        return self.domain.agent(kind, self.block, self.warp)

    def release(self) -> Knowledge:
        """Returns what others learn from this warp now; its later accesses are news again."""
        shared = self.known.copy()
        self.known.happens_before[self.me] += 1
        return shared

    def acquire(self, other: Knowledge) -> None:
        """Learns what another agent released."""
        self.known.join(other)

    def fence_async_proxy(self) -> None:
        """Makes the generic writes known here visible to the async proxy."""
        known = self.known
        np.maximum(known.async_visible, known.happens_before, out=known.async_visible)
        known.happens_before[self.me] += 1

    def complete(self, agent: int, time: int) -> None:
        """Learns that an asynchronous agent's work up to a time is done."""
        for vector in (self.known.happens_before, self.known.async_visible):
            vector[agent] = max(int(vector[agent]), time)

    def seen_by_async_proxy(self) -> np.ndarray:
        """Returns, for each agent, the time up to which the async proxy may use its writes."""
        seen = self.known.happens_before.copy()
        seen[: self.domain.generic] = self.known.async_visible[: self.domain.generic]
        return seen


class Shadow:
    """Last write and last reads of every 4-byte word of one block's shared or tensor memory."""

    def __init__(
        self,
        size: int,
        domain: ClockDomain,
        *,
        title: str = "shared memory",
        across_proxies: bool = True,
    ) -> None:
        """Takes the number of bytes; tensor memory has one proxy only."""
        words = -(-size // 4)
        self.domain = domain
        self.title = title
        self.across_proxies = across_proxies
        self.writer = np.zeros(words, np.int32)
        self.write_time = np.zeros(words, np.int32)
        self.write_line = np.zeros(words, np.int32)
        self.read_times = np.zeros((4, words), np.int32)
        self.readers: list[int] = []
        self._slots: dict[int, int] = {}

    def _slot(self, agent: int) -> int:
        slot = self._slots.get(agent)
        if slot is None:
            slot = self._slots[agent] = len(self.readers)
            self.readers.append(agent)
            if slot == len(self.read_times):
                self.read_times = np.concatenate([self.read_times, np.zeros_like(self.read_times)])
        return slot

    def check_writes(self, words: np.ndarray | slice, seen: np.ndarray, access: str) -> None:
        """Checks that an access described by ``access`` comes after the writes of words."""
        writers = self.writer[words]
        late = self.write_time[words] > seen[writers]
        if late.any():
            first = int(np.argmax(late))
            word = words.start + first if isinstance(words, slice) else int(words.ravel()[first])
            writer = int(writers.ravel()[first])
            line = int(self.write_line[words].ravel()[first])
            raise DataRace(
                f"{access} {self.title} at offset {4 * word} conflicts with the write by "
                f"{self.domain.name(writer)} (line {line}): no synchronisation between them"
                f"{_proxy_hint(self.across_proxies and writer < self.domain.generic)}"
            )

    def _seen(self, clock: WarpClock, agent: int) -> np.ndarray:
        """Returns up to which time the writes of each agent are visible to an access by one."""
        if agent < self.domain.generic or not self.across_proxies:
            seen = clock.known.happens_before
        else:
            seen = clock.seen_by_async_proxy()
        if self.domain.is_pipelined(agent):  # its operations execute in order
            seen = seen.copy()
            seen[agent] = np.iinfo(np.int32).max
        return seen

    def read(self, words: np.ndarray | slice, clock: WarpClock, agent: int, time: int) -> None:
        """Checks and records a read.

        Args:
          words: word indices, or a slice of them.
          clock: of the warp that reads, or that starts the asynchronous operation.
          agent: who reads.
          time: of the agent.
        """
        seen = self._seen(clock, agent)
        name = self.domain.name(agent)
        self.check_writes(words, seen, f"read by {name} of")
        slot = self._slot(agent)
        self.read_times[slot][words] = time

    def write(
        self, words: np.ndarray | slice, clock: WarpClock, agent: int, time: int, line: int
    ) -> None:
        """Checks and records a write; arguments as of :meth:`read`, and the PTX line."""
        seen = self._seen(clock, agent)
        name = self.domain.name(agent)
        self.check_writes(words, seen, f"write by {name} to")
        if self.readers:
            # A write after a read needs no proxy fence: nothing has to become visible.
            before = clock.known.happens_before[self.readers][:, None]
            if self.domain.is_pipelined(agent):
                before = np.where(np.array(self.readers)[:, None] == agent, time, before)
            if isinstance(words, slice):
                times = self.read_times[: len(self.readers), words]
            else:
                times = self.read_times[: len(self.readers)][:, words.ravel()]
            late = times > before
            if late.any():
                reader, first = np.argwhere(late)[0]
                start = words.start + first if isinstance(words, slice) else words.ravel()[first]
                raise DataRace(
                    f"write by {name} to {self.title} at offset {4 * int(start)} conflicts with "
                    f"the read by {self.domain.name(self.readers[int(reader)])}: no "
                    "synchronisation between them"
                )
        self.writer[words] = agent
        self.write_time[words] = time
        self.write_line[words] = line


def _proxy_hint(generic_writer: bool) -> str:
    return " (or no fence.proxy.async after the write)" if generic_writer else ""
