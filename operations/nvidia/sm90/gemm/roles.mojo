"""Which warp of the producers' warpgroup does what, and which of the block's
warps wait for its barriers."""

from max.gpu import thread_idx
from max.gpu.primitives.warp import broadcast

from ...im2col.tiles import TileGeometry
from ...limits import WARP
from ...pipeline.barrier import (
    arrive_cluster_relaxed,
    arrive_threads,
    sync_cluster_relaxed,
    sync_threads,
    wait_cluster,
)
from .config import Sm90Config

comptime ACTIVATION_WARP = UInt32(0)
"""The warp that loads activations. One thread of it works, as of the others."""

comptime LOADER_WARP = UInt32(1)
"""The warp that loads the first consumer's residual; the second's follows."""

comptime FILTER_WARP = UInt32(3)
"""The warp that loads filters."""


@always_inline
def initializes_ring[config: Sm90Config](warp: UInt32) -> Bool:
    """Whether a warp of the block fills a ring whose barriers it has initialized
    itself. Without a branch: a table of jumps would cost more than it saves.

    Parameters:
        config: The configuration.

    Args:
        warp: Of the block.
    """
    comptime joined = 1 << ACTIVATION_WARP
    comptime both = joined | 1 << FILTER_WARP
    comptime filling = joined if config.joins_rings() else both
    return filling >> warp & 1 == 1


@always_inline
def sync_barriers[config: Sm90Config](geometry: TileGeometry):
    """Waits until all barriers of the block, or of the cluster, are
    initialized. A thread that fills a ring of this block has initialized its
    barriers itself, and does not wait.

    Parameters:
        config: The configuration.

    Args:
        geometry: The problem.
    """
    var warp = broadcast(UInt32(thread_idx.x) // UInt32(WARP))
    comptime if config.cluster_size() > 1:
        sync_cluster_relaxed()
        return
    comptime if config.gathers():
        comptime if config.splits():
            if geometry.split_k.count.value > 1:
                sync_cluster_relaxed()
                return
        sync_threads[config.threads()](0)
        return
    comptime if config.splits():
        if geometry.split_k.count.value > 1:
            arrive_cluster_relaxed()
            if not initializes_ring[config](warp):
                wait_cluster()
            return
    if initializes_ring[config](warp):
        arrive_threads[config.threads()](0)
    else:
        sync_threads[config.threads()](0)
