"""Programs of other processes: exported without a GPU, as one CUDA graph, one process a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.testing import assert_bitwise_equal

SHAPE = (2, 300, 4, 64)

PROGRAM = """
import sys
import jax, jax.export, jax.numpy as jnp
import jax_flash

def gradients(query, key, value):
    def loss(*operands):
        output = jax_flash.attention(
            *operands, is_causal=True, deterministic_bwd=True, implementation="cuda"
        )
        return output.astype(jnp.float32).sum()
    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
"""

EXPORT = (
    PROGRAM
    + """
assert all(device.platform == "cpu" for device in jax.devices())
operand = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)
exported = jax.export.export(
    jax.jit(gradients), platforms=("cuda",), disabled_checks=jax_flash.export_checks()
)(operand, operand, operand)
open(sys.argv[1], "wb").write(exported.serialize())
"""
)

CALLS = 4

CHAIN = f"""
import sys
import jax, jax.numpy as jnp
import jax_flash

def chain(query, key, value):
    for _ in range({CALLS}):
        query = jax_flash.attention(query, key, value, is_causal=True, implementation="cuda")
    return query.astype(jnp.float32).sum()

operand = jnp.ones((1, 300, 4, 64), jnp.bfloat16)
jax.block_until_ready(jax.jit(jax.grad(chain, argnums=(0, 1, 2)))(operand, operand, operand))
"""

PROCESS = (
    PROGRAM
    + """
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

process, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, process)
assert jax.device_count() == 2 and jax.local_device_count() == 1
random = np.random.default_rng(0)
arrays = [jnp.asarray(random.standard_normal((2, 300, 4, 64)), jnp.bfloat16) for _ in range(3)]
expected = [np.asarray(x) for x in jax.jit(gradients)(*arrays)]
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
with jax.set_mesh(mesh):
    sharded = [
        jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__) for x in arrays
    ]
    results = jax.jit(gradients)(*sharded)
for result, whole in zip(results, expected, strict=True):
    (shard,) = result.addressable_shards
    assert (np.asarray(shard.data).view(np.uint16) == whole[shard.index].view(np.uint16)).all()
print("same bits")
"""
)


def operands() -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(SHAPE), jnp.bfloat16) for _ in range(3)]


def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    def loss(*arrays: jax.Array) -> jax.Array:
        output = jax_flash.attention(
            *arrays, is_causal=True, deterministic_bwd=True, implementation="cuda"
        )
        return output.astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


def by_name(arrays: Any) -> dict[str, jax.Array]:
    return {f"d_{name}": x for name, x in zip(("query", "key", "value"), arrays, strict=True)}


def test_a_program_exported_without_a_gpu_runs_on_one(tmp_path: Path) -> None:
    file = tmp_path / "program"
    without_gpu = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", EXPORT, file], env=without_gpu, check=True)
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    assert_bitwise_equal(
        by_name(exported.call(*operands())), by_name(jax.jit(gradients)(*operands()))
    )


def test_calls_become_nodes_of_one_cuda_graph(tmp_path: Path) -> None:
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*chain.*"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
    subprocess.run(
        [sys.executable, "-c", CHAIN],
        env=os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        check=True,
    )
    (file,) = tmp_path.glob("*chain.thunk_sequence_after_thunk_passes.txt")
    # Thunks of a command buffer are listed below it, indented.
    calls = [line for line in file.read_text().splitlines() if "kCustomCall" in line]
    assert len(calls) == 2 * CALLS, "one launch sequence forward and one backward for each call"
    assert all(line.startswith(" ") for line in calls), "a call is outside of the command buffer"


@pytest.mark.gpus
def test_one_process_for_each_gpu() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(process), address],
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": str(process), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert "same bits" in output
