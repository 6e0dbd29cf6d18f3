"""Importing jax_flash: quick, without side effects, and where parts are missing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import jax_flash

ROOT = Path(__file__).parent.parent


def run(program: str, *options: str) -> str:
    """Returns what a fresh interpreter prints for `program`."""
    completed = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_import_costs_little_more_than_jax() -> None:
    program = """
        import time
        import jax
        start = time.process_time()
        import jax_flash
        print(time.process_time() - start)
    """
    # Processor time, and the best of three: what else the machine does should not count.
    assert min(float(run(program)) for _ in range(3)) < 0.2


def test_import_starts_no_backend_and_loads_no_other_framework() -> None:
    program = """
        import sys
        import jax_flash
        from jax.extend import backend
        import jax._src.xla_bridge
        print(len(jax._src.xla_bridge._backends))
        print(sorted({"flax", "torch", "cutlass"} & set(sys.modules)))
    """
    assert run(program).splitlines() == ["0", "[]"]


def test_without_jax_the_build_can_import_and_the_api_says_what_is_missing() -> None:
    program = """
        import sys

        class WithoutJax(sys.meta_path[-1]):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name == "jax" or name.startswith(("jax.", "jaxlib")):
                    return None
                return super().find_spec(name, path, target)

        sys.meta_path[-1] = WithoutJax
        import jax_flash
        import jax_flash.spec.support
        try:
            jax_flash.attention
        except ImportError as error:
            print(error)
        print("jax" in sys.modules)
    """
    message, has_jax = run(program).splitlines()
    assert "jax_flash.attention needs jax, which is not installed" in message
    assert "pip install jax" in message
    assert has_jax == "False"


def test_the_flax_adapter_is_imported_when_used() -> None:
    program = """
        import sys
        import jax_flash
        assert "jax_flash.flax" not in sys.modules
        print(jax_flash.flax.attention_fn.__module__)
        print("flax" in sys.modules)
    """
    assert run(program).splitlines() == ["jax_flash.flax", "False"]


def test_public_names() -> None:
    assert set(jax_flash.__all__) == {
        "Explanation",
        "__version__",
        "attention",
        "context_parallel",
        "explain",
        "export_checks",
        "flax",
    }
    for name in jax_flash.__all__:
        assert getattr(jax_flash, name) is not None
    try:
        _ = jax_flash.no_such_name
    except AttributeError as error:
        assert "no_such_name" in str(error)
    else:
        raise AssertionError("a name that does not exist was found")
