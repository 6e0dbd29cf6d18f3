"""Interleavings: which warp runs next, for how long, and when asynchronous work lands."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_flash.emulator.warp import Warp

_ORDERS = ("round_robin", "random", "starve")
_LANDINGS = ("eager", "random", "lazy")
_QUANTA = (1, 3, 16, 64, 256)


@dataclass(slots=True, kw_only=True)
class Schedule:
    """A reproducible interleaving.

    Attributes:
      order: ``round_robin``; ``random``; or ``starve``: the warps of ``starved`` (index within
        their block) run only when no other warp can.
      landing: when a bulk copy's bytes arrive and a matmul executes: ``eager`` at once, ``lazy``
        when nothing else can happen or they are waited for, ``random`` in between and in any order.
      seed: of every random choice.
      starved: warp index within a block.
    """

    order: str = "random"
    landing: str = "random"
    seed: int = 0
    starved: int = 0
    _random: random.Random = field(init=False)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Seeds the choices."""
        if self.order not in _ORDERS:
            raise ValueError(f"order={self.order!r} is not one of {_ORDERS}")
        if self.landing not in _LANDINGS:
            raise ValueError(f"landing={self.landing!r} is not one of {_LANDINGS}")
        self._random = random.Random(self.seed)

    def choose(self, runnable: "list[Warp]") -> "tuple[Warp, int]":
        """Returns the warp to run next and for how many instructions at most."""
        if self.order == "round_robin":
            self._turn += 1
            return runnable[self._turn % len(runnable)], 64
        if self.order == "starve":
            fed = [warp for warp in runnable if warp.index != self.starved]
            runnable = fed or runnable
        return self._random.choice(runnable), self._random.choice(_QUANTA)

    def lands(self) -> bool:
        """Whether an asynchronous operation lands now although warps can run."""
        if self.landing == "random":
            return self._random.random() < 0.2
        return self.landing == "eager"

    def pick(self, count: int) -> int:
        """Returns which of ``count`` things happens, the first being the oldest."""
        return 0 if self.landing == "eager" else self._random.randrange(count)

    def matmul_is_early(self) -> bool:
        """Whether a tensor-core operation executes when it is issued, not when waited for."""
        if self.landing == "random":
            return self._random.random() < 0.5
        return self.landing == "eager"

    def try_wait_gives_up(self) -> bool:
        """Whether a potentially blocking wait returns false although it could wait longer."""
        return self.order != "round_robin" and self._random.random() < 0.1

    def refuses_to_cancel(self) -> bool:
        """Whether a cluster that could be cancelled is not: the ISA promises no success."""
        return self.order != "round_robin" and self._random.random() < 0.1
