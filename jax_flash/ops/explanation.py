"""What `jax_flash.explain` returns: which implementation a call uses, and why not another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_flash.ops import registration
from jax_flash.ops.arguments import Call
from jax_flash.ops.dispatch import Decision, default_backend_is_cuda
from jax_flash.ops.ffi_calls import workspace_bytes
from jax_flash.spec.launch_plan import Operation
from jax_flash.spec.variant import KernelRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel that a call runs, in launch order."""

    name: str
    tile: Mapping[str, int]
    """Tile sizes by name."""
    registers: int
    """Registers of a thread."""

    def __str__(self) -> str:
        """One line."""
        tile = ", ".join(f"{name}={size}" for name, size in sorted(self.tile.items()))
        return f"{self.name} ({tile}; {self.registers} registers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which implementation runs one call of `jax_flash.attention`, and why.

    `print` it: the text says everything below.

    Attributes:
        implementation: what runs on the default backend of this process: `on_cuda` or `elsewhere`.
        on_cuda: what runs when lowered for CUDA: "cuda" (kernels), "xla" (plain JAX in linear
            memory), "emulate" (kernels on the emulator), or "error" if the named implementation
            cannot run the call.
        elsewhere: "xla" or "emulate", or "error" for implementation="cuda", which needs a CUDA
            device, and where "emulate" cannot run the call.
        requested: the `implementation` argument.
        target: the architecture and where it was learned from; empty if not looked for.
        reasons_against_cuda: why no kernel runs the call; empty if kernels do.
        forward: kernels of the forward pass on CUDA, in launch order.
        packed_heads: whether the forward pass takes the query heads of a group as rows of one head.
        backward: kernels of the backward pass on CUDA, in launch order.
        deterministic_bwd: whether gradients have the same bits on every run on CUDA.
        backward_workspace_bytes: bytes of device memory that the backward pass needs beside its
            operands and gradients, with kernels; an expression if dimensions are symbolic.
        cubins: directory of the cubins.
    """

    implementation: str
    on_cuda: str
    elsewhere: str
    requested: str | None
    target: str = ""
    reasons_against_cuda: tuple[str, ...] = ()
    forward: tuple[Kernel, ...] = ()
    packed_heads: bool = False
    backward: tuple[Kernel, ...] = ()
    deterministic_bwd: bool = True
    backward_workspace_bytes: Any = 0
    cubins: Path

    def __str__(self) -> str:
        """Several lines, for people."""
        words = {
            "cuda": "cuda (kernels)",
            "xla": "xla (plain JAX)",
            "emulate": "emulate (kernels on the emulator)",
            "error": "an error",
        }
        lines = [
            f"attention(implementation={self.requested!r}):",
            f"  on CUDA: {words[self.on_cuda]}{f'; {self.target}' if self.target else ''}",
            f"  elsewhere: {words[self.elsewhere]}",
            f"  on the default backend of this process: {words[self.implementation]}",
        ]
        lines += [f"  why no kernels: {reason}" for reason in self.reasons_against_cuda]
        lines += [f"  forward kernel: {kernel}" for kernel in self.forward]
        if self.packed_heads:
            lines.append("  forward: the query heads of a group are packed, as rows of one head")
        lines += [f"  backward kernel: {kernel}" for kernel in self.backward]
        if self.on_cuda == "cuda":
            order = "deterministic" if self.deterministic_bwd else "not deterministic"
            lines.append(f"  backward: {order}, workspace {_number(self.backward_workspace_bytes)}")
        lines.append(f"  cubins: {self.cubins}")
        return "\n".join(lines)


def explanation_of(call: Call, decision: Decision) -> Explanation:
    """Puts a decision into words."""
    route, kernels, reasons = decision.route, decision.route.kernels, decision.reasons
    if call.implementation == "xla":
        reasons = ('implementation="xla" was asked for',)
    elif kernels is None and not reasons:
        reasons = ("a dimension is 0, so there is nothing for a kernel to do",)
    elsewhere = "error" if route.cuda_only else "xla"
    on_cuda = "xla" if kernels is None else "cuda"
    if route.cuda_only and decision.reasons:
        on_cuda = "error"
    if route.emulated:
        on_cuda = elsewhere = "emulate"
    elif call.implementation == "emulate" and decision.reasons:
        on_cuda = elsewhere = "error"
    bias_operation = None if kernels is None else kernels.backward_bias
    bias = () if bias_operation is None else _kernels(bias_operation)
    shapes = {name: tuple(getattr(call, name).shape) for name in ("query", "key", "value")}
    return Explanation(
        implementation=on_cuda if default_backend_is_cuda() else elsewhere,
        on_cuda=on_cuda,
        elsewhere=elsewhere,
        requested=call.implementation,
        target="" if decision.target is None else decision.target.description,
        reasons_against_cuda=reasons,
        forward=() if kernels is None else _kernels(kernels.forward),
        packed_heads=kernels is not None and kernels.forward.packs_heads,
        backward=() if kernels is None else (*_kernels(kernels.backward), *bias),
        deterministic_bwd=kernels is None or _is_deterministic(kernels.backward),
        backward_workspace_bytes=(
            0 if kernels is None else workspace_bytes(kernels.backward, shapes)
        ),
        cubins=registration.REGISTRATION.directory,
    )


def _is_deterministic(backward: Operation) -> bool:
    return all(
        kernel.deterministic or kernel.role is not KernelRole.BACKWARD
        for kernel in backward.kernels
    )


def _number(size: Any) -> str:
    return f"{size:,} bytes" if isinstance(size, int) else f"{size} bytes"


def _kernels(operation: Operation) -> tuple[Kernel, ...]:
    entries = registration.REGISTRATION.kernels
    return tuple(
        Kernel(
            name=kernel.name,
            tile=entries[kernel.name].tile,
            registers=entries[kernel.name].registers,
        )
        for kernel in operation.kernels
    )
