"""What `jax.export` has to be told about the FFI calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.export import DisabledSafetyCheck

FFI_TARGETS = (
    "jax_flash_forward_v1",
    "jax_flash_backward_v1",
    "jax_flash_backward_bias_v1",
)
"""Targets that programs may name: every one that an exported program may ask for."""


def export_checks() -> list[DisabledSafetyCheck]:
    """Returns the safety checks to disable when exporting a program that calls attention.

    `jax.export` refuses custom calls that it does not know to be stable. Ours are: their targets
    have a version in the name, and a process that loads the program needs `import jax_flash`, of a
    release that has these targets and the kernels that the program names.

    >>> exported = jax.export.export(
    ...     jax.jit(model), platforms=["cuda"], disabled_checks=jax_flash.export_checks()
    ... )(*shapes)  # doctest: +SKIP

    Returns:
        One check for each FFI target, for `disabled_checks` of `jax.export.export`.
    """
    # Most programs are not exported, and the module costs time to import.
    from jax.export import DisabledSafetyCheck

    return [DisabledSafetyCheck.custom_call(target) for target in FFI_TARGETS]
