"""Closures for instructions that work on each lane by itself."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_flash.emulator.ptx_types import PtxType
from jax_flash.emulator.registry import Context, Run


def run_ufunc(context: Context, ufunc: Any, kind: PtxType, result: PtxType | None = None) -> Run:
    """Returns a closure that applies a ufunc of one or two sources of one type, in place."""
    result = result or kind
    destination = context.destination(context.operands[0], result)
    rows = [context.source(operand, kind) for operand in context.operands[1:]]
    view, result_view = kind.view, result.view
    if len(rows) == 1:
        (first,) = rows

        def run_unary(warp: Any, lanes: Any) -> None:
            ufunc(warp.rows[view][first], out=warp.rows[result_view][destination], where=lanes)

        return run_unary
    first, second = rows

    def run_binary(warp: Any, lanes: Any) -> None:
        sources = warp.rows[view]
        ufunc(sources[first], sources[second], out=warp.rows[result_view][destination], where=lanes)

    return run_binary


def run_function(
    context: Context,
    function: Callable[..., np.ndarray],
    kinds: list[PtxType],
    result: PtxType,
) -> Run:
    """Returns a closure that applies a function of whole rows, one type a source."""
    destination = context.destination(context.operands[0], result)
    sources = [
        (kind.view, context.source(operand, kind))
        for operand, kind in zip(context.operands[1:], kinds, strict=True)
    ]
    view = result.view

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows
        value = function(*(rows[name][row] for name, row in sources))
        np.copyto(rows[view][destination], value, where=lanes, casting="unsafe")

    return run
