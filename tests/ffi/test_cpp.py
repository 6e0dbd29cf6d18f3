"""Runs the C++ tests (ffi/tests) under sanitizers."""

import pytest

from .conftest import ROOT, Build, run, tool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizers", "target", "tests"),
    [("address,undefined", "all", ".*"), ("thread", "threads_test", "threads_test")],
)
def test_cpp_tests_pass_under_sanitizers(build: Build, sanitizers: str, target: str, tests: str):
    folder = build((target,), "-DCMAKE_BUILD_TYPE=Debug", f"-DJAX_FLASH_SANITIZE={sanitizers}")
    ctest = (tool("ctest"), "--test-dir", str(folder), "--tests-regex", tests)
    run(*ctest, "--output-on-failure", "--no-tests=error")


def test_every_cpp_test_file_is_a_cmake_test():
    listed = (ROOT / "ffi" / "tests" / "CMakeLists.txt").read_text()
    files = sorted((ROOT / "ffi" / "tests").glob("*_test.cc"))
    assert len(files) >= 10
    for file in files:
        assert f"jax_flash_test({file.stem}" in listed
