"""Loads of activation and filter tiles into their rings' stages."""

from ...im2col.loads import load_filters, load_pixels
from ...im2col.tiles import LoadStart, Tap, TileGeometry
from ...im2col.traversal import ROW_BYTES
from ...pipeline.barrier import Barrier
from ...tma.copy import SharedAddress
from ...tma.descriptor import TensorMap
from .config import Sm90Config
from .scheduler import TileScheduler


@always_inline
def load_activation[
    config: Sm90Config
](
    ref map: TensorMap,
    stage: SharedAddress,
    barrier: Barrier,
    geometry: TileGeometry,
    ranks: TileScheduler[config],
    first: LoadStart,
    tap: Tap,
):
    """Loads a stage of activations: the tile's pixels, moved by a tap, one
    slice of their channels. Blocks that share them load a part each.

    Args:
        map: The activation's descriptor.
        stage: Where to.
        barrier: The stage's `full`.
        geometry: The problem.
        ranks: The block's place in its cluster.
        first: The first pixel of this block's part.
        tap: The step; its `w` is 0 if the stage serves a whole filter row.
    """
    comptime part_bytes = config.act_tile_dim0() * ROW_BYTES
    comptime cluster_m = config.cluster_shape[0]
    comptime multicast = config.cluster_shape[1] > 1
    var part = stage
    var peers = UInt16(0)
    comptime if multicast:
        part += ranks.rank_n * UInt32(part_bytes)
        comptime for n in range(config.cluster_shape[1]):
            peers |= UInt16(1) << UInt16(ranks.rank_m + UInt32(n * cluster_m))
    load_pixels[multicast=multicast](
        part,
        map,
        barrier.address,
        geometry,
        first,
        tap,
        tap.channel(geometry),
        peers,
    )


@always_inline
def load_filter[
    config: Sm90Config
](
    ref map: TensorMap,
    stage: SharedAddress,
    barrier: Barrier,
    geometry: TileGeometry,
    ranks: TileScheduler[config],
    first: UInt32,
    tap: Tap,
):
    """Loads a stage of filters: the tile's filters, one tap, one slice of
    their channels. Blocks that share them load a part each.

    Args:
        map: The filter's descriptor, `[K, T*R*S, C/groups]`.
        stage: Where to.
        barrier: The stage's `full`.
        geometry: The problem.
        ranks: The block's place in its cluster.
        first: The tile's first filter.
        tap: The step.
    """
    comptime part_filters = config.filter_tile_dim0()
    comptime cluster_m = config.cluster_shape[0]
    comptime multicast = cluster_m > 1
    var part = stage
    var filter = first
    var peers = UInt16(0)
    comptime if multicast:
        part += ranks.rank_m * UInt32(part_filters * ROW_BYTES)
        filter += ranks.rank_m * UInt32(part_filters)
        comptime row = UInt16((1 << cluster_m) - 1)
        peers = row << UInt16(ranks.rank_n * UInt32(cluster_m))
    load_filters[multicast=multicast](
        part,
        map,
        barrier.address,
        geometry,
        filter,
        tap,
        tap.channel(geometry),
        peers,
    )
