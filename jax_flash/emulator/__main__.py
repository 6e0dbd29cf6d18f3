"""Command line: ``python -m jax_flash.emulator``: runs one problem and prints the unit report."""

import argparse
from pathlib import Path

import numpy as np

from jax_flash.emulator.launch import ELEMENT_TYPES, Options, default_directory, run_operation
from jax_flash.emulator.machine import Checks
from jax_flash.emulator.report import MACHINES, unit_report
from jax_flash.emulator.schedule import Schedule
from jax_flash.spec.arch import Arch
from jax_flash.spec.band_mask import Band
from jax_flash.spec.launch_plan import backward_operation, forward_operation
from jax_flash.spec.variant import DType


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_flash.emulator", description=__doc__)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--keys", type=int, default=256)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--order", default="random", help="round_robin, random or starve")
    parser.add_argument("--landing", default="random", help="eager, random or lazy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", choices=list(MACHINES), default="H200")
    parser.add_argument("--directory", type=Path, default=default_directory())
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs forward and backward; returns the exit status."""
    given = _parser().parse_args(arguments)
    dtype = DType(given.dtype)
    rng = np.random.default_rng(given.seed)

    def draw(length: int) -> np.ndarray:
        shape = (1, length, given.heads, given.head_dim)
        return rng.standard_normal(shape).astype(ELEMENT_TYPES[dtype])

    arrays = {"query": draw(given.queries), "key": draw(given.keys), "value": draw(given.keys)}
    band = Band(upper=given.keys - given.queries) if given.causal else Band()
    scores = given.heads * sum(
        sum(band.sees(query, key) for key in range(given.keys)) for query in range(given.queries)
    )
    schedule = Schedule(order=given.order, landing=given.landing, seed=given.seed)
    options = Options(schedule=schedule, checks=Checks(bank_conflicts=True))
    target = (Arch.SM90A, dtype, (given.head_dim, given.head_dim), band.mask)
    forward = forward_operation(*target)
    backward = backward_operation(*target, deterministic=given.deterministic)
    for operation in (forward, backward):
        results, statistics = run_operation(
            operation,
            arrays,
            scale=given.head_dim**-0.5,
            band=band,
            directory=given.directory,
            options=options,
        )
        for name, counted in statistics.items():
            print(unit_report(name, counted, MACHINES[given.machine], scores=scores))
        if operation is forward:
            arrays |= {"output": results["output"], "lse": results["lse"]}
            arrays |= {"d_output": draw(given.queries), "d_lse": np.zeros_like(results["lse"])}
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
