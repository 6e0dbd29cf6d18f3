"""Runs a few PTX instructions on one warp, with an input and an output value for each lane."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_flash.emulator.machine import Checks, Launch, Machine
from jax_flash.emulator.memory import GlobalMemory
from jax_flash.emulator.parser import parse_ptx
from jax_flash.emulator.program import decode
from jax_flash.emulator.schedule import Schedule
from jax_flash.emulator.statistics import Statistics

LANES = 32

_TEMPLATE = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry snippet({parameters})
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<16>;
    .reg .b16 %h<64>;
    .reg .b32 %r<300>;
    .reg .b64 %d<64>;
    .reg .b32 %lane, %thread, %shared;
    .reg .b64 %base, %offset;
{declarations}
    mov.u32 %thread, %tid.x;
    mov.u32 %lane, %laneid;
    mov.b32 %shared, dynamic;
{loads}
{body}
{stores}
    ret;
}}
"""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Outputs by name, one value a thread, and the run's statistics."""

    outputs: dict[str, np.ndarray]
    statistics: Statistics
    buffers: dict[str, np.ndarray] = field(default_factory=dict)


def _letter(bits: int) -> str:
    return {16: "b16", 32: "b32", 64: "b64"}[bits]


def run_snippet(
    body: str,
    *,
    inputs: dict[str, np.ndarray] | None = None,
    outputs: dict[str, Any] | None = None,
    buffers: dict[str, np.ndarray] | None = None,
    threads: int = LANES,
    shared_bytes: int = 0,
    **launch: Any,
) -> Outcome:
    """Runs ``body`` on one block.

    Args:
      body: PTX; reads registers ``%<input>`` and writes ``%<output>``. ``%thread``, ``%lane`` and
        ``%shared`` (address of dynamic shared memory) are set; ``%p``, ``%h``, ``%r``, ``%d``
        ranges are free.
      inputs: values by name, one a thread.
      outputs: numpy dtype by name; bool outputs are predicates.
      buffers: arrays in global memory, whose addresses are in ``%<name>``; returned changed.
      threads: of the block.
      shared_bytes: dynamic shared memory.
      launch: fields of ``machine.Launch``, and ``schedule``, ``checks``.
    """
    inputs, outputs, buffers = inputs or {}, outputs or {}, buffers or {}
    memory = GlobalMemory()
    addresses, parameters, declarations, loads, stores = [], [], [], [], []

    def parameter(array: np.ndarray | None, size: int, name: str) -> None:
        raw = None if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        addresses.append(memory.allocate(size, name, raw))
        parameters.append(f".param .u64 parameter_{name}")

    def place(name: str, width: int) -> list[str]:
        return [
            f"    ld.param.b64 %base, [parameter_{name}];",
            f"    mul.wide.u32 %offset, %thread, {width};",
            "    add.s64 %base, %base, %offset;",
        ]

    for name, array in inputs.items():
        array = np.asarray(array)
        parameter(array, array.nbytes, name)
        letter = _letter(8 * array.itemsize)
        declarations.append(f"    .reg .{letter} %{name};")
        loads += [*place(name, array.itemsize), f"    ld.global.{letter} %{name}, [%base];"]
    for name, array in buffers.items():
        parameter(array, array.nbytes, name)
        declarations.append(f"    .reg .b64 %{name};")
        loads.append(f"    ld.param.b64 %{name}, [parameter_{name}];")
    for name, dtype in outputs.items():
        dtype = np.dtype(dtype)
        is_predicate = dtype == np.bool_
        width = 4 if is_predicate else dtype.itemsize
        parameter(None, threads * width, name)
        letter = _letter(8 * width)
        declarations.append(f"    .reg .{'pred' if is_predicate else letter} %{name};")
        stores += place(name, width)
        if is_predicate:
            declarations.append(f"    .reg .b32 %word_{name};")
            stores.append(f"    selp.b32 %word_{name}, 1, 0, %{name};")
            stores.append(f"    st.global.b32 [%base], %word_{name};")
        else:
            stores.append(f"    st.global.{letter} [%base], %{name};")
    text = _TEMPLATE.format(
        parameters=", ".join(parameters),
        threads=threads,
        declarations="\n".join(declarations),
        loads="\n".join(loads),
        body=body,
        stores="\n".join(stores),
    )
    program = decode(parse_ptx(text), "snippet", allocate=_no_variables)
    schedule = launch.pop("schedule", Schedule())
    checks = launch.pop("checks", Checks())
    launch = {"grid": (1, 1, 1), **launch}
    machine = Machine(
        program,
        Launch(
            threads=(threads, 1, 1),
            parameters=b"".join(struct.pack("<Q", address) for address in addresses),
            dynamic_shared_bytes=shared_bytes,
            **launch,
        ),
        memory,
        schedule,
        checks,
    )
    statistics = machine.run()
    contents = dict(zip([*inputs, *buffers, *outputs], addresses, strict=True))

    def content(name: str, dtype: np.dtype) -> np.ndarray:
        stored = memory.memory_at(contents[name])
        return stored.bytes[: stored.size].copy().view(dtype)

    results = {}
    for name, dtype in outputs.items():
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            results[name] = content(name, np.dtype(np.uint32)) != 0
        else:
            results[name] = content(name, dtype)
    changed = {
        name: content(name, array.dtype).reshape(array.shape) for name, array in buffers.items()
    }
    return Outcome(outputs=results, statistics=statistics, buffers=changed)


def _no_variables(name: str, data: bytes) -> int:
    raise AssertionError(f"snippets have no global variables, but {name} of {len(data)} bytes")


def per_lane(values: list[Any], dtype: Any) -> np.ndarray:
    """Returns 32 values: those given, the last one repeated."""
    return np.array([*values, *[values[-1]] * (LANES - len(values))], dtype)
