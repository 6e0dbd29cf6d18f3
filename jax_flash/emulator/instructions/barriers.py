"""Barriers of blocks and clusters, and the register pool.

PTX ISA: "Parallel Synchronization and Communication Instructions: bar, barrier, barrier.cluster",
"Miscellaneous Instructions: setmaxnreg, nanosleep, trap", "griddepcontrol".
"""

from typing import Any

from jax_flash.emulator.barrier_state import NamedBarrier
from jax_flash.emulator.errors import BarrierFault, ProgramFault, PtxError
from jax_flash.emulator.ptx_types import LANES, ptx_type
from jax_flash.emulator.registry import Context, Run, instruction
from jax_flash.emulator.syntax import Immediate
from jax_flash.emulator.wait import Wait

_CATEGORY = "synchronisation"
_SYNC = "Parallel Synchronization and Communication Instructions"
_U32 = ptx_type("u32")
_BARRIERS = 16


def _uniform(warp: Any, row: int, what: str) -> int:
    values = warp.rows["u32"][row]
    if (values != values[0]).any():
        raise BarrierFault(f"{what} differs between the threads of a warp")
    return int(values[0])


def wait_at(warp: Any, barrier: NamedBarrier, generation: int) -> Wait:
    """Returns the wait for a use of a barrier to complete; then the warp learns what it passes."""

    def finish() -> None:
        if warp.clock is not None and barrier.released is not None:
            warp.clock.acquire(barrier.released)

    return Wait(
        lambda: barrier.generation > generation, finish, f"{barrier.name}: {barrier.members}"
    )


@instruction("bar", "barrier", section=f"{_SYNC}: bar, barrier", category=_CATEGORY, converges=True)
def barrier_of_block(context: Context) -> Run:
    """``bar{.cta}.{sync,arrive} a{, b}`` and ``barrier{.cta}...``: ``b`` threads, or all."""
    context.flag("cta")
    mode = context.take("sync", "arrive")
    context.flag("aligned")
    context.expect(1, 2)
    number = context.source(context.operands[0], _U32)
    count = context.source(context.operands[1], _U32) if len(context.operands) == 2 else -1
    if mode == "arrive" and count < 0:
        raise PtxError("bar.arrive needs a number of threads")

    def run(warp: Any, lanes: Any) -> Wait | None:
        block = warp.block
        index = _uniform(warp, number, "the barrier")
        if index >= _BARRIERS:
            raise BarrierFault(f"barrier {index}: a block has {_BARRIERS}")
        expected = 32 * len(block.warps) if count < 0 else _uniform(warp, count, "the thread count")
        if expected == 0 or expected % LANES:
            raise BarrierFault(f"barrier {index} of {expected} threads: needs a multiple of 32")
        barrier = block.barriers.setdefault(index, NamedBarrier(name=f"barrier {index}"))
        known = warp.clock.release() if warp.clock is not None else None
        warp.machine.events += 1
        generation = barrier.arrive(warp.name, warp.line, LANES, expected, known)
        return wait_at(warp, barrier, generation) if mode == "sync" else None

    return run


@instruction(
    "barrier.cluster",
    section=f"{_SYNC}: barrier.cluster",
    category=_CATEGORY,
    converges=True,
)
def barrier_of_cluster(context: Context) -> Run:
    """``barrier.cluster.{arrive{.release,.relaxed},wait{.acquire}}{.aligned}``."""
    mode = context.take("arrive", "wait")
    relaxed = context.take("release", "relaxed", "acquire", default="release") == "relaxed"
    context.flag("aligned")

    def run(warp: Any, lanes: Any) -> Wait | None:
        barrier = warp.block.cluster.barrier
        if mode == "arrive":
            if warp.cluster_generation is not None:
                raise BarrierFault("barrier.cluster.arrive twice without a wait between them")
            known = warp.fenced.copy() if relaxed and warp.fenced is not None else None
            if warp.clock is not None and not relaxed:
                known = warp.clock.release()
            expected = LANES * sum(len(block.warps) for block in warp.block.cluster.blocks)
            warp.machine.events += 1
            warp.cluster_generation = barrier.arrive(warp.name, warp.line, LANES, expected, known)
            return None
        if warp.cluster_generation is None:
            raise BarrierFault("barrier.cluster.wait without an arrive before it")
        wait = wait_at(warp, barrier, warp.cluster_generation)
        warp.cluster_generation = None
        return wait

    return run


@instruction(
    "setmaxnreg",
    section="Miscellaneous Instructions: setmaxnreg",
    category=_CATEGORY,
    converges=True,
)
def set_registers(context: Context) -> Run:
    """``setmaxnreg.{inc,dec}.sync.aligned.u32 n``: takes from or gives to the block's pool."""
    increase = context.take("inc", "dec") == "inc"
    for word in ("sync", "aligned", "u32"):
        context.take(word)
    operand = context.operands[0]
    if not isinstance(operand, Immediate):
        raise PtxError("setmaxnreg needs a constant")
    wanted = operand.value
    if wanted % 8 or not 24 <= wanted <= 256:
        raise PtxError(f"setmaxnreg {wanted}: needs a multiple of 8 from 24 to 256")

    def run(warp: Any, lanes: Any) -> Wait | None:
        block = warp.block
        held = block.thread_registers[warp.index]
        if not held:  # the launch does not say how many registers a thread starts with
            return None
        if increase == (wanted < held) and wanted != held:
            word = "inc" if increase else "dec"
            raise BarrierFault(f"setmaxnreg.{word} from {held} to {wanted} registers")
        change = (wanted - held) * LANES

        def finish() -> None:
            block.free_registers -= change
            block.thread_registers[warp.index] = wanted
            warp.machine.events += 1

        if block.free_registers >= change:
            finish()
            return None
        return Wait(lambda: block.free_registers >= change, finish, f"{change} free registers")

    return run


@instruction("griddepcontrol", section=f"{_SYNC}: griddepcontrol", category=_CATEGORY)
def grid_dependency(context: Context) -> Run:
    """Kernels run one after another here, so a dependent launch never has to wait."""
    context.take("launch_dependents", "wait")

    def run(warp: Any, lanes: Any) -> None:
        del warp, lanes

    return run


@instruction("nanosleep", section="Miscellaneous Instructions: nanosleep", category=_CATEGORY)
def sleep(context: Context) -> Run:
    """``nanosleep.u32 t``: takes no time here; the schedule decides who runs next."""
    context.take("u32")
    context.source(context.operands[0], _U32)

    def run(warp: Any, lanes: Any) -> None:
        del warp, lanes

    return run


@instruction("trap", section="Miscellaneous Instructions: trap", category=_CATEGORY)
def trap(context: Context) -> Run:
    """``trap``: the kernel gives up."""
    context.expect(0)

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        raise ProgramFault(f"{warp.name} executes trap")

    return run
