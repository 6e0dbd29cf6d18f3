"""Decides which implementation runs a call, and keeps the reasons."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.ops import registration
from jax_flash.ops.arguments import Call
from jax_flash.ops.packed_heads import can_pack_heads
from jax_flash.spec.arch import Arch, arch_of_compute_capability
from jax_flash.spec.band_mask import Band, band_of, kernel_band, with_both_bounds
from jax_flash.spec.launch_plan import (
    Operation,
    backward_bias_operation,
    backward_operation,
    forward_operation,
)
from jax_flash.spec.problem import GENERAL_FEATURES, AttentionProblem, Feature
from jax_flash.spec.support import (
    KERNEL_DTYPES,
    backward_bias_tile_dims,
    backward_tile_dims,
    forward_tile_dims,
    reasons_unsupported,
)
from jax_flash.spec.tile_table import is_short
from jax_flash.spec.variant import KernelVariant

_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """What the kernels need besides arrays; hashable, part of every jit key."""

    forward: Operation
    backward: Operation
    backward_bias: Operation | None = None
    """The bias's gradient; None for a call without a bias."""
    scale: float
    soft_cap: float = 0.0
    """Bound of the logits; 0 for none."""
    band: Band
    rows_per_query: int = 1
    """Query heads that are rows of one head, where an operation packs them; set where the shapes of
    a device's part are known."""

    @property
    def variants(self) -> tuple[KernelVariant, ...]:
        """Every kernel, in launch order."""
        operations = (self.forward, self.backward, self.backward_bias)
        return tuple(kernel for one in operations if one is not None for kernel in one.kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which implementation runs where; hashable, part of every jit key.

    Attributes:
        kernels: what to call when lowered for CUDA; None for plain JAX there, too.
        platforms: those that kernels are called on: CUDA, except in tests.
        cuda_only: refuse to be lowered for any other platform.
        emulated: run the kernels on the emulator, on every platform.
        query_offset: the static offset, for plain JAX.
    """

    kernels: KernelCall | None = None
    platforms: tuple[str, ...] = ("cuda",)
    cuda_only: bool = False
    emulated: bool = False
    query_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The architecture whose kernels a computation lowered for CUDA would call."""

    arch: Arch | None
    description: str
    error: str = ""
    """Why there are no kernels for it; empty when there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A route, and why it is not the other one.

    Attributes:
        route: where the call goes.
        target: None when the implementation named by the caller needs no target.
        problem: the call as kernels see it.
        reasons: why no kernel runs the call; empty when kernels do, or when "xla" was asked for.
        unavailable: whether the reason is the installation and not the call.
    """

    route: Route
    target: Target | None = None
    problem: AttentionProblem
    reasons: tuple[str, ...] = ()
    unavailable: bool = False


_EMULATED_TARGET = Target(arch=Arch.SM90A, description="an emulated sm_90a device")


def choose(call: Call) -> Route:
    """Returns the route of a call.

    Raises:
      NotImplementedError: `implementation` names one that cannot run the call; all reasons given.
      RuntimeError: `implementation` is "cuda" or "emulate" and the kernels are not installed.
    """
    decision = decide(call)
    if call.implementation in ("cuda", "emulate") and decision.reasons:
        named = f'implementation="{call.implementation}"'
        reasons = "; ".join(decision.reasons)
        others = 'implementation=None (kernels where they apply, else plain JAX) or "xla"'
        if decision.unavailable:
            raise RuntimeError(f"{named} is not available: {reasons} Or pass {others}.")
        raise NotImplementedError(
            f"{named} cannot run this call: {reasons}. Change what is named here, or pass {others}."
        )
    return decision.route


def decide(call: Call) -> Decision:
    """Returns the route of a call with the reasons for it.

    A call without any query, key, head or batch element has nothing for a kernel to do; plain JAX
    gives its result on every implementation.
    """
    problem = problem_of(call)
    plain = Route(
        platforms=registration.REGISTRATION.platforms,
        cuda_only=call.implementation == "cuda",
        query_offset=call.query_offset,
    )
    if call.implementation == "xla":
        return Decision(route=plain, problem=problem)
    if error := registration.REGISTRATION.error:
        return Decision(route=plain, problem=problem, reasons=(error,), unavailable=True)
    emulated = call.implementation == "emulate"
    target = _EMULATED_TARGET if emulated else find_target()
    if target.arch is None or target.error:
        return Decision(route=plain, target=target, problem=problem, reasons=(target.error,))
    reasons = _reasons_unsupported(call, problem, target.arch)
    if reasons:
        return Decision(route=plain, target=target, problem=problem, reasons=reasons)
    kernels = _kernel_call(call, problem, target.arch)
    if missing := _missing_kernels(kernels):
        return Decision(route=plain, target=target, problem=problem, reasons=missing)
    if emulated and (missing := _missing_ptx(kernels)):
        return Decision(
            route=plain, target=target, problem=problem, reasons=missing, unavailable=True
        )
    if _is_empty(call):
        return Decision(route=plain, target=target, problem=problem)
    route = replace(plain, kernels=kernels, emulated=emulated)
    return Decision(route=route, target=target, problem=problem)


def problem_of(call: Call) -> AttentionProblem:
    """Returns what of a call decides which kernel runs it."""
    semantics = call.semantics
    features = {
        Feature.QUERY_OFFSET_ARRAY: semantics.query_offset,
        Feature.QUERY_LENGTHS: semantics.query_lengths,
        Feature.KEY_LENGTHS: semantics.key_lengths,
        Feature.SEGMENT_IDS: semantics.query_segment_ids,
        Feature.SOFT_CAP: semantics.soft_cap,
        Feature.SINKS: semantics.sinks,
        Feature.BIAS: semantics.bias,
        Feature.MASK: semantics.mask,
    }
    *_, query_length, query_heads, head_dim = call.query.shape
    *_, key_length, key_heads, value_head_dim = call.value.shape
    return AttentionProblem(
        dtype=jnp.dtype(call.query.dtype).name,
        query_length=query_length,
        key_length=key_length,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        band=_band(call).mask,
        features=frozenset(name for name, value in features.items() if value is not None),
        deterministic_bwd=call.deterministic_bwd or xla_is_deterministic(),
    )


def xla_is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for deterministic GPU operations."""
    value = "false"
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag == _DETERMINISTIC_FLAG:
            value = "true"
        elif flag.startswith(f"{_DETERMINISTIC_FLAG}="):
            value = flag.partition("=")[2].lower()
    return value in ("true", "1")


def find_target() -> Target:
    """Returns the architecture of the first local CUDA device.

    Where this process sees none, computations may still be lowered for CUDA: then it is the first
    architecture that there are cubins for.
    """
    built = {name.partition("/")[0] for name in registration.REGISTRATION.kernels}
    archs = [arch for arch in Arch if arch.value in built]
    there_are = f"there are cubins for {', '.join(sorted(built)) or 'no architecture'}"
    devices = _cuda_devices()
    if not devices:
        if not archs:
            return Target(arch=None, description="no CUDA device", error=there_are)
        return Target(
            arch=archs[0], description=f"no CUDA device in this process, so {archs[0].value}"
        )
    device = devices[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    description = f"{device.device_kind} with compute capability {capability}"
    numbers = [int(part) if part.isdigit() else -1 for part in capability.split(".")]
    arch = arch_of_compute_capability(*numbers) if len(numbers) == 2 else None
    if arch not in archs:
        return Target(
            arch=None,
            description=description,
            error=f"the device is a {description}, and {there_are}",
        )
    return Target(arch=arch, description=description)


def default_backend_is_cuda() -> bool:
    """Whether this process runs computations on CUDA unless told otherwise."""
    return jax.default_backend() in ("gpu", "cuda") and bool(_cuda_devices())


def _cuda_devices() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # this process has no such backend
        return []


def _band(call: Call) -> Band:
    return band_of(
        is_causal=call.semantics.is_causal,
        window=call.semantics.window,
        query_offset=call.query_offset,
    )


def _is_empty(call: Call) -> bool:
    # Symbolic dimensions are at least 1.
    sizes = (*call.query.shape[:-1], call.key.shape[-3])
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _reasons_unsupported(call: Call, problem: AttentionProblem, arch: Arch) -> tuple[str, ...]:
    if _is_empty(call):
        problem = replace(problem, query_length=1, key_length=1)
    reasons = list(reasons_unsupported(problem, arch))
    if call.semantics.scale <= 0:
        # Kernels take the maximum of the logits before scaling them.
        reasons.append(f"scale={call.semantics.scale} (kernels need a scale greater than 0)")
    return tuple(reasons)


def _kernel_call(call: Call, problem: AttentionProblem, arch: Arch) -> KernelCall:
    dtype = KERNEL_DTYPES[problem.dtype]
    band = kernel_band(_band(call))
    if problem.features & GENERAL_FEATURES:
        band = with_both_bounds(band)
    forward_dims = forward_tile_dims(problem, arch)
    backward_dims = backward_tile_dims(problem, arch)
    assert forward_dims is not None, "reasons_unsupported has checked the head dimensions"
    bias_dims = backward_bias_tile_dims(problem, arch)
    assert backward_dims is not None, "every head dimension with a forward kernel has backward ones"
    backward_bias = None
    if bias_dims is not None and Feature.BIAS in problem.features:
        backward_bias = backward_bias_operation(arch, dtype, bias_dims, problem.features)
    return KernelCall(
        forward=forward_operation(
            arch,
            dtype,
            forward_dims,
            band.mask,
            problem.features,
            short=_is_short(problem),
            packs_heads=can_pack_heads(problem),
        ),
        backward=backward_operation(
            arch,
            dtype,
            backward_dims,
            band.mask,
            problem.features,
            deterministic=problem.deterministic_bwd,
        ),
        backward_bias=backward_bias,
        scale=call.semantics.scale,
        soft_cap=call.semantics.soft_cap or 0.0,
        band=band,
    )


def _is_short(problem: AttentionProblem) -> bool:
    # Symbolic lengths (jax.export) may turn out to be any.
    lengths = problem.query_length, problem.key_length
    return all(isinstance(length, int) for length in lengths) and is_short(*lengths)


def _missing_kernels(kernels: KernelCall) -> tuple[str, ...]:
    names = [kernel.name for kernel in kernels.variants]
    missing = sorted(set(names) - set(registration.REGISTRATION.kernels))
    if not missing:
        return ()
    return (
        f"kernels {', '.join(missing)} are not among the cubins in "
        f"{registration.REGISTRATION.directory} (build them with `python -m jax_flash.aot build`)",
    )


def _missing_ptx(kernels: KernelCall) -> tuple[str, ...]:
    directory = registration.REGISTRATION.directory
    names = [kernel.name for kernel in kernels.variants]
    missing = [name for name in names if not (directory / f"{name}.ptx").is_file()]
    if not missing:
        return ()
    return (
        f"the emulator runs PTX, and there is none of {', '.join(missing)} in {directory}; in a "
        "source tree, `python -m jax_flash.aot build` makes it.",
    )
