"""A primitive that refuses to be lowered for a platform without kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters import mlir

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def cuda_only(array: jax.Array) -> jax.Array:
    """Returns its argument when lowered for CUDA, and raises when lowered for anything else.

    While tracing, the platform is not known: a computation traced on a CPU-only machine may be
    lowered for CUDA. `jax.lax.platform_dependent` without a default does the same, with an error
    about its own internals.
    """
    return _cuda_only().bind(array)


@functools.cache
def _cuda_only() -> Primitive:
    # jax.extend imports Pallas, a good part of what importing this package would cost.
    from jax.extend.core import Primitive

    primitive = Primitive("jax_flash_cuda_only")
    primitive.def_impl(jax.jit(primitive.bind))
    primitive.def_abstract_eval(lambda array: array)
    mlir.register_lowering(primitive, _refuse)
    mlir.register_lowering(primitive, lambda context, operand: [operand], platform="cuda")
    return primitive


def _refuse(context: Any, operand: Any) -> list[Any]:
    del operand
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(
        f'implementation="cuda" needs a CUDA device, but the computation is lowered for '
        f"{', '.join(platforms)}. Run it where jax.devices() lists CUDA devices, or pass "
        'implementation=None (kernels on CUDA, plain JAX elsewhere) or "xla".'
    )
