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
    text, memory, addresses = _Text(), GlobalMemory(), []
    for name, array in {**inputs, **buffers}.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        addresses.append(memory.allocate(raw.size, name, raw))
    for name, dtype in outputs.items():
        width = 4 if np.dtype(dtype) == np.bool_ else np.dtype(dtype).itemsize
        addresses.append(memory.allocate(threads * width, name))
    for name, array in inputs.items():
        text.add_input(name, np.asarray(array).itemsize)
    for name in buffers:
        text.add_buffer(name)
    for name, dtype in outputs.items():
        text.add_output(name, np.dtype(dtype))
    program = decode(parse_ptx(text.kernel(body, threads)), "snippet", allocate=_no_variables)
    schedule = launch.pop("schedule", Schedule())
    checks = launch.pop("checks", Checks())
    machine = Machine(
        program,
        Launch(
            threads=(threads, 1, 1),
            parameters=b"".join(struct.pack("<Q", address) for address in addresses),
            dynamic_shared_bytes=shared_bytes,
            **{"grid": (1, 1, 1), **launch},
        ),
        memory,
        schedule,
        checks,
    )
    statistics = machine.run()
    places = dict(zip([*inputs, *buffers, *outputs], addresses, strict=True))

    def content(name: str, dtype: Any) -> np.ndarray:
        stored = memory.memory_at(places[name])
        return stored.bytes[: stored.size].copy().view(dtype)

    results = {
        name: content(name, np.uint32) != 0 if np.dtype(dtype) == np.bool_ else content(name, dtype)
        for name, dtype in outputs.items()
    }
    changed = {name: content(name, a.dtype).reshape(a.shape) for name, a in buffers.items()}
    return Outcome(outputs=results, statistics=statistics, buffers=changed)


@dataclass(slots=True)
class _Text:
    """Parts of the kernel around a snippet."""

    parameters: list[str] = field(default_factory=list)
    declarations: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)

    def _place(self, name: str, width: int) -> list[str]:
        return [
            f"    ld.param.b64 %base, [parameter_{name}];",
            f"    mul.wide.u32 %offset, %thread, {width};",
            "    add.s64 %base, %base, %offset;",
        ]

    def add_input(self, name: str, width: int) -> None:
        letter = _letter(8 * width)
        self.parameters.append(f".param .u64 parameter_{name}")
        self.declarations.append(f"    .reg .{letter} %{name};")
        self.loads += [*self._place(name, width), f"    ld.global.{letter} %{name}, [%base];"]

    def add_buffer(self, name: str) -> None:
        self.parameters.append(f".param .u64 parameter_{name}")
        self.declarations.append(f"    .reg .b64 %{name};")
        self.loads.append(f"    ld.param.b64 %{name}, [parameter_{name}];")

    def add_output(self, name: str, dtype: np.dtype) -> None:
        self.parameters.append(f".param .u64 parameter_{name}")
        if dtype == np.bool_:
            self.declarations += [f"    .reg .pred %{name};", f"    .reg .b32 %word_{name};"]
            self.stores.append(f"    selp.b32 %word_{name}, 1, 0, %{name};")
            self.stores += [*self._place(name, 4), f"    st.global.b32 [%base], %word_{name};"]
            return
        letter = _letter(8 * dtype.itemsize)
        self.declarations.append(f"    .reg .{letter} %{name};")
        self.stores += self._place(name, dtype.itemsize)
        self.stores.append(f"    st.global.{letter} [%base], %{name};")

    def kernel(self, body: str, threads: int) -> str:
        return _TEMPLATE.format(
            parameters=", ".join(self.parameters),
            threads=threads,
            declarations="\n".join(self.declarations),
            loads="\n".join(self.loads),
            body=body,
            stores="\n".join(self.stores),
        )


def _no_variables(name: str, data: bytes) -> int:
    raise AssertionError(f"snippets have no global variables, but {name} of {len(data)} bytes")


def per_lane(values: list[Any], dtype: Any) -> np.ndarray:
    """Returns 32 values: those given, the last one repeated."""
    return np.array([*values, *[values[-1]] * (LANES - len(values))], dtype)
