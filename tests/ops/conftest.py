"""Fixtures of the tests of the JAX layer."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_flash.ops import dispatch, registration
from jax_flash.ops.registration import Registration
from jax_flash.spec.kernel_args import kernel_arguments
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.manifest import CubinEntry
from jax_flash.spec.support import variants_to_build
from jax_flash.spec.variant import KernelVariant


def _entry(variant: KernelVariant) -> CubinEntry:
    """A manifest row as the build writes it, for a cubin that was never compiled."""
    plan = launch_plan(variant)
    return CubinEntry(
        name=variant.name,
        file=f"{variant.name}.cubin",
        symbol="kernel",
        sha256="0" * 64,
        arguments=tuple(argument.as_row() for argument in kernel_arguments(variant)),
        grid=tuple((factor.value, factor.divisor) for factor in plan.grid),
        threads=plan.threads,
        cluster=plan.cluster,
        programmatic_launch=plan.programmatic_launch,
        resident_up_to=plan.resident_up_to,
        shared_memory_bytes=1024,
        registers=168,
        spill_bytes=0,
        tile={"tile_q": 128, "tile_kv": 64},
        toolchain="none",
        source_hash="none",
    )


@pytest.fixture
def make_entry() -> Callable[..., CubinEntry]:
    """Returns a manifest row for a variant, with some fields replaced."""

    def make(variant: KernelVariant, **changes: Any) -> CubinEntry:
        return CubinEntry(**{**_fields(_entry(variant)), **changes})

    return make


def _fields(entry: CubinEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in asdict(entry)}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Runs what a test runs on the CPU, also where there is a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> Registration:
    """Registers every kernel of the specification, on a machine that has no GPU."""
    monkeypatch.setattr(dispatch, "_cuda_devices", list)
    registered = Registration(
        directory=Path("cubins"),
        kernels={variant.name: _entry(variant) for variant in variants_to_build()},
    )
    monkeypatch.setattr(registration, "REGISTRATION", registered)
    return registered


@pytest.fixture
def make_operands() -> Callable[..., dict[str, Any]]:
    """Makes query, key and value: normal numbers, seeded."""

    def make(
        leading: tuple[int, ...] = (2,),
        *,
        queries: int = 9,
        keys: int = 9,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (64, 64),
        dtype: Any = jnp.bfloat16,
    ) -> dict[str, Any]:
        seeds = jax.random.split(jax.random.key(7), 3)
        shapes = {
            "query": (*leading, queries, heads[0], dims[0]),
            "key": (*leading, keys, heads[1], dims[0]),
            "value": (*leading, keys, heads[1], dims[1]),
        }
        return {
            name: jax.random.normal(seed, shape, dtype)
            for (name, shape), seed in zip(shapes.items(), seeds, strict=True)
        }

    return make
