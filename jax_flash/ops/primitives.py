"""A primitive that refuses to be lowered for a platform without kernels."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_cuda_only = Primitive("jax_flash_cuda_only")


def cuda_only(array: jax.Array) -> jax.Array:
    """Returns its argument when lowered for CUDA, and raises when lowered for anything else.

    While tracing, the platform is not known: a computation traced on a CPU-only machine may be
    lowered for CUDA. `jax.lax.platform_dependent` without a default does the same, with an error
    about its own internals.
    """
    return _cuda_only.bind(array)


@_cuda_only.def_impl
def _run(array: jax.Array) -> jax.Array:
    return jax.jit(_cuda_only.bind)(array)


@_cuda_only.def_abstract_eval
def _type(array: Any) -> Any:
    return array


def _lower_for_cuda(context: Any, operand: Any) -> list[Any]:
    del context
    return [operand]


def _refuse(context: Any, operand: Any) -> list[Any]:
    del operand
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(
        f'implementation="cuda" needs a CUDA device, but the computation is lowered for '
        f"{', '.join(platforms)}. Run it where jax.devices() lists CUDA devices, or pass "
        'implementation=None (kernels on CUDA, plain JAX elsewhere) or "xla".'
    )


mlir.register_lowering(_cuda_only, _refuse)
mlir.register_lowering(_cuda_only, _lower_for_cuda, platform="cuda")
