"""The Python side of the extension: what add_kernel takes and refuses."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # for the build


@pytest.fixture(scope="module")
def extension(testing_build: Path) -> ModuleType:
    (path,) = testing_build.glob("_ffi*.so")
    spec = importlib.util.spec_from_file_location("_ffi", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "path": "forward.cubin",
        "symbol": "forward",
        "sha256": "0" * 64,
        "threads": 128,
        "cluster": (1, 1, 1),
        "shared_memory_bytes": 0,
        "programmatic_launch": False,
        "arguments": [("tensor_map", "query", "bf16", 64, 64, 128), ("int32", "batch")],
        "grid": [("batch", 1)],
        "resident_up_to": 0,
    } | changes


def test_registrations(extension: ModuleType):
    registrations = extension.registrations()
    assert sorted(registrations) == [
        "jax_flash_backward_bias_v1",
        "jax_flash_backward_v1",
        "jax_flash_forward_v1",
    ]
    for stages in registrations.values():
        assert sorted(stages) == ["execute", "prepare"]
        assert all(type(capsule).__name__ == "PyCapsule" for capsule in stages.values())
    assert extension.ABI_VERSION == 1


def test_an_equal_kernel_may_be_added_again(extension: ModuleType):
    extension.add_kernel("sm_90a/again", **fields())
    extension.add_kernel("sm_90a/again", **fields())
    assert extension.kernel_names().count("sm_90a/again") == 1
    with pytest.raises(ValueError, match="was already added with different content"):
        extension.add_kernel("sm_90a/again", **fields(threads=256))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 2000}, "threads 2000; must be between 1 and 1024"),
        ({"cluster": (2, 2, 1)}, r"cluster \(2, 2, 1\)"),
        ({"sha256": "abc"}, "64 lower-case hexadecimal digits"),
        ({"grid": []}, "grid has no factors"),
        ({"resident_up_to": -1}, "resident_up_to -1; must not be negative"),
        ({"arguments": []}, "0 arguments"),
        ({"arguments": [()]}, "is empty"),
        ({"arguments": [("int64", "batch")]}, "kind must be tensor_map, pointer, optional_pointer"),
        ({"arguments": [("int32", "batch", "s32")]}, "must have 2 items"),
        ({"arguments": [("pointer", "query", "bf17")]}, "dtype must be one of bf16, f16"),
        ({"arguments": [("pointer", "query")]}, "must have 3 items"),
        ({"arguments": [("tensor_map", "query", "bf16", 64, 64)]}, "must have 6 items"),
        ({"arguments": [("tensor_map", "query", "bf16", 64, 512, 128)]}, "box 64 x 512"),
    ],
)
def test_malformed_kernels_are_refused(extension: ModuleType, changes: dict, reason: str):
    with pytest.raises(ValueError, match=f"jax_flash: kernel sm_90a/malformed: .*{reason}"):
        extension.add_kernel("sm_90a/malformed", **fields(**changes))
    assert "sm_90a/malformed" not in extension.kernel_names()


def test_items_of_the_wrong_type_are_refused(extension: ModuleType):
    with pytest.raises(TypeError):
        extension.add_kernel("sm_90a/typed", **fields(threads="128"))
    with pytest.raises(TypeError):
        extension.add_kernel("sm_90a/typed", **fields(arguments=[["int32", "batch"]]))
