"""Runs operations (`spec.launch_plan.Operation`) kernel by kernel, launched by the manifest.

Parameters, tensor maps and grids are made from the same specification that the C++ launcher uses:
`spec.kernel_args` and the manifest's rows.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.machine import Checks, Launch, Machine
from jax_flash.emulator.memory import GlobalMemory
from jax_flash.emulator.parser import parse_ptx
from jax_flash.emulator.program import Program, decode
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.statistics import Statistics
from jax_flash.emulator.syntax import Module
from jax_flash.emulator.tensor_map import TensorMap
from jax_flash.spec.band_mask import Band
from jax_flash.spec.buffers import Buffer, dense_axes
from jax_flash.spec.kernel_args import (
    KernelArgument,
    PointerArgument,
    ScalarArgument,
    TensorMapArgument,
    argument_bytes,
    kernel_arguments,
)
from jax_flash.spec.launch_plan import Operation
from jax_flash.spec.manifest import CubinEntry, read_manifest
from jax_flash.spec.variant import DType, KernelVariant

ELEMENT_TYPES = {DType.BF16: np.dtype(ml_dtypes.bfloat16), DType.F16: np.dtype(np.float16)}
_DTYPES = {
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """A compiled kernel: its manifest entry and its PTX."""

    variant: KernelVariant
    entry: CubinEntry
    module: Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run.

    Attributes:
      schedule: interleaving; every kernel of an operation starts it anew, from its seed.
      checks: which of the costly checks to make.
      resident_clusters: clusters that run at the same time.
      multiprocessors: of the emulated device; limits the grids of kernels whose blocks work through
        several tiles. Few, so that small problems reach that path.
    """

    schedule: Schedule = field(default_factory=Schedule)
    checks: Checks = field(default_factory=Checks)
    resident_clusters: int = 3
    multiprocessors: int = 2


@dataclass(slots=True, kw_only=True)
class CallMemory:
    """Buffers of one call in emulated global memory, by name."""

    memory: GlobalMemory = field(default_factory=GlobalMemory)
    addresses: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, np.dtype] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: np.dtype, data: object = None) -> None:
        """Adds a buffer: with data, or uninitialised."""
        size = math.prod(shape) * dtype.itemsize
        raw = None if data is None else np.ascontiguousarray(data, dtype).reshape(-1)
        self.addresses[name] = self.memory.allocate(
            size, name, None if raw is None else raw.view(np.uint8)
        )
        self.shapes[name] = shape
        self.dtypes[name] = dtype

    def array(self, name: str) -> np.ndarray:
        """Returns a copy of a buffer's content; bytes that no kernel wrote are all ones."""
        stored = self.memory.memory_at(self.addresses[name])
        raw = stored.bytes[: stored.size].copy()
        return raw.view(self.dtypes[name]).reshape(self.shapes[name])

    def unwritten(self, name: str) -> int:
        """Returns how many bytes of a buffer no kernel has written."""
        stored = self.memory.memory_at(self.addresses[name])
        return int((stored.written[: stored.size] == 0).sum())


def default_directory() -> Path:
    """Returns where the package's cubins, manifest and PTX are."""
    return Path(__file__).resolve().parent.parent / "cubins"


@lru_cache(maxsize=64)
def _parse(path: Path, modified: float) -> Module:
    del modified  # part of the key: a rebuilt kernel is parsed again
    return parse_ptx(path.read_text())


def load_kernel(variant: KernelVariant, directory: Path) -> KernelText:
    """Loads the PTX of a variant and checks it against the specification.

    Raises:
      PtxError: the PTX is missing, or its parameters are not those of the specification.
    """
    entries = read_manifest(directory).by_name()
    if variant.name not in entries:
        raise PtxError(f"{variant.name} is not in the manifest of {directory}: build it first")
    entry = entries[variant.name]
    path = (directory / entry.file).with_suffix(".ptx")
    if not path.is_file():
        raise PtxError(f"no PTX at {path}: build with `python -m jax_flash.aot build`")
    module = _parse(path, path.stat().st_mtime)
    arguments = kernel_arguments(variant)
    if tuple(argument.as_row() for argument in arguments) != entry.arguments:
        raise PtxError(f"{variant.name}: the manifest's arguments are not the specification's")
    if len(module.entries) != 1:
        raise PtxError(f"{path}: {len(module.entries)} kernels; one is expected")
    (parsed,) = module.entries.values()
    layout = [(p.offset, p.size) for p in parsed.parameters]
    if layout != _layout(arguments):
        raise PtxError(f"{variant.name}: parameters {layout} are not the specification's")
    return KernelText(variant=variant, entry=entry, module=module)


def _layout(arguments: tuple[KernelArgument, ...]) -> list[tuple[int, int]]:
    offset, layout = 0, []
    for argument in arguments:
        size, alignment = argument_bytes(argument)
        offset = -(-offset // alignment) * alignment
        layout.append((offset, size))
        offset += size
    return layout


def tensor_map_of(argument: TensorMapArgument, call: CallMemory) -> TensorMap:
    """Returns the map of a ``[..., length, heads, columns]`` buffer, as ffi/tensor_map.cc does."""
    *leading, length, heads, columns = call.shapes[argument.operand]
    size = call.dtypes[argument.operand].itemsize
    return TensorMap(
        address=call.addresses[argument.operand],
        dtype=argument.dtype,
        extents=(columns, length, heads, math.prod(leading)),
        strides=(heads * columns * size, columns * size, length * heads * columns * size),
        box=(argument.box_columns, argument.box_rows, 1, 1),
        swizzle_bytes=argument.swizzle_bytes,
    )


def pack_parameters(
    arguments: tuple[KernelArgument, ...], call: CallMemory, values: Mapping[str, int | float]
) -> bytes:
    """Returns the bytes of a kernel's parameter space."""
    packed = bytearray()
    for argument, (offset, _) in zip(arguments, _layout(arguments), strict=True):
        packed = packed.ljust(offset, b"\0")
        if isinstance(argument, TensorMapArgument):
            packed += tensor_map_of(argument, call).encode()
        elif isinstance(argument, PointerArgument):
            absent = 0 if argument.optional else None
            address = call.addresses.get(argument.operand, absent)
            if address is None:
                raise PtxError(f"the call has no operand {argument.operand}")
            packed += struct.pack("<Q", address)
        elif isinstance(argument, ScalarArgument):
            form = "<i" if argument.dtype == "int32" else "<f"
            packed += struct.pack(form, values[argument.name])
    return bytes(packed)


def call_values(
    call: CallMemory,
    operation: Operation,
    scale: float,
    soft_cap: float,
    band: Band,
    rows_per_query: int,
) -> dict[str, int | float]:
    """Returns the dimensions and scalars that grids and scalar parameters are named by."""
    *leading, query_length, query_heads, head_dim = call.shapes["query"]
    *_, key_length, key_heads, value_head_dim = call.shapes["value"]
    tiles = -(-query_length // operation.tile_q)
    return {
        "batch": math.prod(leading),
        "query_length": query_length,
        "query_heads": query_heads,
        "head_dim": head_dim,
        "key_length": key_length,
        "key_heads": key_heads,
        "value_head_dim": value_head_dim,
        "query_tiles": tiles,
        "padded_query_length": tiles * operation.tile_q,
        "padded_head_dim": operation.padded_head_dim,
        "scale": float(np.float32(scale)),
        "scale_log2": float(np.float32(scale * math.log2(math.e))),
        "inverse_scale": float(np.float32(1 / scale)),
        "soft_cap": float(np.float32(soft_cap)),
        "band_lower": _bound(band.lower),
        "band_upper": _bound(band.upper),
        "rows_per_query": rows_per_query,
        **_values_of_optional_operands(call),
    }


def _values_of_optional_operands(call: CallMemory) -> dict[str, int]:
    """Returns what the shapes of bias, mask and row statistics say, as ffi/call.cc does."""
    values = {}
    for name in ("bias", "mask"):
        *leading, heads, queries, keys = call.shapes.get(name, (1, 1, 1))
        sizes = (math.prod(leading), heads, queries, keys)
        values[f"{name}_axes"] = dense_axes(sizes)
        for axis, size in zip(("batch", "heads", "queries", "keys"), sizes, strict=True):
            values[f"{name}_{axis}"] = size
    if "lse_log2" in call.shapes:
        values["padded_query_length"] = call.shapes["lse_log2"][-1]
    return values


def _bound(bound: int | None) -> int:
    limit = 2**30
    return 0 if bound is None else max(-limit, min(bound, limit))


def run_kernel(
    kernel: KernelText,
    call: CallMemory,
    values: Mapping[str, int | float],
    options: Options,
) -> Statistics:
    """Runs one kernel on a call's buffers.

    Raises:
      ProgramFault: what the kernel did wrong.
    """
    entry = kernel.entry
    program = decode_kernel(kernel.module, call.memory)
    blocks = grid_blocks(entry, values, options.multiprocessors)
    launch = Launch(
        grid=(blocks, 1, 1),
        threads=(entry.threads, 1, 1),
        cluster=entry.cluster,
        parameters=pack_parameters(kernel_arguments(kernel.variant), call, values),
        dynamic_shared_bytes=entry.shared_memory_bytes,
        registers=entry.registers,
        resident_clusters=options.resident_clusters,
    )
    schedule = replace(options.schedule)
    machine = Machine(program, launch, call.memory, schedule, options.checks)
    statistics = machine.run()
    statistics.blocks += blocks
    return statistics


def grid_blocks(entry: CubinEntry, values: Mapping[str, int | float], multiprocessors: int) -> int:
    """Returns the blocks of a kernel's grid, as ffi/launch.cc evaluates them."""
    blocks = math.prod(-(-int(values[name]) // divisor) for name, divisor in entry.grid)
    cluster = entry.cluster[0]
    blocks = -(-blocks // cluster) * cluster
    if values["query_length"] <= entry.resident_up_to:
        blocks = min(blocks, max(multiprocessors // cluster, 1) * cluster)
    return blocks


def decode_kernel(module: Module, memory: GlobalMemory) -> Program:
    """Decodes the only entry of a module."""
    (name,) = module.entries
    return decode(
        module, name, allocate=lambda title, data: memory.allocate(len(data), title, data)
    )


def run_operation(
    operation: Operation,
    arrays: Mapping[str, np.ndarray],
    *,
    scale: float,
    soft_cap: float = 0.0,
    band: Band,
    rows_per_query: int = 1,
    directory: Path | None = None,
    options: Options | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Statistics]]:
    """Runs the kernels of an operation.

    Args:
      operation: forward or backward, of `spec.launch_plan`.
      arrays: operands by name, ``[..., length, heads, columns]`` and ``[..., T, N]`` float32.
      scale: of the logits.
      soft_cap: bound of the logits, 0 for none.
      band: the mask.
      rows_per_query: query heads that are rows of one head, where they are packed.
      directory: of the manifest; the package's own by default.
      options: interleaving and checks.

    Returns:
      Results by name (workspaces too), and statistics by kernel name.

    Raises:
      ProgramFault: what a kernel did wrong; results that it left unwritten are a fault, too.
      PtxError: an instruction that the emulator does not implement.
    """
    options = options or Options()
    directory = directory or default_directory()
    element = ELEMENT_TYPES[operation.kernels[0].dtype]
    call = CallMemory()
    for operand in operation.operands:
        array = np.asarray(arrays[operand.name])
        dtype = _DTYPES.get(operand.dtype, element)
        call.add(operand.name, array.shape, dtype, array)
    values = call_values(call, operation, scale, soft_cap, band, rows_per_query)
    leading = call.shapes["query"][:-3]
    for buffer in operation.results:
        shape = (*leading, *(int(values[axis]) for axis in buffer.axes))
        if buffer.like:
            shape = call.shapes[buffer.like]
        call.add(buffer.name, shape, _DTYPES.get(buffer.dtype, element))
    statistics = {}
    for variant in operation.kernels:
        kernel = load_kernel(variant, directory)
        statistics[variant.name] = run_kernel(kernel, call, values, options)
    results = {buffer.name: _result(buffer, call) for buffer in operation.results}
    return results, statistics


def _result(buffer: Buffer, call: CallMemory) -> np.ndarray:
    missing = call.unwritten(buffer.name)
    if missing:
        raise PtxError(f"the kernels left {missing} bytes of {buffer.name} unwritten")
    return call.array(buffer.name)
