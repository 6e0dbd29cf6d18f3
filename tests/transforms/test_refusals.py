"""What cannot be sharded is an error that names the axis, the sizes and the way out."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from .programs import (
    BATCH,
    BATCH_AND_HEADS,
    attention,
    make_mesh,
    make_operands,
    put,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

WHOLE = PartitionSpec()
BY_SEQUENCE = PartitionSpec("data", "model")
BY_DIM = PartitionSpec("data", None, None, "model")

REFUSED = {
    "query by sequence": (
        (BY_SEQUENCE, BATCH, BATCH),
        "query (8, 8, 8, 16) is sharded on its sequence axis T=8",
        "jax_flash.context_parallel",
    ),
    "all by sequence": (
        (BY_SEQUENCE, BY_SEQUENCE, BY_SEQUENCE),
        "query (8, 8, 8, 16) is sharded on its sequence axis T=8",
        "jax_flash.context_parallel",
    ),
    "value by sequence": (
        (BATCH, BATCH, BY_SEQUENCE),
        "value (8, 8, 4, 16) is sharded on its sequence axis S=8",
        "jax_flash.context_parallel",
    ),
    "query by head dimension": (
        (BY_DIM, BATCH, BATCH),
        "query (8, 8, 8, 16) is sharded on its head dimension D=16",
        "shard the heads instead",
    ),
    "value by head dimension": (
        (BATCH, BATCH, BY_DIM),
        "value (8, 8, 4, 16) is sharded on its head dimension Dv=16",
        "shard the heads instead",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_explicit_axes_are_refused_while_tracing(name: str) -> None:
    specs, problem, way_out = REFUSED[name]
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8), specs)
        for implementation in ("cuda", "xla", None):
            call = partial(attention, implementation=implementation)
            for function in (call, with_gradients(call)):
                with pytest.raises(ValueError, match=re.escape(problem)) as caught:
                    jax.jit(function).trace(*operands)
                text = str(caught.value)
                assert "over mesh axis 'model' of size 4" in text
                assert "jax.sharding.reshard" in text
                assert way_out in text


@pytest.mark.parametrize("name", REFUSED)
def test_automatic_axes_are_refused_when_compiled(name: str) -> None:
    specs, problem, way_out = REFUSED[name]
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8), specs)
        for function in (attention, with_gradients(attention)):
            lowered = jax.jit(function).lower(*operands)
            with pytest.raises(jax.errors.JaxRuntimeError) as caught:
                lowered.compile()
            text = str(caught.value)
            assert f"ValueError: {problem} over mesh axis 'model' of size 4" in text
            assert "jax.lax.with_sharding_constraint" in text
            assert way_out in text


def test_a_constraint_inside_the_program_is_seen() -> None:
    mesh = make_mesh(AxisType.Auto)

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        query = jax.lax.with_sharding_constraint(query, BY_SEQUENCE)
        return attention(query, key, value)

    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8), (BATCH,) * 3)
        with pytest.raises(jax.errors.JaxRuntimeError, match="is sharded on its sequence axis T=8"):
            jax.jit(function).lower(*operands).compile()


@pytest.mark.parametrize(
    ("specs", "disagreeing"),
    [
        ((BATCH, PartitionSpec("model"), PartitionSpec("model")), "key (8, 8, 4, 16)"),
        (
            (PartitionSpec(None, None, "model"), PartitionSpec("model"), WHOLE),
            "key (8, 8, 4, 16)",
        ),
        (
            (PartitionSpec(None, None, "model"), WHOLE, PartitionSpec(None, None, "data")),
            "value (8, 8, 4, 16)",
        ),
    ],
)
def test_operands_that_disagree(specs: tuple[PartitionSpec, ...], disagreeing: str) -> None:
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8), specs)
        with pytest.raises(ValueError, match="must be sharded over the same mesh axes") as caught:
            jax.jit(attention).trace(*operands)
    assert "query (8, 8, 8, 16) is sharded as PartitionSpec(" in str(caught.value)
    assert f"{disagreeing} is sharded as PartitionSpec(" in str(caught.value)


def test_segment_ids_sharded_over_the_sequence() -> None:
    mesh = make_mesh(AxisType.Explicit)
    ids = np.zeros((8, 8), np.int32)
    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8), (BATCH,) * 3)
        (ids,) = put(mesh, [ids], [BY_SEQUENCE])
        call = partial(attention, implementation="xla")
        with pytest.raises(ValueError, match=r"query_segment_ids \(8, 8\) is sharded on its seq"):
            jax.jit(call).trace(*operands, query_segment_ids=ids, key_value_segment_ids=ids)


def test_key_heads_that_only_xla_knows_to_be_shared() -> None:
    """Inside a shard_map over other axes XLA does not say which key heads a device needs."""
    mesh = make_mesh(AxisType.Auto)
    by_hand = jax.shard_map(
        attention, in_specs=(BATCH,) * 3, out_specs=(BATCH, BATCH), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        operands = put(mesh, make_operands(8, heads=(8, 1)), (BATCH_AND_HEADS, BATCH, BATCH))
        with pytest.raises(jax.errors.JaxRuntimeError, match="needs them sharded alike") as caught:
            jax.jit(by_hand).lower(*operands).compile()
    assert "query (4, 8, 8, 16) in parts of (4, 8, 2, 16)" in str(caught.value)
    assert "AxisType.Explicit" in str(caught.value)


def test_a_wrong_out_specs_is_rejected() -> None:
    mesh = make_mesh(AxisType.Auto)
    run = jax.shard_map(
        attention, mesh=mesh, in_specs=(BATCH_AND_HEADS,) * 3, out_specs=(BATCH, BATCH)
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(run).trace(*make_operands(8))
