"""Emulated runs of forward and backward, and the float64 formulas that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_flash.emulator.launch import ELEMENT_TYPES, Options, run_operation
from jax_flash.emulator.statistics import Statistics
from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import Band, kernel_band, with_both_bounds
from jax_flash.spec.launch_plan import Operation, backward_operation, forward_operation
from jax_flash.spec.problem import GENERAL_FEATURES, Feature
from jax_flash.spec.tile_table import BACKWARD_TILES, FORWARD_TILES, smallest_tile_dims
from jax_flash.spec.variant import DType

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call."""

    dtype: DType = DType.BF16
    head_dim: int = 64
    value_head_dim: int | None = None
    """Dv; None is D."""
    batch: int = 1
    query_length: int
    key_length: int
    query_heads: int = 1
    key_heads: int = 1
    upper: int | None = None
    """Upper bound of the band; None is the full mask."""
    lower: int | None = None
    """Lower bound of the band: a window's left side."""
    query_offset: tuple[int, ...] | None = None
    """For each batch element: added to the band's bounds."""
    query_lengths: tuple[int, ...] | None = None
    """For each batch element; what lies past them is NaN."""
    key_lengths: tuple[int, ...] | None = None
    soft_cap: float | None = None
    """Bound of the logits; with it the kernels are general ones."""
    sinks: bool = False
    deterministic: bool = False
    short: bool = False
    """Whether the forward kernel is the one for few queries."""

    @property
    def band(self) -> Band:
        """The mask, as kernels take it."""
        band = kernel_band(Band(lower=self.lower, upper=self.upper))
        return with_both_bounds(band) if self.features & GENERAL_FEATURES else band

    @property
    def features(self) -> frozenset[Feature]:
        """What the call has beyond its band."""
        given = {
            Feature.QUERY_OFFSET_ARRAY: self.query_offset is not None,
            Feature.QUERY_LENGTHS: self.query_lengths is not None,
            Feature.KEY_LENGTHS: self.key_lengths is not None,
            Feature.SOFT_CAP: self.soft_cap is not None,
            Feature.SINKS: self.sinks,
        }
        return frozenset(feature for feature, is_given in given.items() if is_given)

    @property
    def head_dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self.head_dim, self.value_head_dim or self.head_dim

    @property
    def scale(self) -> float:
        """Scale of the logits."""
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> Arrays:
        """Returns query, key, value, d_output and d_lse, and the optional operands."""
        rng = np.random.default_rng(seed)
        element = ELEMENT_TYPES[self.dtype]

        def draw(length: int, heads: int, columns: int) -> np.ndarray:
            return rng.standard_normal((self.batch, length, heads, columns)).astype(element)

        columns, value_columns = self.head_dims
        arrays = {
            "query": draw(self.query_length, self.query_heads, columns),
            "key": draw(self.key_length, self.key_heads, columns),
            "value": draw(self.key_length, self.key_heads, value_columns),
            "d_output": draw(self.query_length, self.query_heads, value_columns),
            "d_lse": rng.standard_normal((self.batch, self.query_length, self.query_heads)).astype(
                np.float32
            ),
        }
        for name, lengths, padded in (
            ("query_lengths", self.query_lengths, ("query", "d_output")),
            ("key_lengths", self.key_lengths, ("key", "value")),
        ):
            if lengths is not None:
                arrays[name] = np.array(lengths, np.int32)
                for index, length in enumerate(lengths):
                    for operand in padded:
                        arrays[operand][index, length:] = np.nan
        if self.query_offset is not None:
            arrays["query_offset"] = np.array(self.query_offset, np.int32)
        if self.sinks:
            shape = (self.batch, self.query_heads)
            arrays["sinks"] = rng.standard_normal(shape).astype(np.float32)
        return arrays

    def forward(self) -> Operation:
        """Returns the forward operation."""
        dims = smallest_tile_dims(FORWARD_TILES, Arch.SM90A, self.head_dims)
        assert dims is not None, self
        return forward_operation(
            Arch.SM90A, self.dtype, dims, self.band.mask, self.features, short=self.short
        )

    def backward(self) -> Operation:
        """Returns the backward operation."""
        dims = smallest_tile_dims(BACKWARD_TILES, Arch.SM90A, self.head_dims)
        assert dims is not None, self
        return backward_operation(
            Arch.SM90A,
            self.dtype,
            dims,
            self.band.mask,
            self.features,
            deterministic=self.deterministic,
        )

    def visible(self) -> np.ndarray:
        """Returns which pairs ``[B, 1, T, S]`` may attend."""
        query, key = np.arange(self.query_length)[:, None], np.arange(self.key_length)
        visible = np.ones((self.batch, 1, self.query_length, self.key_length), bool)
        for index in range(self.batch):
            distance = key - query
            if self.query_offset is not None:
                distance = distance - self.query_offset[index]
            if self.upper is not None:
                visible[index] &= distance <= self.upper
            if self.lower is not None:
                visible[index] &= distance >= self.lower
            if self.query_lengths is not None:
                visible[index] &= query < self.query_lengths[index]
            if self.key_lengths is not None:
                visible[index] &= key < self.key_lengths[index]
        return visible


def run_forward(problem: Problem, directory: Path, options: Options, seed: int = 0) -> Arrays:
    """Runs the forward kernel."""
    results, _ = run_with_statistics(
        problem, problem.forward(), problem.inputs(seed), directory, options
    )
    return results


def run_with_statistics(
    problem: Problem, operation: Operation, arrays: Arrays, directory: Path, options: Options
) -> tuple[Arrays, dict[str, Statistics]]:
    """Runs an operation."""
    return run_operation(
        operation,
        arrays,
        scale=problem.scale,
        soft_cap=problem.soft_cap or 0.0,
        band=problem.band,
        directory=directory,
        options=options,
    )


def run_both(problem: Problem, directory: Path, options: Options, seed: int = 0) -> Arrays:
    """Runs forward, then backward on its results."""
    inputs = problem.inputs(seed)
    forward, _ = run_with_statistics(problem, problem.forward(), inputs, directory, options)
    arrays = inputs | {"output": forward["output"], "lse": forward["lse"]}
    backward, _ = run_with_statistics(problem, problem.backward(), arrays, directory, options)
    names = ("d_query", "d_key", "d_value")
    return {"output": forward["output"], "lse": forward["lse"]} | {n: backward[n] for n in names}


def exact(problem: Problem, seed: int = 0) -> Arrays:
    """Returns output, log-sum-exp and gradients by their formulas, in float64."""
    inputs = {
        name: np.nan_to_num(array.astype(np.float64))
        for name, array in problem.inputs(seed).items()
    }
    group = problem.query_heads // problem.key_heads
    query, d_output = (inputs[name].transpose(0, 2, 1, 3) for name in ("query", "d_output"))
    key, value = (
        np.repeat(inputs[name], group, axis=2).transpose(0, 2, 1, 3) for name in ("key", "value")
    )
    scores = query @ key.swapaxes(-1, -2) * problem.scale
    slope = 1.0
    if problem.soft_cap is not None:
        bent = np.tanh(scores / problem.soft_cap)
        scores, slope = problem.soft_cap * bent, 1 - bent**2
    scores = np.where(problem.visible(), scores, -np.inf)
    sinks = np.full((*scores.shape[:-1], 1), -np.inf)
    if problem.sinks:
        sinks = np.broadcast_to(inputs["sinks"][:, :, None, None], sinks.shape)
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - top)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    output = weights @ value
    d_weights = d_output @ value.swapaxes(-1, -2)
    delta = (d_output * output).sum(-1) - inputs["d_lse"].transpose(0, 2, 1)
    d_scores = weights * (d_weights - delta[..., None]) * slope

    def of_group(gradient: np.ndarray) -> np.ndarray:
        batch, _, length, columns = gradient.shape
        parts = gradient.reshape(batch, problem.key_heads, group, length, columns)
        return parts.sum(2).transpose(0, 2, 1, 3)

    return {
        "output": output.transpose(0, 2, 1, 3),
        "lse": lse.transpose(0, 2, 1),
        "d_query": (d_scores @ key * problem.scale).transpose(0, 2, 1, 3),
        "d_key": of_group(d_scores.swapaxes(-1, -2) @ query * problem.scale),
        "d_value": of_group(weights.swapaxes(-1, -2) @ d_output),
    }


def assert_close(results: Arrays, expected: Arrays, dtype: DType) -> None:
    """Asserts errors of a few roundings to the element type; log-sum-exp much closer."""
    step = 2.0**-8 if dtype is DType.BF16 else 2.0**-11
    for name, result in results.items():
        want, got = expected[name], result.astype(np.float64)
        finite = np.isfinite(want)
        assert (got[~finite] == want[~finite]).all(), name
        largest = np.abs(want[finite]).max(initial=0)
        limit = 2e-6 * max(largest, 1) if name == "lse" else 2 * step * largest
        error = np.abs(got[finite] - want[finite]).max(initial=0)
        assert error <= limit, f"{name}: error {error:.3g}, at most {limit:.3g}"
