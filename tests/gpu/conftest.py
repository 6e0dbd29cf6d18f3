"""What the tests on a GPU share. They run with `pytest -m gpu`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest

import jax_flash
from jax_flash.reference.semantics import Semantics

Results = tuple[jax.Array, jax.Array]
Attention = Callable[[jax.Array, jax.Array, jax.Array, Semantics], Results]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test of this folder, and leaves out those for two GPUs where there are fewer."""
    ours = [item for item in items if "gpu" in item.path.parent.parts]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    for_two = [item for item in ours if item.get_closest_marker("gpus")]
    # Looking for devices makes JAX's backends, which a run without these tests must not.
    wanted = re.search(r"(?<!not )gpu", str(config.getoption("markexpr"))) is not None
    if for_two and wanted and jax.device_count() < 2:
        items[:] = [item for item in items if item not in for_two]
        config.hook.pytest_deselected(items=for_two)


@pytest.fixture(autouse=True, scope="session")
def cuda_device() -> Any:
    """The device under test: these tests are only run on request, so its absence is a failure."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.fail(
            f"the tests marked gpu were asked for, but JAX's first device is {device}: run them "
            'where JAX sees a CUDA device, or run `pytest -m "not gpu"`'
        )
    return device


@cache
def kernels(*, query_offset: int = 0, deterministic: bool = False) -> Attention:
    """Returns attention by the kernels in the form that `jax_flash.testing` takes.

    `query_offset` is that of the semantics, which the kernels need as a Python integer.
    """

    def attention(
        query: jax.Array, key: jax.Array, value: jax.Array, semantics: Semantics
    ) -> Results:
        return jax_flash.attention(
            query,
            key,
            value,
            scale=semantics.scale,
            is_causal=semantics.is_causal,
            query_offset=query_offset,
            local_window_size=semantics.window,
            deterministic_bwd=deterministic,
            return_residual=True,
            implementation="cuda",
        )

    return attention
