"""The producers of the Hopper implicit GEMM: a thread each, which asks TMA for
its ring's stages, tile after tile."""

from std.sys.info import size_of

from ...im2col.tiles import Tap, Tile, TileGeometry
from ...pipeline.ring import RingPosition
from ...tma.descriptor import TensorMap
from .config import Sm90Config
from .scheduler import TileScheduler
from .smem import SharedStorage
from .tile_io import load_activation, load_filter


@always_inline
def keeps_filters[config: Sm90Config](geometry: TileGeometry) -> Bool:
    """Whether the block's filters are loaded once.

    Parameters:
        config: The configuration.

    Args:
        geometry: The problem.
    """
    return config.stationary or geometry.keeps_filters


@always_inline
def row_bytes[in_type: DType](geometry: TileGeometry) -> Int:
    """Bytes that a load brings of each row of a stage.

    Parameters:
        in_type: Of activation and filter.

    Args:
        geometry: The problem.
    """
    return Int(geometry.slice_channels) * size_of[in_type]()


@always_inline
def first_tap[config: Sm90Config](geometry: TileGeometry, tile: Tile) -> Tap:
    """The first step of a tile, or of the block's share of it.

    Parameters:
        config: The configuration.

    Args:
        geometry: The problem.
        tile: The tile.
    """
    var tap = Tap()
    comptime if config.splits():
        if tile.first > 0:
            tap.skip(config.halo, geometry, tile.first)
    return tap


@always_inline
def produce_activations[
    in_type: DType, config: Sm90Config
](
    ref activation: TensorMap,
    geometry: TileGeometry,
    storage: SharedStorage[config],
):
    """Fills the activation ring.

    When the first tile's have been asked for, loaders of residuals may begin.

    Where stages stay idle, a stage waits for a later release than that of what
    it held: for the only one, since another wait would delay every load.

    Where rings are joined, a stage's barrier expects the filters' bytes too, as
    long as they are loaded: they may come before it does.

    Parameters:
        in_type: Of the activation.
        config: The configuration.

    Args:
        activation: The descriptor.
        geometry: The problem.
        storage: The block's.
    """
    comptime part = UInt32(config.act_tile_dim0())
    comptime stages = config.num_act_pipeline_stages
    var scheduler = TileScheduler[config](geometry)
    var position = RingPosition[stages]()
    # What must have been released before a stage is filled.
    var behind = RingPosition[stages](geometry.idle_stages, 1)
    var bytes = config.act_stage_pixels() * row_bytes[in_type](geometry)
    comptime if config.joins_rings():
        bytes += config.block_tile_shape[1] * row_bytes[in_type](geometry)
    var is_first = True
    while scheduler.valid(geometry):
        var tile = scheduler.tile(geometry)
        # All tiles' filters read the same channels if each is a group.
        var group = UInt32(0) if config.ends_filters() else tile.group
        var first = geometry.load_start(
            geometry.pixel(tile.pixel + scheduler.rank_n * part), group
        )
        var tap = first_tap[config](geometry, tile)
        for _ in range(tile.rounds):
            comptime if config.keeps_pace():
                storage.activation.await_release(behind)
                behind.step()
            else:
                storage.activation.await_empty(position)
            load_activation[config](
                activation,
                storage.activation.address(position.stage),
                storage.activation.expect(position, bytes),
                geometry,
                scheduler,
                first,
                tap,
            )
            position.step()
            tap.step(config.halo, geometry)
        comptime if config.first_tile_barriers() > 0:
            if is_first:
                storage.first_tile.arrive()
                is_first = False
        comptime if config.joins_rings():
            if keeps_filters[config](geometry):
                bytes = config.act_stage_pixels() * row_bytes[in_type](geometry)
        scheduler.advance()
    comptime shares = config.joins_rings() and config.cluster_size() > 1
    comptime if config.cluster_shape[1] > 1 or shares:
        storage.activation.await_releases(position)


@always_inline
def produce_filters[
    in_type: DType, config: Sm90Config
](
    ref filter: TensorMap,
    geometry: TileGeometry,
    storage: SharedStorage[config],
):
    """Fills the filter ring, tile after tile, or once if the block keeps its
    filters.

    Parameters:
        in_type: Of the filter.
        config: The configuration.

    Args:
        filter: The descriptor.
        geometry: The problem.
        storage: The block's.
    """
    var scheduler = TileScheduler[config](geometry)
    var position = RingPosition[config.num_filter_pipeline_stages]()
    while scheduler.valid(geometry):
        var tile = scheduler.tile(geometry)
        var tap = first_tap[config](geometry, tile)
        for _ in range(tile.rounds):
            comptime if config.halo > 0:
                for w in range(geometry.taps_w):
                    tap.w = w
                    _load_filter[in_type](
                        filter,
                        storage,
                        geometry,
                        scheduler,
                        position,
                        tile.filter,
                        tap,
                    )
            else:
                _load_filter[in_type](
                    filter,
                    storage,
                    geometry,
                    scheduler,
                    position,
                    tile.filter,
                    tap,
                )
            tap.step(config.halo, geometry)
        if keeps_filters[config](geometry):
            return
        scheduler.advance()
    comptime if config.cluster_shape[0] > 1 and not config.joins_rings():
        storage.filter.await_releases(position)


@always_inline
def _load_filter[
    config: Sm90Config, //, in_type: DType
](
    ref filter: TensorMap,
    storage: SharedStorage[config],
    geometry: TileGeometry,
    ranks: TileScheduler[config],
    mut position: RingPosition[config.num_filter_pipeline_stages],
    first: UInt32,
    tap: Tap,
):
    """Loads the next filter stage."""
    comptime rows = config.block_tile_shape[1]
    storage.filter.await_empty(position)
    var barrier = storage.filter.full(position.stage)
    comptime if not config.joins_rings():
        barrier.arrive_expecting(rows * row_bytes[in_type](geometry))
    load_filter[config](
        filter,
        storage.filter.address(position.stage),
        barrier,
        geometry,
        ranks,
        first,
        tap,
    )
    position.step()
