"""CMake and Bazel name every source file: one that they miss would be left out of a build."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names(build_file: str, suffixes: str) -> set[str]:
    """File names with one of the suffixes ("cc|h") that a build file's lists hold."""
    text = (ROOT / build_file).read_text()
    without_comments = re.sub(r"(?m)#.*$", "", text)
    return set(re.findall(rf"[\w/.]+\.(?:{suffixes})\b", without_comments))


def files(folder: str, *patterns: str, recursive: bool = False) -> set[str]:
    """Paths of files below a folder, relative to it."""
    base = ROOT / folder
    found = [
        path
        for pattern in patterns
        for path in (base.rglob(pattern) if recursive else base.glob(pattern))
    ]
    assert found, f"no {patterns} in {folder}"
    return {path.relative_to(base).as_posix() for path in found}


def test_cmake_lists_every_cpp_source():
    listed = {name for name in names("CMakeLists.txt", "cc") if name.startswith("ffi/")}
    assert listed == {f"ffi/{file}" for file in files("ffi", "*.cc")}


def test_cmake_lists_every_cpp_test():
    text = (ROOT / "ffi/tests/CMakeLists.txt").read_text()
    listed = names("ffi/tests/CMakeLists.txt", "cc")
    tests = {f"{name}.cc" for name in re.findall(r"jax_flash_test\((\w+)", text)}
    # The function that defines a test has a parameter for the name.
    assert (listed | tests) - {"name.cc"} == files("ffi/tests", "*.cc")


def test_bazel_lists_every_cpp_source_and_header():
    assert names("ffi/BUILD.bazel", "cc|h") == files("ffi", "*.cc", "*.h")


def test_bazel_lists_every_cpp_test():
    text = (ROOT / "ffi/tests/BUILD.bazel").read_text()
    # "cc_test" is the rule.
    tests = {f"{name}.cc" for name in set(re.findall(r'"(\w+_test)"', text)) - {"cc_test"}}
    listed = names("ffi/tests/BUILD.bazel", "cc|h")
    assert listed | tests == files("ffi/tests", "*.cc", "*.h")


def test_bazel_lists_every_python_source():
    listed = re.findall(
        r'"(jax_flash/[\w/]+\.py)"', (ROOT / "bazel/python_sources.bzl").read_text()
    )
    present = {f"jax_flash/{file}" for file in files("jax_flash", "*.py", recursive=True)}
    missing, gone = sorted(present - set(listed)), sorted(set(listed) - present)
    assert not missing and not gone, (
        f"bazel/python_sources.bzl lacks {missing} and lists {gone}, which do not exist: "
        "run python bazel/list_python_sources.py"
    )


def test_bazel_libraries_depend_on_what_they_include():
    text = (ROOT / "ffi/BUILD.bazel").read_text()
    libraries = re.findall(r'cc_library\(\n    name = "(\w+)",(.*?)\n\)', text, flags=re.DOTALL)
    assert len(libraries) >= 10
    for name, body in libraries:
        sources = [ROOT / "ffi" / f"{name}{suffix}" for suffix in (".h", ".cc")]
        code = "".join(source.read_text() for source in sources if source.exists())
        included = set(re.findall(r'#include "ffi/(\w+)\.h"', code)) - {name}
        assert set(re.findall(r'":(\w+)"', body)) == included, name
