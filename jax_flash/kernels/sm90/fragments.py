"""Accumulator fragments in memory, in the order of the registers: no shuffle, no bank conflict.

A fragment lies as group of four registers, thread, register: 16 bytes a thread and access,
neighbouring threads next to each other.
"""

import cutlass.cute as cute
from cutlass import Int32

from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_THREADS

VECTOR = 4
"""Floats of one access."""


def of_thread(start: cute.Pointer, groups: int, thread: Int32) -> cute.Tensor:
    """Returns one thread's fragment ``(4, groups)`` of a warpgroup's floats.

    Args:
      start: of these floats, in global or shared memory.
      groups: groups of four registers.
      thread: thread within the warpgroup.
    """
    layout = cute.make_layout((VECTOR, groups), stride=(1, WARPGROUP_THREADS * VECTOR))
    return cute.make_tensor((start + thread * VECTOR).align(16), layout)


def vector(fragment: cute.Tensor, group: int) -> cute.Tensor:
    """Returns one group of a fragment, for a 16-byte access."""
    start = fragment[None, group].iterator.align(16)
    return cute.make_tensor(start, cute.make_layout(VECTOR))


def store(destination: cute.Tensor, registers: cute.Tensor) -> None:
    """Stores an accumulator to its place, 16 bytes at a time."""
    values = cute.make_tensor(registers.iterator, cute.make_layout(destination.shape))
    for group in range(cute.size(destination, mode=[1])):
        cute.autovec_copy(values[None, group], vector(destination, group))


def load(source: cute.Tensor, registers: cute.Tensor) -> None:
    """Loads an accumulator from its place, 16 bytes at a time."""
    values = cute.make_tensor(registers.iterator, cute.make_layout(source.shape))
    for group in range(cute.size(source, mode=[1])):
        cute.autovec_copy(vector(source, group), values[None, group])
