"""Barriers between the TMA producer warp and the consumer warpgroups."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync

from jax_flash.kernels.sm90.warp_schedule import WARPGROUP_WARPS


def init_barriers(barriers: cute.Pointer, count: int, arrivals: int) -> None:
    """Initialises ``count`` mbarriers; called by one warp, before ``publish_barriers``."""
    with cute.arch.elect_one():
        for index in range(count):
            cute.arch.mbarrier_init(barriers + index, arrivals)


def tma_pipeline(
    barriers: cute.Pointer, num_stages: int, stage_bytes: int, consumers: int
) -> PipelineTmaAsync:
    """Returns a pipeline of ``num_stages`` buffers of ``stage_bytes`` each, filled by TMA.

    Every consumer warp arrives once to release a buffer. The barriers are not yet visible to
    other threads: ``publish_barriers`` must follow.
    """
    return PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=num_stages,
        producer_group=CooperativeGroup(Agent.Thread),
        consumer_group=CooperativeGroup(Agent.Thread, consumers * WARPGROUP_WARPS),
        tx_count=stage_bytes,
        defer_sync=True,
    )


def release(pipeline: PipelineTmaAsync, stage: Int32) -> None:
    """Releases a buffer, as every warp does once.

    ``PipelineTmaAsync.consumer_release`` picks the thread by its index, which the compiler reads
    anew for every tile.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipeline.sync_object_empty.get_barrier(stage))


def publish_barriers() -> None:
    """Makes initialised barriers visible to TMA and to every thread of the block."""
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
