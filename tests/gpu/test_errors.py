"""Cubins that are missing, changed or for another GPU: refused before any launch."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_flash.ops.dispatch import KernelCall, find_target
from jax_flash.ops.ffi_calls import call_attributes
from jax_flash.ops.registration import REGISTRATION, load_extension
from jax_flash.spec.band_mask import Band, BandMask
from jax_flash.spec.launch_plan import backward_operation, forward_operation
from jax_flash.spec.manifest import CubinEntry
from jax_flash.spec.variant import DType


def call() -> KernelCall:
    arch = find_target().arch
    assert arch is not None
    return KernelCall(
        forward=forward_operation(arch, DType.BF16, (64, 64), BandMask()),
        backward=backward_operation(arch, DType.BF16, (64, 64), BandMask(), deterministic=False),
        scale=0.125,
        band=Band(),
    )


def entry() -> CubinEntry:
    return REGISTRATION.kernels[call().forward.kernels[0].name]


def run_forward(
    name: str, path: Path, *, arguments: tuple[tuple[str | int, ...], ...] | None = None
) -> jax.Array:
    """Registers `path` as a kernel called `name`, otherwise a copy of ours, and calls it."""
    ours = entry()
    load_extension().add_kernel(
        name,
        path=str(path),
        symbol=ours.symbol,
        sha256=ours.sha256,
        threads=ours.threads,
        cluster=ours.cluster,
        shared_memory_bytes=ours.shared_memory_bytes,
        programmatic_launch=ours.programmatic_launch,
        arguments=ours.arguments if arguments is None else arguments,
        grid=ours.grid,
        resident_up_to=ours.resident_up_to,
    )
    kernel_call = call()
    attributes = call_attributes(kernel_call.forward, kernel_call) | {"kernels": name}
    query = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    types = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32),
    )
    forward = jax.ffi.ffi_call("jax_flash_forward_v1", types)
    output, _ = jax.jit(lambda query: forward(query, query, query, **attributes))(query)
    return output.block_until_ready()


def test_a_good_cubin_under_another_name_runs() -> None:
    name = f"{entry().name}_again"
    output = run_forward(name, REGISTRATION.directory / entry().file)
    assert bool(jnp.all(output == 1))


def test_a_missing_cubin_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.cubin"
    name = f"{entry().name}_absent"
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(str(path))) as error:
        run_forward(name, path)
    assert name in str(error.value)


def test_a_changed_cubin_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "changed.cubin"
    content = bytearray((REGISTRATION.directory / entry().file).read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(str(path))) as error:
        run_forward(f"{entry().name}_changed", path)
    assert entry().sha256 in str(error.value)
    assert "python -m jax_flash.aot build" in str(error.value)


def test_a_cubin_of_another_architecture_is_refused() -> None:
    name = f"sm_80/{entry().name.partition('/')[2]}_other_arch"
    with pytest.raises(jax.errors.JaxRuntimeError, match="sm_80") as error:
        run_forward(name, REGISTRATION.directory / entry().file)
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    assert re.search(rf"{major}\.?{minor}", str(error.value))


def test_parameters_that_differ_from_the_cubins_are_refused() -> None:
    arguments = (*entry().arguments, ("int32", "batch"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="parameter"):
        run_forward(
            f"{entry().name}_parameters",
            REGISTRATION.directory / entry().file,
            arguments=arguments,
        )
