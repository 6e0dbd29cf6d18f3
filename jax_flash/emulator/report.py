"""Which unit of a multiprocessor bounds a kernel: a model, from what an emulated run counted.

Each unit's cycles are its work divided by its peak rate, as if units overlapped perfectly and
nothing else cost time; the largest of them is a lower bound, and the ratio of the others to it says
how much slack they have. Latency, dependencies, instruction scheduling by ptxas (the counts are of
PTX instructions) and caches are not modelled.
"""

from dataclasses import dataclass

from jax_flash.emulator.ptx_types import LANES
from jax_flash.emulator.statistics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Peak rates of one multiprocessor in each clock."""

    name: str
    tensor_flops: int
    """Dense 16-bit tensor-core operations, two for a multiply-add."""
    special_functions: int
    """Results of ``ex2`` and its kin."""
    shared_bytes: int
    global_bytes: float
    """Its share of the device's memory bandwidth."""
    issued_instructions: int = 4
    """Warp instructions, one for each of its four schedulers."""


# Sources: NVIDIA data sheets and CUDA programming guide, arithmetic throughput; clocks of 1.83 GHz
# (Hopper) and 1.85 GHz (Blackwell), 132 and 148 multiprocessors.
MACHINES = {
    "H200": MachineRates(
        name="H200",
        tensor_flops=4096,
        special_functions=16,
        shared_bytes=128,
        global_bytes=4.8e12 / (132 * 1.83e9),
    ),
    "B200": MachineRates(
        name="B200",
        tensor_flops=8192,
        special_functions=16,
        shared_bytes=128,
        global_bytes=8.0e12 / (148 * 1.85e9),
    ),
    "B300": MachineRates(
        name="B300",
        tensor_flops=8192,
        special_functions=32,
        shared_bytes=128,
        global_bytes=8.0e12 / (148 * 1.85e9),
    ),
}


SCORES = 128 * 128
"""Scores of the tile that reports count in, whatever the tile of a kernel is."""


def unit_cycles(statistics: Statistics, rates: MachineRates) -> dict[str, float]:
    """Returns the cycles that each unit needs at its peak rate, for the whole run on one unit.

    Where bank conflicts were counted, accesses of warps cost their passes instead of their bytes.
    """
    traffic, instructions = statistics.traffic, statistics.instructions
    special = sum(n for (_, kind), n in instructions.items() if kind == "special function")
    shared = {name: n for name, n in traffic.items() if name.startswith("shared")}
    by_warps = sum(n for name, n in shared.items() if name.endswith("by warps"))
    others = sum(shared.values()) - by_warps
    device = sum(n for name, n in traffic.items() if name.startswith("global"))
    # 8-bit inputs are multiplied at twice the rate of 16-bit ones.
    operations = sum(
        n / 2 if "float8" in kind else n for kind, n in statistics.tensor_operations.items()
    )
    passes = max(statistics.shared_passes["passes"], by_warps / rates.shared_bytes)
    return {
        "tensor cores": 2 * operations / rates.tensor_flops,
        "special functions": LANES * special / rates.special_functions,
        "shared memory": others / rates.shared_bytes + passes,
        "global memory": device / rates.global_bytes,
        "instruction issue": sum(instructions.values()) / rates.issued_instructions,
    }


def unit_report(
    title: str, statistics: Statistics, rates: MachineRates, *, scores: int | None = None
) -> str:
    """Returns cycles by unit, the bounding one first, then bytes, instructions by role and notes.

    Args:
      title: of the report.
      statistics: of a run.
      rates: of the machine.
      scores: visible (query, key) pairs over all heads of the problem; the report is then for a
        tile of 128 x 128 of them, else for a block of the grid.
    """
    parts = max(statistics.blocks, 1) if scores is None else scores / SCORES
    each = f"block (of {statistics.blocks})" if scores is None else "128 x 128 scores"
    cycles = unit_cycles(statistics, rates)
    bound = max(cycles.values()) or 1.0
    lines = [f"{title} on {rates.name}, for each {each}; a model, not a measurement"]
    for unit, count in sorted(cycles.items(), key=lambda item: -item[1]):
        lines.append(f"  {unit:20} {count / parts:12.0f} cycles  {count / bound:6.1%} of the bound")
    lines += [
        f"  {what}: {count / parts:.0f} bytes" for what, count in sorted(statistics.traffic.items())
    ]
    for role, kinds in statistics.roles().items():
        listed = ", ".join(f"{kind} {count / parts:.0f}" for kind, count in sorted(kinds.items()))
        lines.append(f"  {role}: {listed}")
    passes = statistics.shared_passes
    if passes["ideal passes"]:
        ratio = passes["passes"] / passes["ideal passes"]
        lines.append(f"  shared memory accesses of warps take {ratio:.2f} passes where 1 is ideal")
    lines += [f"  note: {note} ({count} times)" for note, count in statistics.notes.items()]
    return "\n".join(lines)
