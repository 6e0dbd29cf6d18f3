"""Keeps a GPU busy with other kernels, so that blocks of those under test start in other orders."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

_BYTES = 1 << 28
_WORD = 4
_NON_BLOCKING = 1
_AT_A_TIME = 4


@dataclass(slots=True, kw_only=True)
class Launches:
    """How many other kernels have run so far."""

    count: int = 0


class _Driver:
    """The few functions of the CUDA driver that this takes, with their errors raised."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed with CUresult {result}")


@contextmanager
def other_kernels_running(device: int = 0) -> Iterator[Launches]:
    """Runs fills of memory, of random sizes, on a stream of their own until the end of the block.

    They run in JAX's own context, so that the GPU works on kernels of both at the same time.

    Yields:
        The number of fills, which goes up.

    Raises:
        RuntimeError: the driver refused something.
    """
    launches, stop, failure = Launches(), threading.Event(), []

    def fill() -> None:
        try:
            _fill_until(stop, launches, device)
        except RuntimeError as error:
            failure.append(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield launches
    finally:
        stop.set()
        thread.join()
    if failure:
        raise failure[0]


def _fill_until(stop: threading.Event, launches: Launches, device: int) -> None:
    driver = _Driver()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    stream, memory = ctypes.c_void_p(), ctypes.c_uint64()
    driver("cuInit", 0)
    driver("cuDeviceGet", ctypes.byref(handle), device)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    driver("cuCtxSetCurrent", context)
    driver("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    driver("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_BYTES))
    random = np.random.default_rng(0)
    while not stop.is_set():
        for _ in range(_AT_A_TIME):
            words = int(random.integers(1 << 10, _BYTES // _WORD))
            driver("cuMemsetD32Async", memory, 1, ctypes.c_size_t(words), stream)
        driver("cuStreamSynchronize", stream)
        launches.count += _AT_A_TIME
    driver("cuMemFree_v2", memory)
    driver("cuStreamDestroy_v2", stream)
    driver("cuDevicePrimaryCtxRelease_v2", handle)
