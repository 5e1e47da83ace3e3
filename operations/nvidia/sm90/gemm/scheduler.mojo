"""The static persistent scheduler: which tiles a block computes, in what
order, and where they lie in the problem."""

from max.gpu import block_idx, grid_dim

from ...im2col.tiles import Tile, TileGeometry
from ...run_time import stay_in_branch
from .config import Sm90Config


@fieldwise_init
struct TileScheduler[config: Sm90Config](TrivialRegisterPassable):
    """A block's tiles: those of a cluster go to its blocks, and clusters take
    tiles in turn, filters innermost unless the plan says otherwise, so that
    blocks that run at the same time read the same activations."""

    comptime CLUSTER_M = UInt32(Self.config.cluster_shape[0])
    comptime CLUSTER_N = UInt32(Self.config.cluster_shape[1])
    comptime BM = UInt32(Self.config.block_tile_shape[0])
    comptime BN = UInt32(Self.config.block_tile_shape[1])

    var index: UInt32
    var rank_m: UInt32
    var rank_n: UInt32

    @always_inline
    def __init__(out self, geometry: TileGeometry):
        """The block's first tile.

        Args:
            geometry: The problem.
        """
        comptime size = UInt32(Self.config.cluster_size())
        var cluster, rank = divmod(UInt32(block_idx.x), size)
        var rank_n, rank_m = divmod(rank, Self.CLUSTER_M)
        self.index = cluster
        comptime if Self.config.keeps_pace():
            if geometry.relays.count > 1:
                stay_in_branch()
                self.index += Self._share(geometry)[0]
        self.rank_m = rank_m
        self.rank_n = rank_n

    @always_inline
    def valid(self, geometry: TileGeometry) -> Bool:
        """Whether there is a tile left, or a share of one."""
        comptime if Self.config.splits():
            return self.index < geometry.tiles() * geometry.split_k.count.value
        comptime if Self.config.keeps_pace():
            # Asked each time: kept, it would cost consumers a register.
            if geometry.relays.count > 1:
                stay_in_branch()
                return self.index < Self._share(geometry)[1]
        return self.index < geometry.tiles()

    @staticmethod
    @always_inline
    def _share(geometry: TileGeometry) -> Tuple[UInt32, UInt32]:
        """The tiles of the block's relay: the first, and where they end."""
        return geometry.relays.share(
            UInt32(block_idx.y), UInt32(grid_dim.x), geometry.tiles()
        )

    @always_inline
    def tile(self, geometry: TileGeometry) -> Tile:
        """The block's tile."""
        var index = self.index
        var split = UInt32(0)
        var first = UInt32(0)
        var rounds = geometry.rounds(Self.config.halo)
        comptime if Self.config.splits():
            index, split = geometry.split_k.count.split(self.index)
            if geometry.split_k.count.value > 1:
                first, rounds = geometry.split_k.share(split)
        var m: UInt32
        var n: UInt32
        comptime if Self.config.may_count_pixels_first():
            m, n = geometry.place(index)
        else:
            m, n = geometry.clusters_n.split(index)
        var group, n_of_group = geometry.group_clusters.split(n)
        var filter = n_of_group * Self.CLUSTER_N + self.rank_n
        return Tile(
            pixel=(m * Self.CLUSTER_M + self.rank_m) * Self.BM,
            filter=group * geometry.group_filters + filter * Self.BN,
            group=group,
            split=split,
            first=first,
            rounds=rounds,
        )

    @always_inline
    def advance(mut self, tiles: UInt32 = 1):
        """Moves on.

        Args:
            tiles: By how many of the block's tiles.
        """
        comptime size = UInt32(Self.config.cluster_size())
        self.index += tiles * (UInt32(grid_dim.x) // size)
