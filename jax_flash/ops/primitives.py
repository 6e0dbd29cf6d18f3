"""A primitive that refuses to be lowered for a platform without kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters import mlir

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def kernels_only(array: jax.Array, platforms: tuple[str, ...]) -> jax.Array:
    """Returns its argument when lowered for `platforms`, and raises when lowered for any other.

    While tracing, the platform is not known: a computation traced on a CPU-only machine may be
    lowered for CUDA. `jax.lax.platform_dependent` without a default does the same, with an error
    about its own internals.
    """
    return _kernels_only().bind(array, platforms=platforms)


@functools.cache
def _kernels_only() -> Primitive:
    # jax.extend imports Pallas, a good part of what importing this package would cost.
    from jax.extend.core import Primitive

    primitive = Primitive("jax_flash_kernels_only")
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="platforms"))
    primitive.def_abstract_eval(lambda array, platforms: array)
    mlir.register_lowering(primitive, _lower)
    return primitive


def _lower(context: Any, operand: Any, *, platforms: tuple[str, ...]) -> list[Any]:
    lowered_for = context.platforms or context.module_context.platforms
    if set(lowered_for) <= set(platforms):
        return [operand]
    raise NotImplementedError(
        f'implementation="cuda" needs a CUDA device, but the computation is lowered for '
        f"{', '.join(lowered_for)}. Run it where jax.devices() lists CUDA devices, or pass "
        'implementation=None (kernels on CUDA, plain JAX elsewhere) or "xla".'
    )
