"""Loads of activation and filter tiles into the input ring's stages."""

from ..im2col.loads import load_filters, load_pixels
from ..im2col.tiles import LoadStart, Tap, TileGeometry
from ..im2col.traversal import ROW_BYTES
from ..pipeline.exchange import peer_address
from ..tma.copy import SharedAddress
from ..tma.descriptor import TensorMap
from .config import Conv2dConfig
from .scheduler import ClusterPlace


@always_inline
def input_barrier[
    config: Conv2dConfig,
](full: SharedAddress, place: ClusterPlace[config]) -> SharedAddress:
    """The barrier that counts a stage's bytes: of a pair, the first block's.

    Args:
        full: The stage's barrier in this block.
        place: The block's.
    """
    comptime if config.cta_group == 2:
        return peer_address(full, place.leader())
    return full


@always_inline
def load_activation[
    config: Conv2dConfig,
](
    ref map: TensorMap,
    tile: SharedAddress,
    barrier: SharedAddress,
    geometry: TileGeometry,
    place: ClusterPlace[config],
    first: LoadStart,
    tap: Tap,
):
    """Loads the activations of a step: the tile's pixels, moved by a tap, one
    slice of their channels. Blocks along N share them, and load a part each.

    Args:
        map: The activation's descriptor, im2col.
        tile: Where to.
        barrier: What `input_barrier` returned.
        geometry: The problem.
        place: The block's.
        first: The first pixel of this block's part.
        tap: The step.
    """
    comptime channels = config.block_tile_shape[2]
    comptime part_bytes = config.act_tile_dim0() * ROW_BYTES
    comptime multicast = config.cluster_shape[1] > 1
    var part = tile
    comptime if multicast:
        part += place.n * UInt32(part_bytes)
    load_pixels[multicast=multicast, pair=config.cta_group == 2](
        part,
        map,
        barrier,
        geometry,
        first,
        tap,
        Int(tap.slice) * channels,
        place.activation_mask(),
    )


@always_inline
def load_filter[
    config: Conv2dConfig,
](
    ref map: TensorMap,
    tile: SharedAddress,
    barrier: SharedAddress,
    geometry: TileGeometry,
    place: ClusterPlace[config],
    first: UInt32,
    tap: Tap,
):
    """Loads the filters of a step: the tile's, or of a pair this block's half
    of them, one tap, one slice of their channels. Blocks along M, or pairs,
    share them, and load a part each.

    Args:
        map: The filter's descriptor, `[K, T*R*S, C/groups]`.
        tile: Where to.
        barrier: What `input_barrier` returned.
        geometry: The problem.
        place: The block's.
        first: The tile's first filter.
        tap: The step.
    """
    comptime channels = config.block_tile_shape[2]
    comptime part_filters = config.filter_tile_dim0()
    comptime multicast = config.cluster_shape[0] > config.cta_group
    var part = tile
    var filter = first + place.half() * UInt32(config.block_tile_shape[1])
    comptime if multicast:
        var index = place.m // UInt32(config.cta_group)
        part += index * UInt32(part_filters * ROW_BYTES)
        filter += index * UInt32(part_filters)
    load_filters[multicast=multicast, pair=config.cta_group == 2](
        part,
        map,
        barrier,
        geometry,
        filter,
        tap,
        Int(tap.slice) * channels,
        place.filter_mask(),
    )
