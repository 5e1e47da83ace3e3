"""The residual's way into shared memory: one thread of its own warp loads the
sub-tiles that the epilogue will want, in its order."""

from std.math import ceildiv
from std.utils import IndexList

from ..im2col.tiles import Tile, TileGeometry
from ..pipeline.ring import RingPosition
from ..tma.copy import load_tile
from ..tma.descriptor import TensorMap
from .config import Conv2dConfig
from .scheduler import ClusterPlace, WorkQueue, tile_of
from .smem import SharedStorage


@always_inline
def subtiles_of[
    config: Conv2dConfig,
](geometry: TileGeometry, tile: Tile) -> UInt32:
    """Sub-tiles of a tile that hold filters of its group; at least one, so
    that every tile's accumulator is released alike. A block that shares the
    tile stores every `split_k`-th of them, from its own part's number on."""
    comptime filters = UInt32(config.output_tile_shape[1])
    var end = tile.filter_end(geometry)
    if tile.filter + filters >= end:
        return 1
    return min(ceildiv(end - tile.filter, filters), UInt32(config.subtiles()))


@always_inline
def subtile_at(
    geometry: TileGeometry, tile: Tile, filter: UInt32
) -> IndexList[3]:
    """Where a sub-tile lies in the output `[groups, N*Z*P*Q, K/groups]`.

    Args:
        geometry: The problem.
        tile: The tile.
        filter: The sub-tile's first, counted over all groups.
    """
    return IndexList[3](
        Int(filter - tile.group * geometry.group_filters),
        Int(tile.pixel),
        Int(tile.group),
    )


@always_inline
def load_residuals[
    config: Conv2dConfig,
](
    ref map: TensorMap,
    geometry: TileGeometry,
    storage: SharedStorage[config],
    place: ClusterPlace[config],
):
    """Fills the residual's buffers, tile after tile. One thread.

    Args:
        map: The residual's descriptor, as the output's.
        geometry: The problem.
        storage: The block's shared memory.
        place: The block's.
    """
    var ring = storage.residuals()
    var position = RingPosition[type_of(storage).residual_stages]()
    var queue = WorkQueue[config](storage)
    while queue.work.valid:
        var tile = tile_of(geometry, place, queue.work.index)
        var count = subtiles_of[config](geometry, tile)
        comptime split_k = config.split_k()
        for subtile in range(place.split, count, UInt32(split_k)):
            var filter = tile.filter + subtile * UInt32(
                config.output_tile_shape[1]
            )
            var barrier = ring.acquire(position)
            load_tile[3](
                ring.address(position.stage),
                map,
                barrier.address,
                subtile_at(geometry, tile, filter),
            )
            position.step()
        queue.advance()
