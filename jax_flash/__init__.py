"""FlashAttention for JAX: kernels compiled ahead of time, called through XLA's FFI.

>>> import jax_flash
>>> output = jax_flash.attention(query, key, value, is_causal=True)  # doctest: +SKIP

See `attention` for the arguments, `explain` for which implementation a call uses and why,
`jax_flash.context_parallel` for sequences sharded over devices, `export_checks` for `jax.export`,
and `jax_flash.flax` for Flax modules.
"""

import importlib
import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_flash import context_parallel as context_parallel
    from jax_flash import flax as flax

    __version__: str

# The build imports `jax_flash.aot` in an environment that has the compiler but no jax.
if importlib.util.find_spec("jax") is not None:
    from jax_flash.api import Explanation, attention, explain, export_checks

__all__ = [
    "Explanation",
    "__version__",
    "attention",
    "context_parallel",
    "explain",
    "export_checks",
    "flax",
]


def _version() -> str:
    try:
        return metadata.version("jax_flash")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a source tree on the path, not installed


def __getattr__(name: str) -> Any:
    """Resolves what costs an import: the version, and modules that not all programs use."""
    if name == "__version__":
        return _version()
    if name in __all__ and importlib.util.find_spec("jax") is None:
        raise ImportError(
            f"jax_flash.{name} needs jax, which is not installed. Install it, for example with "
            "`pip install jax` or `pip install jax[cuda12]`."
        )
    if name in ("context_parallel", "flax"):
        return importlib.import_module(f"jax_flash.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
