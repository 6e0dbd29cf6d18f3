"""Work that happens at a moment of the schedule's choosing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_flash.emulator.block import Block


@dataclass(slots=True, eq=False)
class AsyncOperation:
    """Something that happens at a moment of the machine's choosing."""

    land: Callable[[], None]
    text: str
    block: "Block | None"
    """Block whose shared memory it uses."""
