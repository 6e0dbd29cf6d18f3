"""Compiles one kernel variant to a cubin and checks that it is what the specification says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

from jax_flash.aot.kernel_classes import KERNEL_CLASSES
from jax_flash.spec.kernel_args import (
    KernelArgument,
    PointerArgument,
    TensorMapArgument,
    argument_bytes,
    kernel_arguments,
)
from jax_flash.spec.variant import KernelVariant

_TYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "s32": cutlass.Int32,
    "pred": cutlass.Uint8,  # a byte, as XLA stores it
}

_ADDRESS = 1 << 10  # any aligned address: compilation looks at the type alone
_ALIGNMENT = 16  # bytes; what TMA needs and the launcher checks


class KernelBuildError(RuntimeError):
    """A kernel that did not compile to what its specification says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What the compiler made of a variant."""

    symbol: str
    ptx: str
    cubin: bytes


def _example(argument: KernelArgument):
    if isinstance(argument, TensorMapArgument | PointerArgument):
        return make_ptr(
            _TYPES[argument.dtype], _ADDRESS, cute.AddressSpace.gmem, assumed_align=_ALIGNMENT
        )
    return cutlass.Float32(1.0) if argument.dtype == "float32" else cutlass.Int32(1)


def in_records(kernel: Any, arguments: Sequence[Any]) -> list[Any]:
    """Gathers arguments into the records (named tuples) that the kernel declares some of them as.

    A record's fields are parameters of the compiled kernel, one after the other. The last
    parameters may have defaults, and are then absent from some variants.

    Raises:
      KernelBuildError: the kernel takes another number of parameters.
    """
    rest = list(reversed(arguments))

    def take(declared: Any) -> Any:
        if hasattr(declared, "_fields"):
            return declared(*(take(field) for field in get_type_hints(declared).values()))
        if not rest:
            raise KernelBuildError(
                f"{type(kernel).__name__} takes more parameters than the {len(arguments)} of "
                "spec.kernel_args"
            )
        return rest.pop()

    declared = get_type_hints(type(kernel).__call__)
    taken = [
        take(declared[name])
        for name, parameter in signature(kernel.__call__).parameters.items()
        if rest or parameter.default is parameter.empty
    ]
    if rest:
        raise KernelBuildError(
            f"{type(kernel).__name__} takes {len(arguments) - len(rest)} parameters, "
            f"spec.kernel_args has {len(arguments)}"
        )
    return taken


def compile_variant(variant: KernelVariant) -> CompiledKernel:
    """Compiles ``variant``.

    The environment variable ``CUTE_DSL_ARCH`` must name its target before ``cutlass`` is imported.


    Raises:
      KernelBuildError: the compiled entry's parameters differ from ``spec.kernel_args``.
    """
    built_by = KERNEL_CLASSES[variant.role]
    kernel_class = getattr(import_module(built_by.module), built_by.name)
    kernel = kernel_class(variant, _TYPES[variant.dtype.value])
    prefix = "jax_flash_" + variant.name.rsplit("/", 1)[1]
    kernel.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    examples = in_records(kernel, [_example(argument) for argument in kernel_arguments(variant)])
    artifacts = cute.compile[cute.KeepPTX, cute.KeepCUBIN](kernel, *examples).artifacts
    symbol, parameters = entry_of(artifacts.PTX)
    expected = [argument_bytes(argument)[0] for argument in kernel_arguments(variant)]
    if symbol not in (prefix, f"{prefix}_0"):
        raise KernelBuildError(f"{variant.name}: the compiled kernel is called {symbol}")
    if parameters != expected:
        raise KernelBuildError(
            f"{variant.name}: the compiled kernel takes parameters of {parameters} bytes, "
            f"spec.kernel_args says {expected}"
        )
    return CompiledKernel(symbol=symbol, ptx=artifacts.PTX, cubin=artifacts.CUBIN)


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:[^,\[]*)(?:\[(\d+)\])?")
_WIDTHS = {"b8": 1, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8, "s64": 8, "b64": 8}


def entry_of(ptx: str) -> tuple[str, list[int]]:
    """Returns the name of the kernel in ``ptx`` and the size in bytes of each parameter.

    Raises:
      KernelBuildError: there is not exactly one kernel.
    """
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise KernelBuildError(f"expected one kernel, the PTX has {[name for name, _ in entries]}")
    name, parameters = entries[0]
    return name, [_WIDTHS[kind] * int(count or 1) for kind, count in _PARAMETER.findall(parameters)]
