"""Split-K on Hopper: each block of a cluster multiplies some of a tile's stages,
and stores some of its sub-tiles.

    where the rings' memory serves, wait until every block has read its own
    send each block this block's sums of the sub-tiles that it stores
    add up those of this block's own, block by block, in the same order always

A thread sends what the same thread of another block needs. Barriers count the
bytes that arrive, so that no block waits for another's stores.
"""

from std.collections import Optional
from std.math import ceildiv
from std.memory import bitcast

from ...epilogue.layout import VisitLayout
from ...im2col.tiles import Tile, TileGeometry
from ...im2col.traversal import Traversal
from ...pipeline.barrier import BARRIER_BYTES, Barrier
from ...pipeline.chunks import shared_pointer
from ...pipeline.exchange import (
    QUAD,
    QUAD_BYTES,
    peer_address,
    send_peer,
)
from ...limits import WARPGROUP
from ...split_k import even_part
from ...tma.copy import SharedAddress
from .config import SPLIT_COUNTS, Sm90Config
from .epilogue_values import set_values, values_of
from .mma import Accumulators


def split_refusal(
    config: Sm90Config, traversal: Traversal, split_k: Int
) -> Optional[String]:
    """Why so many blocks cannot share a tile.

    Args:
        config: The configuration.
        traversal: Of a problem that the configuration does not refuse.
        split_k: Blocks that share a tile.

    Returns:
        The reason, or None.
    """
    if split_k == 1:
        return None
    if not config.splits():
        return String(
            t"split_k: {split_k} blocks share no tile of this configuration"
        )
    var counts = materialize[SPLIT_COUNTS]()
    if split_k not in counts:
        return String(t"split_k: {split_k} is none of {counts}")
    if not config.may_split(split_k):
        return String(
            t"split_k: {split_k} blocks exchange"
            t" {config.exchange_bytes_of(split_k)} bytes, but the rings have"
            t" {config.loads_bytes()}"
        )
    var rounds = rounds_of(config, traversal)
    if split_k > rounds:
        return String(
            t"split_k: {split_k}, but a tile's sum has {rounds} stages"
        )
    return None


def rounds_of(config: Sm90Config, traversal: Traversal) -> Int:
    """Activation stages of a tile's sum."""
    var steps = traversal.steps()
    return steps // traversal.filter[2] if config.halo > 0 else steps


@fieldwise_init
struct OwnSubtiles(TrivialRegisterPassable):
    """The sub-tiles of a consumer's part of a tile that a block stores: all of
    them, or a range where blocks share the tile. A block stores all filters of a
    pixel that its consumer has."""

    var first: UInt32
    var count: UInt32

    @staticmethod
    @always_inline
    def of[
        config: Sm90Config, subtiles: Int
    ](geometry: TileGeometry, tile: Tile) -> Self:
        """The block's own.

        Parameters:
            config: The configuration.
            subtiles: Of a consumer's part.

        Args:
            geometry: The problem.
            tile: The tile.
        """
        comptime if not config.splits():
            return Self(0, UInt32(subtiles))
        comptime parts = config.filter_subtiles()
        var least, longer = geometry.split_k.count.split(
            UInt32(subtiles // parts)
        )
        var first, count = even_part(least, longer, tile.split)
        return Self(first * UInt32(parts), count * UInt32(parts))

    @always_inline
    def end(self) -> UInt32:
        """The sub-tile behind the last one."""
        return self.first + self.count

    @always_inline
    def has(self, subtile: UInt32) -> Bool:
        """Whether a sub-tile is among them.

        Args:
            subtile: Its number, in the order of visits.
        """
        return subtile - self.first < self.count


struct Shares[layout: VisitLayout, subtiles: Int, count: Int]:
    """What blocks send each other of a consumer's part of a tile.

    Parameters:
        layout: How the part is cut up.
        subtiles: Of the part.
        count: Blocks that share the tile.
    """

    comptime parts = Self.layout.filter_subtiles
    """Sub-tiles of a block of pixels."""
    comptime blocks = Self.subtiles // Self.parts
    """Of pixels."""
    comptime size = Self.layout.values()
    """A thread's values of a sub-tile."""
    comptime quads = Self.size // QUAD
    """The same, in accesses."""
    comptime subtile_bytes = Self.quads * WARPGROUP * QUAD_BYTES
    comptime most = ceildiv(Self.blocks, Self.count) * Self.parts
    """Sub-tiles that a block stores, at most."""
    comptime bytes = Self.most * Self.subtile_bytes
    """Between what two blocks send."""

    @staticmethod
    def of(split: Int) -> OwnSubtiles:
        """The sub-tiles that a block stores.

        Args:
            split: Which of the blocks that share the tile.
        """
        var least, longer = divmod(UInt32(Self.blocks), UInt32(Self.count))
        var first, own = even_part(least, longer, UInt32(split))
        return OwnSubtiles(first * UInt32(Self.parts), own * UInt32(Self.parts))

    @staticmethod
    @always_inline
    def offset(block: UInt32, owner: UInt32) -> UInt32:
        """Where a block's sums lie among those that another one gets.

        Args:
            block: Whose sums.
            owner: Who gets them.
        """
        return (block - UInt32(block > owner)) * UInt32(Self.bytes)


@fieldwise_init
struct SplitExchange[config: Sm90Config](TrivialRegisterPassable):
    """Barriers and memory of the exchange. A block whose tile is shared has no
    other tile, so that every barrier has one phase.

    Parameters:
        config: The configuration.
    """

    var barriers: SharedAddress
    """`free`, then `shares` of every consumer."""
    var memory: SharedAddress
    """The rings' stages and the rows that threads copied for them, or memory of
    its own where a block has as much left: then nobody waits for `free`."""

    @always_inline
    def free(self) -> Barrier:
        """The barrier that completes when no block of the tile reads its rings
        any more."""
        return Barrier(self.barriers)

    @always_inline
    def shares(self, consumer: UInt32) -> Barrier:
        """The barrier that completes when a consumer has the other blocks' sums
        of its own sub-tiles.

        Args:
            consumer: Which.
        """
        return Barrier(self.barriers + (1 + consumer) * BARRIER_BYTES)

    @always_inline
    def address(self, consumer: UInt32) -> SharedAddress:
        """Where a consumer gets the other blocks' sums: block after block, those
        of its own sub-tiles.

        Args:
            consumer: Which.
        """
        comptime bytes = UInt32(
            Self.config.exchange_bytes() // Self.config.consumers
        )
        return self.memory + consumer * bytes

    @always_inline
    def init(self, geometry: TileGeometry):
        """Initializes the barriers; one thread, before any other use.

        Args:
            geometry: The problem.
        """
        comptime assert (
            Self.config.exchange_bytes() <= Self.config.loads_bytes()
        ), "the rings hold every consumer's shares"
        self.free().init(
            Int(geometry.split_k.count.value) * Self.config.consumers
        )
        comptime for consumer in range(Self.config.consumers):
            self.shares(UInt32(consumer)).init(1)


@always_inline
def sum_splits[
    dtype: DType,
    //,
    config: Sm90Config,
    layout: VisitLayout,
    subtiles: Int,
    *,
    in_rings: Bool,
](
    mut accumulators: Accumulators[
        config.mma_rows(), config.mma_columns(), dtype
    ],
    exchange: SplitExchange[config],
    geometry: TileGeometry,
    tile: Tile,
    consumer: UInt32,
    thread: UInt32,
):
    """Adds up the sums of a consumer's own sub-tiles, with the other blocks of
    the cluster.

    Parameters:
        dtype: Of the sums.
        config: The configuration.
        layout: How the consumer's part is cut up.
        subtiles: Of a consumer's part.
        in_rings: Whether the exchange takes the rings' memory.

    Args:
        accumulators: This block's sums, waited for; those of its own sub-tiles
            are the whole ones afterwards, and others not to be stored.
        exchange: The block's barriers and memory; it has read all stages.
        geometry: The problem.
        tile: The tile.
        consumer: Which consumer.
        thread: Of the warpgroup.
    """
    var count = geometry.split_k.count.value
    if count == 1:
        return
    comptime if in_rings:
        if thread < count:
            exchange.free().arrive_at(thread)
    var own = OwnSubtiles.of[config, subtiles](geometry, tile)
    comptime for known in SPLIT_COUNTS:
        comptime if known > 1 and config.may_split(known):
            if count == UInt32(known):
                _exchange[layout, subtiles, known, in_rings](
                    accumulators, exchange, own, tile.split, consumer, thread
                )


@always_inline
def _exchange[
    dtype: DType,
    config: Sm90Config,
    //,
    layout: VisitLayout,
    subtiles: Int,
    count: Int,
    in_rings: Bool,
](
    mut accumulators: Accumulators[
        config.mma_rows(), config.mma_columns(), dtype
    ],
    exchange: SplitExchange[config],
    own: OwnSubtiles,
    split: UInt32,
    consumer: UInt32,
    thread: UInt32,
):
    """`sum_splits` of a tile that `count` blocks share, of which this one is
    `split`."""
    comptime S = Shares[layout, subtiles, count]
    comptime assert (
        count - 1
    ) * S.bytes * config.consumers <= config.exchange_bytes(), (
        "there is room for the sums of the other blocks"
    )
    var memory = exchange.address(consumer) + thread * QUAD_BYTES
    if thread == 0:
        exchange.shares(consumer).arrive_expecting(
            Int(own.count) * (count - 1) * S.subtile_bytes
        )
    comptime if in_rings:
        exchange.free().wait(0)
    _send[layout, subtiles, count](
        accumulators, exchange, split, consumer, thread
    )
    exchange.shares(consumer).wait[sees_cluster=True](0)
    comptime for subtile in range(subtiles):
        if own.has(UInt32(subtile)):
            var share = memory + (UInt32(subtile) - own.first) * UInt32(
                S.subtile_bytes
            )
            comptime for quad in range(S.quads):
                comptime first = quad * QUAD
                var this = bitcast[dtype](
                    values_of[layout, subtile, first, QUAD, as_bits=True](
                        accumulators
                    )
                )
                var sum = this
                if split != 0:
                    sum = _load[dtype](_quad_address(share, quad))
                comptime for block in range(1, count):
                    var part = this
                    if split != UInt32(block):
                        var at = share + S.offset(UInt32(block), split)
                        part = _load[dtype](_quad_address(at, quad))
                    sum += part
                set_values[layout, subtile, first, QUAD](accumulators, sum)


@always_inline
def _send[
    dtype: DType,
    config: Sm90Config,
    //,
    layout: VisitLayout,
    subtiles: Int,
    count: Int,
](
    accumulators: Accumulators[config.mma_rows(), config.mma_columns(), dtype],
    exchange: SplitExchange[config],
    split: UInt32,
    consumer: UInt32,
    thread: UInt32,
):
    """Sends the other blocks' sub-tiles from registers, `QUAD` values at a time.
    """
    comptime S = Shares[layout, subtiles, count]
    var memory = exchange.address(consumer) + thread * QUAD_BYTES
    comptime for block in range(count):
        if split != UInt32(block):
            comptime theirs = S.of(block)
            var barrier = peer_address(
                exchange.shares(consumer).address, UInt32(block)
            )
            var share = peer_address(
                memory + S.offset(split, UInt32(block)), UInt32(block)
            )
            comptime for i in range(Int(theirs.count)):
                var values = values_of[
                    layout, Int(theirs.first) + i, 0, S.size, as_bits=True
                ](accumulators)
                comptime for quad in range(S.quads):
                    send_peer(
                        _quad_address(share, i * S.quads + quad),
                        barrier,
                        values.slice[QUAD, offset=quad * QUAD](),
                    )


@always_inline
def _quad_address(base: SharedAddress, quad: Int) -> SharedAddress:
    """Where a thread's accumulators `QUAD * quad` and following lie."""
    return base + UInt32(quad * WARPGROUP * QUAD_BYTES)


@always_inline
def _load[dtype: DType](address: SharedAddress) -> SIMD[dtype, QUAD]:
    """Loads accumulators from this block's memory."""
    return shared_pointer[dtype](address).unsafe_load[
        width=QUAD, alignment=QUAD_BYTES
    ](0)
