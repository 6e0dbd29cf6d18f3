"""The record of a call's semantics: its own checks, and the checks of operands against it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_flash.reference.semantics import (
    Semantics,
    align_leading_dimensions,
    check_operands,
    may_attend,
)


def _semantics(**fields: Any) -> Semantics:
    fields.setdefault("scale", 1.0)
    return Semantics(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", float("nan")),
        ("window", (-1, None)),
        ("window", (None, -1)),
        ("window", (1,)),
        ("soft_cap", 0.0),
        ("soft_cap", -2.0),
        ("soft_cap", float("inf")),
    ],
)
def test_static_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"{field} is"):
        _semantics(**{field: value})


def _check(semantics: Semantics, *, query=(2, 5, 4, 8), key=(2, 6, 2, 8), value=(2, 6, 2, 3)):
    check_operands(jnp.zeros(query), jnp.zeros(key), jnp.zeros(value), semantics)


@pytest.mark.parametrize(
    "shapes",
    [
        {"query": (5, 8)},
        {"key": (2, 6, 2, 7)},
        {"key": (3, 6, 2, 8)},
        {"value": (2, 7, 2, 3)},
        {"value": (2, 6, 1, 3)},
        {"query": (2, 5, 3, 8)},
        {"key": (2, 6, 0, 8), "value": (2, 6, 0, 3)},
    ],
    ids=str,
)
def test_operand_shapes_are_checked(shapes):
    _check(Semantics(scale=1.0))
    with pytest.raises(ValueError, match=r"shapes are query .*key .*value"):
        _check(Semantics(scale=1.0), **shapes)


@pytest.mark.parametrize(
    ("name", "fitting", "wrong"),
    [
        ("query_offset", [(), (1,), (2,)], [(3,), (2, 1)]),
        ("query_lengths", [(2,)], [(5,)]),
        ("key_lengths", [(2,)], [(6,)]),
        ("bias", [(), (6,), (5, 1), (4, 5, 6), (2, 1, 5, 6)], [(6, 5), (2, 5, 6), (1, 2, 4, 5, 6)]),
        ("sinks", [(4,), (2, 4)], [(1,), (2,), (3, 4)]),
    ],
)
def test_field_shapes_are_checked(name, fitting, wrong):
    for shape in fitting:
        _check(_semantics(**{name: jnp.zeros(shape)}))
    for shape in wrong:
        with pytest.raises(ValueError, match=rf"{name} has shape .* must be broadcastable"):
            _check(_semantics(**{name: jnp.zeros(shape)}))


def test_segment_ids_come_in_pairs_of_full_length():
    queries, keys = jnp.zeros((5,), jnp.int32), jnp.zeros((2, 6), jnp.int32)
    _check(Semantics(scale=1.0, query_segment_ids=queries, key_segment_ids=keys))
    with pytest.raises(ValueError, match="both or neither"):
        _check(Semantics(scale=1.0, query_segment_ids=queries))
    with pytest.raises(ValueError, match="query_segment_ids has shape"):
        _check(Semantics(scale=1.0, query_segment_ids=queries[:1], key_segment_ids=keys))


def test_dtypes_are_checked():
    with pytest.raises(TypeError, match="one floating dtype"):
        integers = jnp.zeros((1, 1, 1), jnp.int32)
        check_operands(integers, integers, integers, Semantics(scale=1.0))
    with pytest.raises(TypeError, match="one floating dtype"):
        one = jnp.zeros((1, 1, 1))
        check_operands(one, one.astype(jnp.bfloat16), one, Semantics(scale=1.0))
    for name in ("bias", "sinks"):
        with pytest.raises(TypeError, match=rf"{name} is int32; it must be floating"):
            _check(_semantics(**{name: jnp.zeros(4, jnp.int32)}))
    with pytest.raises(TypeError, match="mask is float32"):
        _check(Semantics(scale=1.0, mask=jnp.ones((5, 6))))


def test_record_is_a_pytree_with_static_scale_and_window():
    semantics = Semantics(scale=0.5, window=(3, None), bias=jnp.ones((2, 2)), sinks=jnp.ones(2))
    leaves, structure = jax.tree.flatten(semantics)
    assert len(leaves) == 2
    rebuilt = structure.unflatten(leaves)
    assert (rebuilt.scale, rebuilt.window) == (0.5, (3, None))
    assert structure != jax.tree.structure(Semantics(scale=0.25, window=(3, None)))
    assert hash(structure) == hash(jax.tree.structure(rebuilt))


def test_windows_as_large_as_integers_go_are_unbounded():
    huge = 2**40
    positions = jnp.arange(4, dtype=jnp.int32)
    semantics = align_leading_dimensions(
        Semantics(scale=1.0, window=(huge, huge), query_offset=jnp.int32(5)), 0
    )
    allowed = may_attend(semantics, positions, positions)
    assert allowed is not None and allowed.all()
