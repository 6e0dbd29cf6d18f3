"""Jits FFI calls on XLA's CPU backend, with handlers that launch on the fake driver.

A program of its own because it registers targets for the whole process, under the names that the
library uses. Usage: launch_on_cpu.py <folder of the extension> <case.json>; prints JSON.

The case: {"kernels": [keyword arguments of add_kernel], "target": ..., "attributes": {name: [numpy
dtype or "str", value]}, "operands": {name: [dtype, shape]}, "results": {name: [dtype, shape]}}.
"""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def attribute(kind: str, value):
    return value if kind == "str" else np.dtype(kind).type(value)


def main(extension_folder: str, case_path: str) -> None:
    sys.path.insert(0, extension_folder)
    extension = importlib.import_module("_ffi")
    # What the library does on any host; it takes effect when there is a CUDA backend.
    for target, stages in extension.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")
    for target, stages in extension.cpu_registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform="cpu")

    case = json.loads(Path(case_path).read_text())
    for kernel in case["kernels"]:
        kernel["arguments"] = [tuple(argument) for argument in kernel["arguments"]]
        kernel["grid"] = [tuple(factor) for factor in kernel["grid"]]
        extension.add_kernel(kernel.pop("name"), **kernel)

    operands = [jnp.zeros(shape, dtype) for dtype, shape in case["operands"].values()]
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in case["results"].values()]
    attributes = {name: attribute(*value) for name, value in case["attributes"].items()}
    attributes["operands"] = ",".join(case["operands"])
    attributes["results"] = ",".join(case["results"])

    @jax.jit
    def call(*arrays):
        return jax.ffi.ffi_call(case["target"], results)(*arrays, **attributes)

    report = {"error": "", "addresses": {}, "kernel_names": extension.kernel_names()}
    try:
        outputs = jax.block_until_ready(call(*operands))
    except jax.errors.JaxRuntimeError as error:
        report["error"] = str(error)
    else:
        arrays = dict(zip(case["operands"], operands, strict=True))
        arrays |= dict(zip(case["results"], outputs, strict=True))
        report["addresses"] = {name: a.unsafe_buffer_pointer() for name, a in arrays.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
