"""Which warps do what: register budgets and named barriers of the sm_90a kernels."""

from dataclasses import dataclass
from enum import IntEnum

WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterBudget:
    """Registers a thread of each role after ``setmaxnreg``.

    The producer needs few; what it gives up lets the consumers hold their accumulators. The sum
    over warpgroups may not exceed 65,536 / 128 = 512.
    """

    producer: int
    consumer: int


# Keyed by the number of consumer warpgroups; all values must be multiples of 8.
REGISTERS = {
    1: RegisterBudget(producer=56, consumer=256),
    2: RegisterBudget(producer=24, consumer=240),
    3: RegisterBudget(producer=32, consumer=160),
}


REGISTERS_WITH_NESTED_LOOPS = RegisterBudget(producer=56, consumer=224)
"""Of two consumer warpgroups, where the producer counts through batch elements and heads as well,
which 24 registers do not hold."""


class NamedBarrier(IntEnum):
    """Hardware barriers; 0 is the whole block's."""

    CONSUMERS = 1
    """All consumer warpgroups."""
    CONSUMER_0 = 2
    """First consumer warpgroup alone; consumer ``i`` uses ``CONSUMER_0 + i``."""
    CONSUMER_1 = 3
    CONSUMER_2 = 4
