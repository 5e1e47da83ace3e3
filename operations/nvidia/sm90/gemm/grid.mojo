"""How many clusters of a configuration run, and whether they keep filters."""

from std.math import ceildiv

from ...im2col.tiles import TileGeometry
from ...im2col.traversal import Traversal
from .config import Sm90Config

comptime PLACES = [132, 66, 39, 30, 22, 17, 15, 14]
"""Clusters of one block, of two and so on, that run at the same time on a device
of 132 multiprocessors, as `cuOccupancyMaxActiveClusters` says. Those of a cluster
are neighbours: some are left over. Devices differ by one."""


@fieldwise_init
struct Grid(ImplicitlyCopyable, Movable):
    """The clusters of a launch, each of which takes tiles in turn, filters
    innermost."""

    var tiles: Int
    """Of the problem, counted in whole clusters."""
    var clusters: Int
    """That are launched; each takes one tile in as many."""
    var places: Int
    """Clusters that run at the same time."""
    var keeps_filters: Bool
    """Whether all tiles of a cluster have the same filters, which are loaded
    once."""

    @staticmethod
    def of(
        config: Sm90Config,
        traversal: Traversal,
        multiprocessors: Int,
        split_k: Int = 1,
    ) -> Grid:
        """The grid of a problem: filters are kept where the ring holds those of
        a tile, and where to launch a multiple of the tiles along the filters
        costs no wave, or the kernel is compiled for it.

        Args:
            config: The configuration.
            traversal: Of a problem that the configuration does not refuse.
            multiprocessors: Of the device.
            split_k: Blocks that share a tile.
        """
        var tiles = tile_clusters(config, traversal)
        var along_filters = _filter_clusters(config, traversal)
        var places = cluster_places(
            config.cluster_size() * split_k, multiprocessors
        )
        if split_k > 1:
            return Grid(tiles, tiles, places, False)
        var clusters = min(tiles, places)
        var even = clusters // along_filters * along_filters
        if config.stationary:
            return Grid(tiles, max(even, along_filters), places, True)
        if (
            traversal.steps() <= config.num_filter_pipeline_stages
            and even > 0
            and ceildiv(tiles, even) == ceildiv(tiles, clusters)
        ):
            return Grid(tiles, even, places, True)
        return Grid(tiles, clusters, places, False)

    def geometry(
        self, config: Sm90Config, traversal: Traversal
    ) -> TileGeometry:
        """What the kernel is passed, for whole sums."""
        var cut = TileGeometry.of(
            traversal,
            config.halo,
            config.cluster_pixels(),
            config.cluster_filters(),
        )
        if config.ends_filters():
            cut.end_groups(config.group_filters(traversal.filters))
        cut.keeps_filters = self.keeps_filters
        cut.narrow(traversal)
        return cut

    def counts_pixels_first(
        self, config: Sm90Config, cut: TileGeometry
    ) -> Bool:
        """Whether neighbours are tiles along the pixels: where every block has
        one tile, and no more than half as many lie along the pixels as along
        the filters. The order decides which multiprocessors ask the L2 for the
        same lines; otherwise, and in pairs, filters first is faster.

        Args:
            config: The configuration.
            cut: Whole sums.
        """
        return (
            self.tiles == self.clusters
            and config.may_count_pixels_first()
            and 2 * cut.clusters_m <= cut.clusters_n.value
        )

    def waves(self) -> Int:
        """Tiles that are computed one after the other, at most."""
        return ceildiv(self.tiles, min(self.clusters, self.places))


def cluster_places(size: Int, multiprocessors: Int) -> Int:
    """Clusters that run at the same time.

    Args:
        size: Blocks of a cluster.
        multiprocessors: Of the device.
    """
    return min(multiprocessors // size, materialize[PLACES]()[size - 1])


def tile_clusters(config: Sm90Config, traversal: Traversal) -> Int:
    """Tiles of a problem, in whole clusters."""
    return _filter_clusters(config, traversal) * pixel_clusters(
        config, traversal
    )


def pixel_clusters(config: Sm90Config, traversal: Traversal) -> Int:
    """Tiles along the pixels, in whole clusters."""
    return ceildiv(traversal.pixels(config.halo), config.cluster_pixels())


def _filter_clusters(config: Sm90Config, traversal: Traversal) -> Int:
    """Tiles along the filters of all groups, in whole clusters."""
    var cluster_filters = config.cluster_filters()
    return ceildiv(traversal.filters, cluster_filters) * traversal.groups
