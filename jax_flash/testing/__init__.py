"""Cases, inputs and comparisons for testing attention: ours, and code built on it.

A test is a case, its inputs, the float64 oracle, and the ideal algorithm in the case's dtype:

    inputs = make_inputs(case)
    assert_close_to_oracle(
        results_and_gradients(my_attention, inputs),
        oracle=float64_oracle(inputs),
        ideal=results_and_gradients(chunked_attention, inputs),
    )

with my_attention(query, key, value, semantics) -> (output, log-sum-exp).
"""

from jax_flash.testing.cases import CASES, Case, cases_tagged
from jax_flash.testing.closeness import assert_bitwise_equal, assert_close_to_oracle
from jax_flash.testing.inputs import Inputs, make_inputs, poison_padding
from jax_flash.testing.oracle import float64_oracle, results_and_gradients
from jax_flash.testing.public import public_attention

__all__ = [
    "CASES",
    "Case",
    "Inputs",
    "assert_bitwise_equal",
    "assert_close_to_oracle",
    "cases_tagged",
    "float64_oracle",
    "make_inputs",
    "poison_padding",
    "public_attention",
    "results_and_gradients",
]
