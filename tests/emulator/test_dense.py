"""Dense biases and masks on the kernels' own code: shapes, hidden places, extreme numbers, bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.emulator.launch import Options, run_operation
from jax_flash.emulator.schedule import Schedule
from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import BOTH_BOUNDS, Band, with_both_bounds
from jax_flash.spec.launch_plan import backward_bias_operation
from jax_flash.spec.problem import Feature
from jax_flash.spec.variant import DType
from jax_flash.testing import (
    Case,
    Inputs,
    make_inputs,
    poison_padding,
    public_attention,
    results_and_gradients,
)

from .test_features import compare_inputs
from .test_kernels import SCHEDULES

BATCH, HEADS, QUERIES, KEYS = 2, 2, 140, 100
# More than one tile of the bias's gradient in each direction.
CASE = Case(
    name="dense",
    tags=frozenset(),
    batch=BATCH,
    heads=HEADS,
    key_heads=1,
    queries=QUERIES,
    keys=KEYS,
    head_dim=64,
    value_dim=64,
)
# Shapes of a bias and of a mask.
SHAPES = {
    "all of both": ((BATCH, HEADS, QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS)),
    "of heads, of keys": ((HEADS, QUERIES, KEYS), (BATCH, 1, 1, KEYS)),
    "of keys, of queries": ((BATCH, 1, 1, KEYS), (QUERIES, 1)),
    "of a head's keys, of pairs": ((HEADS, 1, KEYS), (QUERIES, KEYS)),
    "of queries, of batch elements": ((BATCH, HEADS, QUERIES, 1), (BATCH, 1, 1, 1)),
    "one number, of heads": ((1,), (HEADS, 1, 1)),
}


def inputs_with(
    case: Case, bias: np.ndarray | None, mask: np.ndarray | None, seed: int = 0
) -> Inputs:
    """Returns a case's inputs with a bias and a mask."""
    inputs = make_inputs(case, seed=seed)
    given = {"bias": bias, "mask": mask}
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    return replace(inputs, semantics=replace(inputs.semantics, **arrays))


def draw(case: Case, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Inputs:
    """Returns inputs with a bias and a mask of these shapes."""
    random = np.random.default_rng(5)
    bias, mask = shapes
    return inputs_with(
        case, random.standard_normal(bias, np.float32), np.asarray(random.random(mask) < 0.7)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_every_broadcast_shape(name: str, kernel_directory: object) -> None:
    compare_inputs(draw(CASE, SHAPES[name]), deterministic_bwd=name == "all of both")


def test_other_head_dimensions_and_dtypes(kernel_directory: object) -> None:
    case = replace(CASE, head_dim=128, value_dim=104, dtype="float16", is_causal=True, heads=4)
    compare_inputs(
        draw(replace(case, soft_cap=4.0), ((4, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS)))
    )


def test_what_is_hidden_may_hold_anything(kernel_directory: object) -> None:
    """NaN and infinities past lengths, in padding segments, and outside of the window."""
    features = frozenset({"query_lengths", "key_lengths", "segment_ids"})
    case = replace(CASE, features=features, window=(30, 40))
    inputs = draw(case, ((BATCH, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS)))
    semantics = inputs.semantics
    distance = np.arange(KEYS) - np.arange(QUERIES)[:, None]
    hidden = np.broadcast_to((distance < -30) | (distance > 40), (BATCH, QUERIES, KEYS)).copy()
    query_lengths, key_lengths, query_ids, key_ids = (
        np.asarray(getattr(semantics, name))
        for name in ("query_lengths", "key_lengths", "query_segment_ids", "key_segment_ids")
    )
    hidden |= (np.arange(QUERIES) >= query_lengths[:, None])[:, :, None]
    hidden |= (np.arange(KEYS) >= key_lengths[:, None])[:, None]
    hidden |= query_ids[:, :, None] != key_ids[:, None]
    hidden |= (query_ids < 0)[:, :, None]
    anything = np.random.default_rng(6).choice([np.nan, np.inf, -np.inf], hidden.shape)
    bias = np.where(hidden[:, None], anything[:, None], np.asarray(semantics.bias))
    semantics = replace(semantics, bias=jnp.asarray(bias.astype(np.float32)))
    compare_inputs(poison_padding(replace(inputs, semantics=semantics)))


def attend(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and log-sum-exp of emulated kernels."""
    attention = public_attention(implementation="emulate")
    output, lse = attention(inputs.query, inputs.key, inputs.value, inputs.semantics)
    return np.asarray(output), np.asarray(lse)


SMALL = replace(CASE, batch=1, queries=70, keys=90)


def test_a_bias_of_minus_infinity_hides_and_a_nan_shows(kernel_directory: object) -> None:
    bias = np.zeros((70, 90), np.float32)
    bias[3], bias[5, 40] = -np.inf, np.nan
    output, lse = attend(inputs_with(SMALL, bias, None))
    assert (output[:, 3] == 0).all() and (lse[:, 3] == -np.inf).all()
    assert np.isnan(output[:, 5]).all() and np.isnan(lse[:, 5]).all()
    others = np.delete(np.arange(70), [3, 5])
    expected, expected_lse = attend(inputs_with(SMALL, np.zeros((70, 90), np.float32), None))
    assert (output[:, others] == expected[:, others]).all()
    assert (lse[:, others] == expected_lse[:, others]).all()


@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_a_row_of_very_low_biases_is_finite(low: float, kernel_directory: object) -> None:
    """As left padding makes them: the row's softmax still sums to 1, and gradients are finite."""
    bias = np.zeros((70, 90), np.float32)
    bias[:20], bias[20:, 30:] = low, low
    inputs = inputs_with(SMALL, bias, None)
    results = results_and_gradients(public_attention(implementation="emulate"), inputs)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in results.values())
    values = np.asarray(inputs.value, np.float64)
    smallest, largest = values.min(1)[:, None], values.max(1)[:, None]
    padded = results["output"][:, :20].astype(np.float64)
    assert (padded >= smallest - 1e-2).all() and (padded <= largest + 1e-2).all()
    alone = replace(inputs, query=inputs.query[:, 20:], key=inputs.key[:, :30])
    alone = replace(alone, value=inputs.value[:, :30], semantics=make_inputs(SMALL).semantics)
    attended, _ = attend(alone)
    difference = results["output"][:, 20:].astype(np.float64) - attended.astype(np.float64)
    assert np.abs(difference).max() < 1e-2


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_bias_of_zeros_and_a_mask_of_true_change_no_bit(
    head_dim: int, value_dim: int, kernel_directory: object
) -> None:
    """So ragged kernels give the bits of general ones."""
    case = replace(
        SMALL,
        features=frozenset({"key_lengths"}),
        batch=2,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    plain = make_inputs(case)
    dense = inputs_with(case, np.zeros((2, 2, 70, 90), np.float32), np.ones((2, 1, 70, 90), bool))
    attention = public_attention(implementation="emulate", deterministic_bwd=True)
    without = results_and_gradients(attention, plain)
    results = results_and_gradients(attention, dense)
    assert results.keys() - without.keys() == {"d_bias"}
    for name, array in without.items():
        assert (results[name] == array).all(), name


def test_a_mask_is_a_bias_of_minus_infinity(kernel_directory: object) -> None:
    mask = np.random.default_rng(3).random((2, 70, 90)) < 0.6
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    by_mask, by_bias = (
        attend(inputs_with(SMALL, None, mask)),
        attend(inputs_with(SMALL, bias, None)),
    )
    for first, second in zip(by_mask, by_bias, strict=True):
        assert (first == second).all()


def test_vmap_keeps_what_is_not_mapped(kernel_directory: object) -> None:
    """Gradients of each element, and of their sum, for a bias that all elements share."""
    random = np.random.default_rng(4)
    queries = jnp.asarray(random.standard_normal((3, 20, 2, 64)), jnp.bfloat16)
    keys = jnp.asarray(random.standard_normal((30, 1, 64)), jnp.bfloat16)
    bias = jnp.asarray(random.standard_normal((2, 20, 30)), jnp.float32)

    def loss(query: jax.Array, bias: jax.Array) -> jax.Array:
        output = jax_flash.attention(query, keys, keys, bias, implementation="emulate")
        return jnp.sum(jnp.sin(output.astype(jnp.float32)))

    gradient = jax.grad(loss, 1)
    expected = np.stack([np.asarray(gradient(query, bias)) for query in queries])
    mapped = jax.vmap(gradient, (0, None))(queries, bias)
    assert (np.asarray(mapped) == expected).all()
    summed = jax.grad(lambda bias: jnp.sum(jax.vmap(loss, (0, None))(queries, bias)))(bias)
    assert np.abs(np.asarray(summed) - expected.sum(0)).max() <= 1e-6 * np.abs(expected).max()


BIASES = {
    "all": (BATCH, HEADS, QUERIES, KEYS),
    "of all batch elements and queries": (1, HEADS, 1, KEYS),
    "of all": (1, 1, 1, 1),
}


def gradient_of(
    shape: tuple[int, ...], schedule: Schedule, directory: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a bias's gradient from its kernel alone, and by its formula in float64."""
    random = np.random.default_rng(1)
    element = jnp.bfloat16

    def normal(*shape: int, dtype: Any = element) -> np.ndarray:
        return np.asarray(random.standard_normal(shape)).astype(dtype)

    arrays = {
        "query": normal(BATCH, QUERIES, HEADS, 64),
        "key": normal(BATCH, KEYS, 1, 64),
        "value": normal(BATCH, KEYS, 1, 64),
        "d_output": normal(BATCH, QUERIES, HEADS, 64),
        "lse_log2": 7 + normal(BATCH, HEADS, 192, dtype=np.float32),
        "delta": normal(BATCH, HEADS, 192, dtype=np.float32),
        "bias": normal(*shape, dtype=np.float32),
    }
    operation = backward_bias_operation(Arch.SM90A, DType.BF16, (64, 64), frozenset({Feature.BIAS}))
    results, _ = run_operation(
        operation,
        arrays,
        scale=0.125,
        band=with_both_bounds(Band()),
        directory=directory,
        options=Options(schedule=schedule),
    )
    assert operation.kernels[0].band == BOTH_BOUNDS
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    query, d_output = (wide[name].transpose(0, 2, 1, 3) for name in ("query", "d_output"))
    key, value = (wide[name].transpose(0, 2, 3, 1) for name in ("key", "value"))
    lse_log2, delta = (wide[name][:, :, :QUERIES, None] for name in ("lse_log2", "delta"))
    logits = 0.125 * query @ key + wide["bias"]
    weights = np.exp2(logits * np.log2(np.e) - lse_log2).clip(max=1)
    gradient = weights * (d_output @ value - delta)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return results["d_bias"], gradient.sum(axes, keepdims=True)


@pytest.mark.parametrize("name", BIASES)
def test_the_gradients_bits_do_not_depend_on_the_schedule(
    name: str, kernel_directory: Path
) -> None:
    runs = [
        gradient_of(BIASES[name], schedule, kernel_directory) for schedule in SCHEDULES.values()
    ]
    for gradient, exact in runs:
        assert (gradient == runs[0][0]).all()
        assert np.abs(gradient - exact).max() <= 1e-5 * np.abs(exact).max()
