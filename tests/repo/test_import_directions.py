"""Which part of the package may import which: the table of the design, checked in the sources."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "jax_flash"

# Layer: (other layers of the package, third-party packages) that its modules may import. Modules
# may always import their own layer and the standard library.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "spec": (set(), set()),
    "kernels.shared": ({"spec"}, {"cutlass"}),
    "kernels.sm90": ({"spec", "kernels.shared"}, {"cutlass"}),
    "kernels.sm100": ({"spec", "kernels.shared"}, {"cutlass"}),
    "kernels": (set(), set()),
    "aot": (
        {"spec", "kernels", "kernels.shared", "kernels.sm90", "kernels.sm100"},
        {"cutlass", "tqdm"},
    ),
    "emulator": ({"spec"}, {"numpy", "ml_dtypes"}),
    "reference": ({"spec"}, {"jax", "numpy"}),
    "ops": ({"spec", "reference", "emulator", "_ffi"}, {"jax", "numpy"}),
    "testing": ({"api", "spec", "reference"}, {"jax", "numpy"}),
    "api": ({"ops", "spec"}, {"jax"}),
    "flax": ({"api", "ops", "spec"}, {"jax", "flax"}),
    "context_parallel": ({"ops", "reference", "spec"}, {"jax", "numpy"}),
    "": ({"api", "flax", "context_parallel"}, set()),
}


def layer_of(module: str) -> str:
    """Returns the layer of a module's dotted name below the package; "" is the package itself."""
    parts = module.split(".") if module else [""]
    if parts[0] == "kernels" and len(parts) > 1:
        return ".".join(parts[:2])
    return parts[0]


def module_name(path: Path) -> str:
    """Returns the dotted name of a source file below the package."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imported_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Returns (line, absolute name) of every import, inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append((node.lineno, "(relative)"))
            elif node.module in ("jax_flash", "jax_flash.kernels"):
                # `from jax_flash import ops` imports the layer, not the package's own names.
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append((node.lineno, argument.value))
    return found


def violations(module: str, source: str) -> list[str]:
    """Returns what a module imports and may not."""
    layer = layer_of(module)
    if layer not in ALLOWED:
        return [f"{module}: its layer {layer!r} is not in the table"]
    layers, packages = ALLOWED[layer]
    found = []
    for line, name in imported_names(ast.parse(source)):
        top = name.partition(".")[0]
        if top == "jax_flash":
            target = layer_of(name.partition(".")[2])
            allowed = target == layer or target in layers
        else:
            allowed = top in packages or top in sys.stdlib_module_names
        if not allowed:
            found.append(f"{module or 'jax_flash'}, line {line}: imports {name}")
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path) or "jax_flash")
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec.arch", "import numpy"),
        ("spec.arch", "from jax_flash.ops import dispatch"),
        ("kernels.sm90.forward", "from jax_flash.kernels.sm100 import forward"),
        ("kernels.sm90.forward", "from jax_flash.kernels import sm100"),
        ("kernels.shared.exp2", "import jax"),
        ("aot.compile", "def late():\n    import jax.numpy"),
        ("ops.dispatch", "import cutlass"),
        ("ops.dispatch", "from jax_flash import kernels"),
        ("ops.dispatch", "from jax_flash import aot"),
        ("ops.dispatch", "import importlib\nimportlib.import_module('jax_flash.aot')"),
        ("reference.attention", "from ..ops import dispatch"),
        ("api", "from jax_flash.reference import attention"),
        ("emulator.run", "import jax"),
        ("context_parallel.ring", "from jax_flash.kernels.sm90 import forward"),
        ("new_layer.module", "import os"),
    ],
)
def test_the_check_finds_violations(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("aot.compile", "import cutlass.cute\nfrom jax_flash.kernels.sm90 import forward"),
        ("kernels.sm90.forward", "from jax_flash.kernels.shared import masking"),
        ("ops.dispatch", "import jax.numpy\nfrom jax_flash.ops import registration"),
        ("flax", "def late():\n    import flax"),
        ("", "from jax_flash.api import attention"),
    ],
)
def test_the_check_allows_what_the_table_does(module: str, source: str) -> None:
    assert violations(module, source) == []
