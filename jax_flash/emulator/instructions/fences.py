"""Memory fences: PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".

Warps execute in a global order here, so a fence changes no values; what it does to visibility
across proxies is what the race detector needs.
"""

from typing import Any

from jax_flash.emulator.registry import Context, Run, instruction

_SECTION = "Parallel Synchronization and Communication Instructions: membar, fence"
_CATEGORY = "synchronisation"


@instruction("membar", "fence", section=_SECTION, category=_CATEGORY)
def fence(context: Context) -> Run:
    """``fence{.sem}.scope``: orders the generic proxy, in which every execution here is ordered."""
    context.take("sc", "acq_rel", "acquire", "release", default="acq_rel")
    context.flag("sync_restrict::shared::cta")
    context.flag("sync_restrict::shared::cluster")
    context.take("cta", "cluster", "gpu", "sys", "gl")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        warp.machine.events += 1
        if warp.clock is not None and warp.observed is not None:
            warp.clock.acquire(warp.observed)
            warp.observed = None
        release_by_fence(warp)

    return run


@instruction("fence.proxy.async", "fence.proxy.alias", section=_SECTION, category=_CATEGORY)
def fence_async_proxy(context: Context) -> Run:
    """``fence.proxy.async{.space}``: generic accesses before it are visible to the async proxy.

    One for global memory alone does nothing here: what is tracked is in shared memory.
    """
    space = context.take("global", "shared::cta", "shared::cluster", default="all")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        if space == "global":
            return
        if warp.clock is not None:
            warp.clock.fence_async_proxy()
        publish_mbarriers(warp)

    return run


@instruction("fence.mbarrier_init", section=_SECTION, category=_CATEGORY)
def fence_mbarrier_init(context: Context) -> Run:
    """``fence.mbarrier_init.release.cluster`` publishes the mbarriers initialised before it."""
    context.take("release")
    context.take("cluster")

    def run(warp: Any, lanes: Any) -> None:
        del lanes
        publish_mbarriers(warp)
        release_by_fence(warp)

    return run


@instruction("fence.proxy.tensormap::generic", section=_SECTION, category=_CATEGORY)
def fence_tensor_map(context: Context) -> Run:
    """Tensor maps are read when a copy starts, so they need no fence here."""
    context.take("acquire", "release")
    context.take("cta", "cluster", "gpu", "sys")

    def run(warp: Any, lanes: Any) -> None:
        del warp, lanes

    return run


def release_by_fence(warp: Any) -> None:
    """Keeps what a relaxed arrival after the fence passes on (PTX ISA, "Release pattern")."""
    if warp.clock is not None:
        warp.fenced = warp.clock.release()


def publish_mbarriers(warp: Any) -> None:
    """Marks the mbarriers that a warp initialised as visible to the async proxy."""
    for barrier in warp.block.mbarriers.values():
        if barrier.initialiser == warp.name:
            barrier.published = True
