"""Split-K on Blackwell: each block of a cluster sums some of a tile's steps in
its own tensor memory, and stores some of its sub-tiles.

Of the sub-tiles that another block stores, a block writes its sums into that
block's shared memory; to its own sub-tiles it adds what the others have
written, always in the same order; sums of integers as integers. Of a tile a
block gets all partial sums before its first sub-tile, in one phase of a
barrier, and releases them together.
"""

from std.memory import bitcast

from ..pipeline.barrier import Barrier, sync_warp
from ..pipeline.exchange import (
    QUAD,
    QUAD_BYTES,
    Quad,
    load_peer,
    peer_address,
    store_peer,
)
from ..pipeline.ring import RingPosition
from ..tma.copy import SharedAddress
from ..limits import WARP
from .config import Conv2dConfig
from .mma import accumulator_type
from .scheduler import ClusterPlace
from .smem import SharedStorage


@fieldwise_init
struct PartialSums[
    config: Conv2dConfig,
](TrivialRegisterPassable):
    """One thread of the epilogue in the exchange of sums. All threads of its
    warp call each method together.

    Parameters:
        config: The configuration, with `split_k` above 1.
    """

    comptime size = Self.config.output_tile_shape[1]
    """Filters of a sub-tile."""
    comptime split_k = UInt32(Self.config.split_k())
    comptime sum_type = accumulator_type(Self.config.types.act)
    comptime Values = SIMD[Self.sum_type, Self.size]

    var storage: SharedStorage[Self.config]
    var place: ClusterPlace[Self.config]
    var thread: UInt32
    """Of the epilogue: the pixel of the sub-tile that it has."""
    var position: RingPosition[1]

    @always_inline
    def __init__(
        out self,
        storage: SharedStorage[Self.config],
        place: ClusterPlace[Self.config],
        thread: UInt32,
    ):
        """A thread, before its first tile.

        Args:
            storage: The block's shared memory.
            place: The block's.
            thread: Of the epilogue.
        """
        self.storage = storage
        self.place = place
        self.thread = thread
        self.position = RingPosition[1]()

    @always_inline
    def is_own(self, subtile: UInt32) -> Bool:
        """Whether this block stores a sub-tile.

        Args:
            subtile: Its number in the tile.
        """
        return subtile % Self.split_k == self.place.split

    @always_inline
    def acquire(self):
        """Waits until the others have added what this block sent of the last
        tile."""
        self.storage.exchange().empty(0).wait[sees_cluster=True](
            self.position.parity ^ 1
        )

    @always_inline
    def send(self, subtile: UInt32, values: Self.Values):
        """Writes this block's sums of another block's sub-tile to it.

        Args:
            subtile: Its number in the tile; not `is_own`.
            values: This thread's pixel of it.
        """
        var slot, owner = divmod(subtile, Self.split_k)
        var ahead = (owner + Self.split_k - self.place.split) % Self.split_k
        var buffer = peer_address(
            self._buffer(Self.split_k - ahead, slot), self.place.behind(ahead)
        )
        comptime for quad in range(Self.size // QUAD):
            var four = Quad()
            comptime for i in range(QUAD):
                four[i] = bitcast[DType.float32](values[quad * QUAD + i])
            store_peer(Self._quad(buffer, quad), four)

    @always_inline
    def publish(self):
        """Tells the others that this warp has sent all of a tile."""
        self._tell(self.storage.exchange().full(0).address)

    @always_inline
    def wait(self):
        """Waits until the others have sent their sums of a tile."""
        self.storage.exchange().full(0).wait[sees_cluster=True](
            self.position.parity
        )

    @always_inline
    def add(self, subtile: UInt32, values: Self.Values) -> Self.Values:
        """The whole sums of a sub-tile: this block's, then those behind
        it, counted around.

        Args:
            subtile: Its number in the tile; `is_own`.
            values: This block's sums, of this thread's pixel.
        """
        var sums = values
        var slot = subtile // Self.split_k
        comptime for behind in range(1, Self.config.split_k()):
            var buffer = self._buffer(UInt32(behind), slot)
            comptime for quad in range(Self.size // QUAD):
                var four = load_peer(Self._quad(buffer, quad))
                comptime for i in range(QUAD):
                    sums[quad * QUAD + i] += bitcast[Self.sum_type](four[i])
        return sums

    @always_inline
    def release(mut self):
        """Tells the others that this warp has added all that they sent of a
        tile."""
        self._tell(self.storage.exchange().empty(0).address)
        self.position.step()

    @always_inline
    def _tell(self, barrier: SharedAddress):
        """Arrives for this warp at a barrier of each block that shares its
        tiles, a thread at each."""
        sync_warp()
        var lane = self.thread % WARP
        if lane + 1 < Self.split_k:
            Barrier(barrier).arrive_at[publishes=True](
                self.place.behind(lane + 1)
            )

    @always_inline
    def _buffer(self, behind: UInt32, slot: UInt32) -> SharedAddress:
        """Where a block finds a sub-tile of the block `behind` it."""
        comptime slots = UInt32(Self.config.own_subtiles())
        var index = (behind - 1) * slots + slot
        return (
            self.storage.exchange().address(0)
            + index * UInt32(Self.config.partial_bytes())
            + self.thread * QUAD_BYTES
        )

    @staticmethod
    @always_inline
    def _quad(buffer: SharedAddress, quad: Int) -> SharedAddress:
        """Where a thread's values from `QUAD * quad` on lie: neighbouring
        threads' side by side."""
        comptime row = Self.config.output_tile_shape[0] * QUAD_BYTES
        return buffer + UInt32(quad * row)
