"""Moves, packing and addresses: PTX ISA, "Data Movement and Conversion Instructions"."""

from typing import Any

import numpy as np

from jax_flash.emulator.address_space import PARAMETER_WINDOW, SHARED_WINDOW
from jax_flash.emulator.errors import PtxError
from jax_flash.emulator.ptx_types import PtxType, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Vector

_CATEGORY = "move"


@instruction("mov", section="Data Movement and Conversion Instructions: mov", category=_CATEGORY)
def move(context: Context) -> Run:
    """``mov.type d, a``; packs or unpacks where one side is a vector."""
    kind = context.take_type()
    context.expect(2)
    destination, source = context.operands
    if isinstance(destination, Vector):
        return _unpack(context, kind, destination)
    if isinstance(source, Vector):
        return _pack(context, kind, source)
    target = context.destination(destination, kind)
    row = context.source(source, kind)
    view = "pred" if kind.bits == 1 else f"u{kind.bits}"

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows[view]
        np.copyto(rows[target], rows[row], where=lanes)

    return run


def _part_type(kind: PtxType, count: int) -> PtxType:
    bits = kind.bits // count
    if bits not in (16, 32, 64):
        raise PtxError(f"packing {count} parts into .{kind.name}")
    return ptx_type(f"b{bits}")


def _pack(context: Context, kind: PtxType, source: Vector) -> Run:
    part = _part_type(kind, len(source.items))
    rows_in = [context.source(item, part) for item in source.items]
    target = context.destination(context.operands[0], kind)

    def run(warp: Any, lanes: Any) -> None:
        parts = warp.rows[part.view]
        joined = np.stack([parts[row] for row in rows_in], axis=1).view(kind.dtype)[:, 0]
        np.copyto(warp.rows[kind.view][target], joined, where=lanes)

    return run


def _unpack(context: Context, kind: PtxType, destination: Vector) -> Run:
    part = _part_type(kind, len(destination.items))
    row = context.source(context.operands[1], kind)
    targets = [context.destination(item, part) for item in destination.items]

    def run(warp: Any, lanes: Any) -> None:
        parts = warp.rows[kind.view][row].view(part.dtype).reshape(-1, len(targets))
        for index, target in enumerate(targets):
            np.copyto(warp.rows[part.view][target], parts[:, index], where=lanes)

    return run


@instruction("cvta", section="Data Movement and Conversion Instructions: cvta", category=_CATEGORY)
def convert_address(context: Context) -> Run:
    """``cvta{.to}.space.u64 d, a``: between a state space's addresses and generic ones."""
    to_space = context.flag("to")
    space = context.take("global", "shared", "shared::cta", "shared::cluster", "param", "const")
    context.flag("entry")
    kind = context.take_type()
    window = {"param": PARAMETER_WINDOW, "global": 0, "const": 0}.get(space, SHARED_WINDOW)
    shift = np.uint64(window)
    destination = context.destination(context.operands[0], kind)
    source = context.source(context.operands[1], kind)

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows["u64"]
        value = rows[source] - shift if to_space else rows[source] + shift
        np.copyto(rows[destination], value, where=lanes)

    return run


@instruction("mapa", section="Data Movement and Conversion Instructions: mapa", category=_CATEGORY)
def map_address(context: Context) -> Run:
    """``mapa.shared::cluster.u32 d, a, rank``: the same variable in another block of the cluster.

    A shared address is ``rank << 24 | offset``, as in the hardware's shared::cluster window.
    """
    context.take("shared::cluster")
    kind = context.take_type()
    destination = context.destination(context.operands[0], kind)
    source = context.source(context.operands[1], kind)
    rank = context.source(context.operands[2], ptx_type("u32"))
    offset_bits = np.array(0xFFFFFF, kind.dtype)

    def run(warp: Any, lanes: Any) -> None:
        rows = warp.rows[kind.view]
        ranks = warp.rows["u32"][rank].astype(kind.dtype)
        value = (rows[source] & offset_bits) | (ranks << np.array(24, kind.dtype))
        np.copyto(rows[destination], value, where=lanes)

    return run


@instruction(
    "prefetch",
    "prefetchu",
    "applypriority",
    "cp.async.bulk.prefetch",
    section="Data Movement and Conversion Instructions: prefetch, applypriority",
    category=_CATEGORY,
)
def prefetch(context: Context) -> Run:
    """``prefetch{.space}.level [a]`` and its kin change nothing that a program can observe."""
    if context.flag("tensor"):  # cp.async.bulk.prefetch.tensor.Nd.L2.src{.mode}{.hint}
        context.take("1d", "2d", "3d", "4d", "5d")
        context.take(*_TENSOR_MODES, default="tile")
    context.take("L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap")
    context.take("global", "param", "const", "local", default="generic")
    context.flag("L2::cache_hint")

    def run(warp: Any, lanes: Any) -> None:
        del warp, lanes

    return run


_TENSOR_MODES = ("tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128")


@instruction(
    "createpolicy",
    section="Data Movement and Conversion Instructions: createpolicy",
    category=_CATEGORY,
)
def create_policy(context: Context) -> Run:
    """``createpolicy...b64 d, ...``: an opaque value for cache hints, which say nothing here."""
    context.take("fractional", "range", "cvt", default="fractional")
    context.flag("global")
    for level in ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"):
        context.flag(level)
    context.flag("L2")
    context.take("b64")
    destination = context.destination(context.operands[0], ptx_type("b64"))

    def run(warp: Any, lanes: Any) -> None:
        np.copyto(warp.rows["u64"][destination], np.uint64(0), where=lanes)

    return run


@instruction(
    "getctarank",
    section="Data Movement and Conversion Instructions: getctarank",
    category=_CATEGORY,
)
def rank_of_address(context: Context) -> Run:
    """``getctarank{.shared::cluster}.type d, a``: the block that a shared address belongs to."""
    space = context.take("shared::cluster", default="generic")
    kind = context.take_type()
    destination = context.destination(context.operands[0], ptx_type("u32"))
    source = context.source(context.operands[1], kind)
    window = np.uint64(SHARED_WINDOW if space == "generic" else 0)

    def run(warp: Any, lanes: Any) -> None:
        addresses = warp.rows[kind.view][source].astype(np.uint64) - window
        ranks = (addresses >> np.uint64(24)).astype(np.uint32)
        np.copyto(warp.rows["u32"][destination], ranks, where=lanes)

    return run


@instruction(
    "isspacep", section="Data Movement and Conversion Instructions: isspacep", category=_CATEGORY
)
def is_space(context: Context) -> Run:
    """``isspacep.space p, a``: whether a generic address is in a window."""
    space = context.take("global", "shared", "shared::cta", "shared::cluster", "param", "const")
    destination = context.destination(context.operands[0], ptx_type("pred"))
    source = context.source(context.operands[1], ptx_type("u64"))

    def run(warp: Any, lanes: Any) -> None:
        addresses = warp.rows["u64"][source]
        shared = addresses >= np.uint64(SHARED_WINDOW)
        parameter = ~shared & (addresses >= np.uint64(PARAMETER_WINDOW))
        answer = {"param": parameter, "global": ~shared & ~parameter, "const": shared & False}
        np.copyto(warp.rows["pred"][destination], answer.get(space, shared), where=lanes)

    return run
