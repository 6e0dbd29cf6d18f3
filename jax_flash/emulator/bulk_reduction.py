"""Reductions of bulk copies: PTX ISA, "cp.reduce.async.bulk" and its tensor form."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from jax_flash.emulator.errors import PtxError

_ELEMENTS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "s32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "b32": np.dtype(np.uint32),
    "s64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
    "b64": np.dtype(np.uint64),
}


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1)


_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": _increment,
    "dec": _decrement,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_LOGIC = ("and", "or", "xor")
_ARITHMETIC = ("add", "min", "max")
_OPERATIONS = {
    "f16": _ARITHMETIC,
    "bf16": _ARITHMETIC,
    "f32": ("add",),
    "f64": ("add",),
    "s32": (*_ARITHMETIC, *_LOGIC),
    "u32": tuple(_FUNCTIONS),
    "b32": _LOGIC,
    "s64": (*_ARITHMETIC, *_LOGIC),
    "u64": (*_ARITHMETIC, *_LOGIC),
    "b64": _LOGIC,
}
"""Operations of each type; those of a tensor map's integer types include the bitwise ones."""


def check_reduction(operation: str, element: str) -> None:
    """Refuses what the ISA's tables do not have.

    Raises:
      PtxError: the operation does not exist for the element type.
    """
    if operation not in _OPERATIONS.get(element, ()):
        raise PtxError(f"the bulk reduction .{operation} of .{element} does not exist")


def reduced(old: np.ndarray, data: np.ndarray, operation: str, element: str) -> np.ndarray:
    """Returns bytes ``old`` with ``data`` reduced into them, element by element."""
    check_reduction(operation, element)
    dtype = _ELEMENTS[element]
    result = _FUNCTIONS[operation](old.view(dtype), np.ascontiguousarray(data).view(dtype))
    return np.ascontiguousarray(result.astype(dtype)).view(np.uint8)
