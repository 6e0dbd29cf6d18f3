"""A process of its own: compiles and runs attention by the CPU kernels, and reports in JSON.

Usage: in_a_process.py <library of the handler> <what> [<process> <processes> <address>]

What it does: "explicit", "manual" or "auto" runs a gradient on a mesh with such axes; "load FILE"
runs an exported program. Compilation caches are set by the environment.
"""

import ctypes
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jax_flash.ops import registration
from jax_flash.ops.exporting import FFI_TARGETS
from jax_flash.ops.registration import Registration
from jax_flash.spec.support import variants_to_build
from tests.transforms.programs import (
    BATCH_AND_HEADS,
    attention,
    collectives,
    make_operands,
    with_gradients,
)


def register(library_path: str) -> None:
    """What the fixtures do in the tests' process."""
    library = ctypes.CDLL(library_path)
    for target in FFI_TARGETS:
        capsule = jax.ffi.pycapsule(library.JaxFlashCpuAttention)
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    entries: dict[str, Any] = {variant.name: None for variant in variants_to_build()}
    registration.REGISTRATION = Registration(
        directory=Path("cubins"), kernels=entries, platforms=("cuda", "cpu")
    )


def run_on_mesh(kind: str) -> dict[str, Any]:
    """Compares what this process has of a sharded gradient with the same on one device."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    operands = make_operands(4)
    expected = jax.tree.map(np.asarray, jax.jit(with_gradients(attention))(*operands))
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, BATCH_AND_HEADS)
        sharded = [
            jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)
            for x in operands
        ]
        function = attention
        if kind == "manual":
            function = jax.shard_map(
                attention, in_specs=(BATCH_AND_HEADS,) * 3, out_specs=(BATCH_AND_HEADS,) * 2
            )
        program = jax.jit(with_gradients(function)).lower(*sharded).compile()
        results = program(*sharded)
    differences = [
        not np.array_equal(np.asarray(shard.data), whole[shard.index])
        for array, whole in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        for shard in array.addressable_shards
    ]
    return {
        "devices": jax.device_count(),
        "shards": len(differences),
        "different": sum(differences),
        "collectives": collectives(program),
        "hits": events["/jax/compilation_cache/cache_hits"],
        "misses": events["/jax/compilation_cache/cache_misses"],
    }


def run_exported(path: str) -> dict[str, Any]:
    """Runs a program for one device, written by another process."""
    program = jax.export.deserialize(bytearray(Path(path).read_bytes()))
    operands = make_operands(2)
    actual = program.call(*operands)
    expected = jax.jit(with_gradients(attention))(*operands)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return {"different": sum(not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)}


def main(library: str, what: str, *rest: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    if len(rest) == 3:
        process, processes, address = rest
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", 4 // int(processes))
        jax.distributed.initialize(address, int(processes), int(process))
    else:
        jax.config.update("jax_num_cpu_devices", 4)
    register(library)
    report = run_exported(rest[0]) if what == "load" else run_on_mesh(what)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
