"""What an instruction returns when its threads cannot go on."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Wait:
    """Why a group of threads cannot go on."""

    ready: Callable[[], bool]
    finish: Callable[[], None] | None
    """Called once when the wait is over; None re-executes the instruction instead."""
    text: str
    is_poll: bool = False
    """Waits for other agents to change memory that this one reads again and again."""
