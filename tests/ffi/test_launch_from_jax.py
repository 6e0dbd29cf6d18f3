"""What a jitted FFI call launches: JAX, XLA, the handlers, and a fake driver that logs."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BATCH, QUERY_LENGTH, KEY_LENGTH, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 3, 40, 24, 4, 2, 64

# Numbers of the driver's interface.
BFLOAT16, SWIZZLE_128B, L2_256B = 9, 3, 3

TENSOR_MAP = struct.Struct("<QQ4Q3Q4I4IIiiiii")  # FakeTensorMap in ffi/tests/fake_cuda.h


def write_cubin(folder: Path, symbol: str, parameters: list[tuple[int, int]]) -> dict[str, str]:
    """Writes a cubin as the fake driver reads it; gives the fields that describe the file."""
    text = f"fake cubin\nkernel {symbol} " + " ".join(f"{o}:{b}" for o, b in parameters) + "\n"
    path = folder / f"{symbol}.cubin"
    path.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"path": str(path), "symbol": symbol, "sha256": digest}


def forward_case(folder: Path) -> dict[str, Any]:
    forward = {
        "name": "sm_90a/forward",
        **write_cubin(folder, "forward", [(0, 128), (128, 128), (256, 8), (264, 4), (268, 4)]),
        "threads": 384,
        "cluster": [2, 1, 1],
        "shared_memory_bytes": 100_000,
        "programmatic_launch": False,
        "arguments": [
            ["tensor_map", "query", "bf16", 64, 16, 128],
            ["tensor_map", "key", "bf16", 64, 8, 128],
            ["pointer", "output", "bf16"],
            ["float32", "scale"],
            ["int32", "key_heads"],
        ],
        "grid": [["query_length", 16], ["query_heads", 1], ["batch", 1]],
        "resident_up_to": 0,
    }
    finish = {
        "name": "sm_90a/finish",
        **write_cubin(folder, "finish", [(0, 8), (8, 4)]),
        "threads": 128,
        "cluster": [1, 1, 1],
        "shared_memory_bytes": 0,
        "programmatic_launch": True,
        "arguments": [["pointer", "lse", "f32"], ["int32", "offset"]],
        "grid": [["batch", 2]],
        "resident_up_to": 0,
    }
    return {
        "kernels": [forward, finish],
        "target": "jax_flash_forward_v1",
        "attributes": {
            "version": ["int32", 1],
            "kernels": ["str", "sm_90a/forward,sm_90a/finish"],
            "scale": ["float32", 0.125],
            "offset": ["int64", -5],
        },
        "operands": {
            "query": ["bfloat16", [BATCH, QUERY_LENGTH, QUERY_HEADS, HEAD_DIM]],
            "key": ["bfloat16", [BATCH, KEY_LENGTH, KEY_HEADS, HEAD_DIM]],
            "value": ["bfloat16", [BATCH, KEY_LENGTH, KEY_HEADS, HEAD_DIM]],
        },
        "results": {
            "output": ["bfloat16", [BATCH, QUERY_LENGTH, QUERY_HEADS, HEAD_DIM]],
            "lse": ["float32", [BATCH, QUERY_LENGTH, QUERY_HEADS]],
        },
    }


def run_case(build: Path, folder: Path, case: dict[str, Any]) -> tuple[dict, list[dict]]:
    """Runs launch_on_cpu.py; gives its report and the fake driver's log."""
    case_path = folder / "case.json"
    case_path.write_text(json.dumps(case))
    log = folder / "log.jsonl"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_FLASH_LIBCUDA": str(build / "ffi" / "tests" / "libfakecuda.so"),
        "JAX_FLASH_FAKE_LOG": str(log),
    }
    script = Path(__file__).with_name("launch_on_cpu.py")
    done = subprocess.run(
        [sys.executable, str(script), str(build), str(case_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines() if log.exists() else []
    return json.loads(done.stdout), [json.loads(line) for line in lines]


def tensor_map_fields(hexadecimal: str) -> dict[str, Any]:
    numbers = TENSOR_MAP.unpack(bytes.fromhex(hexadecimal))
    return {
        "address": numbers[1],
        "extents": numbers[2:6],
        "strides": numbers[6:9],
        "box": numbers[9:13],
        "data_type": numbers[18],
        "swizzle": numbers[20],
        "l2_promotion": numbers[21],
    }


@pytest.mark.slow
def test_a_jitted_call_launches_its_kernels_in_order(testing_build: Path, tmp_path: Path):
    report, log = run_case(testing_build, tmp_path, forward_case(tmp_path))
    assert report["error"] == ""
    assert report["kernel_names"] == ["sm_90a/finish", "sm_90a/forward"]
    addresses = report["addresses"]
    forward, finish = (line for line in log if line["call"] == "cuLaunchKernelEx")

    assert forward["kernel"] == "forward"
    blocks = -(-QUERY_LENGTH // 16) * QUERY_HEADS * BATCH
    assert forward["grid"] == [blocks + blocks % 2, 1, 1]
    assert forward["block"] == [384, 1, 1]
    assert forward["cluster"] == [2, 1, 1]
    assert forward["shared_memory_bytes"] == 100_000
    assert forward["programmatic_launch"] is False
    assert tensor_map_fields(forward["parameters"][1]) == {
        "address": addresses["key"],
        "extents": (HEAD_DIM, KEY_LENGTH, KEY_HEADS, BATCH),
        "strides": (
            2 * HEAD_DIM * KEY_HEADS,
            2 * HEAD_DIM,
            2 * HEAD_DIM * KEY_HEADS * KEY_LENGTH,
        ),
        "box": (64, 8, 1, 1),
        "data_type": BFLOAT16,
        "swizzle": SWIZZLE_128B,
        "l2_promotion": L2_256B,
    }
    assert tensor_map_fields(forward["parameters"][0])["address"] == addresses["query"]
    output, scale, key_heads = forward["parameters"][2:]
    assert struct.unpack("<Q", bytes.fromhex(output)) == (addresses["output"],)
    assert struct.unpack("<f", bytes.fromhex(scale)) == (0.125,)
    assert struct.unpack("<i", bytes.fromhex(key_heads)) == (KEY_HEADS,)

    assert finish["kernel"] == "finish"
    assert finish["grid"] == [-(-BATCH // 2), 1, 1]
    assert finish["cluster"] is None
    assert finish["programmatic_launch"] is True
    lse, offset = finish["parameters"]
    assert struct.unpack("<Q", bytes.fromhex(lse)) == (addresses["lse"],)
    assert struct.unpack("<i", bytes.fromhex(offset)) == (-5,)


@pytest.mark.slow
@pytest.mark.parametrize(("resident_up_to", "blocks"), [(QUERY_LENGTH, 12), (QUERY_LENGTH - 1, 36)])
def test_short_queries_get_a_grid_that_the_device_holds(
    testing_build: Path, tmp_path: Path, resident_up_to: int, blocks: int
):
    case = forward_case(tmp_path)
    case["kernels"][0]["resident_up_to"] = resident_up_to
    report, log = run_case(testing_build, tmp_path, case)
    assert report["error"] == ""
    forward = next(line for line in log if line["call"] == "cuLaunchKernelEx")
    # The fake driver's device 0 has 13 multiprocessors: 6 clusters of 2 blocks.
    assert forward["grid"] == [blocks, 1, 1]


@pytest.mark.slow
def test_both_targets_take_rank_three_and_five(testing_build: Path, tmp_path: Path):
    for target, leading in (("jax_flash_forward_v1", []), ("jax_flash_backward_v1", [2, 3])):
        folder = tmp_path / target
        folder.mkdir()
        case = forward_case(folder)
        case["target"] = target
        for buffers in (case["operands"], case["results"]):
            for buffer in buffers.values():
                buffer[1] = leading + buffer[1][1:]
        report, log = run_case(testing_build, folder, case)
        assert report["error"] == ""
        forward = next(line for line in log if line["call"] == "cuLaunchKernelEx")
        extents = tensor_map_fields(forward["parameters"][0])["extents"]
        assert extents == (HEAD_DIM, QUERY_LENGTH, QUERY_HEADS, int(np.prod(leading)))


@pytest.mark.slow
def test_errors_reach_python_with_code_and_reason(testing_build: Path, tmp_path: Path):
    case = forward_case(tmp_path)
    case["results"]["output"][0] = "float32"
    report, log = run_case(testing_build, tmp_path, case)
    assert report["error"].startswith("INVALID_ARGUMENT: jax_flash: output is f32; the kernel")
    assert "[kernel sm_90a/forward] (launch.cc:" in report["error"]
    assert not any(line["call"] == "cuLaunchKernelEx" for line in log)


@pytest.mark.slow
def test_a_python_float_attribute_is_refused(testing_build: Path, tmp_path: Path):
    case = forward_case(tmp_path)
    case["attributes"]["scale"] = ["float64", 0.125]
    report, _ = run_case(testing_build, tmp_path, case)
    assert "attribute scale must be a scalar of type int32, int64 or float32" in report["error"]


@pytest.mark.slow
def test_a_changed_cubin_is_reported_with_its_digests(testing_build: Path, tmp_path: Path):
    case = forward_case(tmp_path)
    path = Path(case["kernels"][0]["path"])
    path.write_text(path.read_text() + "\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    report, _ = run_case(testing_build, tmp_path, case)
    assert report["error"].startswith("DATA_LOSS: jax_flash: cubin ")
    for part in (str(path), case["kernels"][0]["sha256"], digest, "jax_flash.aot build"):
        assert part in report["error"]
