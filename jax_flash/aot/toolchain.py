"""What decides a cubin's bytes: compiler versions and the sources a kernel is made of."""

import ast
import hashlib
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from jax_flash.aot.kernel_classes import KERNEL_CLASSES
from jax_flash.spec.variant import KernelVariant

_PACKAGE = "jax_flash"
_ROOT = Path(__file__).resolve().parents[1]


@cache
def toolchain() -> str:
    """Returns names and versions of every installed CuTe-DSL distribution.

    Code generation, ``ptxas`` included, lives in the ``libs`` distributions.
    """
    versions = {
        distribution.name: distribution.version
        for distribution in distributions()
        if distribution.name.startswith("nvidia-cutlass-dsl")
    }
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _file_of(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _imports(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import name` may import a module or a name of one.
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in modules if module.split(".")[0] == _PACKAGE}


@cache
def sources_of(module: str) -> tuple[Path, ...]:
    """Returns the package's source files that ``module`` imports, directly or not, and its own."""
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = _file_of(name)
        if name in found or path is None or path.parent == _ROOT:
            continue
        found[name] = path
        pending += _imports(path)
    return tuple(sorted(set(found.values())))


def source_hash(variant: KernelVariant) -> str:
    """Returns a hash of everything that decides the cubin of a variant."""
    module = KERNEL_CLASSES[variant.role].module
    digest = hashlib.sha256(f"{variant.name}\n{toolchain()}\n".encode())
    for path in (*sources_of(module), Path(__file__).with_name("compile.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()
