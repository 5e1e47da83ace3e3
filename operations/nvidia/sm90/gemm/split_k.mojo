"""Split-K on Hopper: each block of a cluster multiplies some of a tile's stages,
and together they add up their sums, always in the same order.

    wait until every block has read its rings, whose memory serves
    send each block its share of this block's accumulators
    add up this block's share, block by block, and send the sum to the first
    the first block: wait for all sums, and store the tile

A thread sends what the same thread of another block needs. Barriers count the
bytes that arrive, so that no block waits for another's stores, but for the sums
themselves.
"""

from std.collections import Optional
from std.math import ceildiv
from std.memory import bitcast

from ...im2col.tiles import Tile, TileGeometry
from ...im2col.traversal import Traversal
from ...pipeline.barrier import BARRIER_BYTES, Barrier
from ...pipeline.chunks import shared_pointer
from ...pipeline.exchange import (
    QUAD,
    QUAD_BYTES,
    Quad,
    peer_address,
    send_peer,
)
from ...limits import WARPGROUP
from ...tma.copy import SharedAddress
from .config import SPLIT_COUNTS, Sm90Config
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
struct SplitExchange[config: Sm90Config](TrivialRegisterPassable):
    """Barriers and memory of the exchange. A block whose tile is shared has no
    other tile, so that every barrier has one phase.

    Parameters:
        config: The configuration.
    """

    var barriers: SharedAddress
    """`free`, then `shares` of every consumer, then `sums` of every consumer."""
    var memory: SharedAddress
    """The rings' stages, and the rows that threads copied for them: of every
    consumer, shares, then sums."""

    @always_inline
    def free(self) -> Barrier:
        """The barrier that completes when no block of the tile reads its rings
        any more."""
        return Barrier(self.barriers)

    @always_inline
    def shares(self, consumer: UInt32) -> Barrier:
        """The barrier that completes when a consumer has its share of the other
        blocks' accumulators.

        Args:
            consumer: Which.
        """
        return Barrier(self.barriers + (1 + consumer) * BARRIER_BYTES)

    @always_inline
    def sums(self, consumer: UInt32) -> Barrier:
        """The barrier that completes when a consumer of the first block has the
        other blocks' sums.

        Args:
            consumer: Which.
        """
        comptime consumers = UInt32(Self.config.consumers)
        return Barrier(
            self.barriers + (1 + consumers + consumer) * BARRIER_BYTES
        )

    @always_inline
    def share_address(self, consumer: UInt32) -> SharedAddress:
        """Where a consumer's shares lie, block after block.

        Args:
            consumer: Which.
        """
        comptime bytes = UInt32(
            Self.config.exchange_bytes() // Self.config.consumers
        )
        return self.memory + consumer * bytes

    @always_inline
    def sum_address(self, consumer: UInt32) -> SharedAddress:
        """Where a consumer's sums lie, in the accumulators' order.

        Args:
            consumer: Which.
        """
        return self.share_address(consumer) + UInt32(Self.config.share_bytes())

    @always_inline
    def init(self, geometry: TileGeometry):
        """Initializes the barriers; one thread, before any other use.

        Args:
            geometry: The problem.
        """
        comptime assert (
            Self.config.exchange_bytes() <= Self.config.loads_bytes()
        ), "the rings hold every consumer's shares and sums"
        self.free().init(
            Int(geometry.split_k.count.value) * Self.config.consumers
        )
        comptime for consumer in range(Self.config.consumers):
            self.shares(UInt32(consumer)).init(1)
            self.sums(UInt32(consumer)).init(1)


@always_inline
def sum_splits[
    dtype: DType, //, config: Sm90Config
](
    mut accumulators: Accumulators[
        config.mma_rows(), config.mma_columns(), dtype
    ],
    exchange: SplitExchange[config],
    geometry: TileGeometry,
    tile: Tile,
    consumer: UInt32,
    thread: UInt32,
) -> Bool:
    """Adds up the sums of a consumer's tile, with the other blocks of the
    cluster.

    Args:
        accumulators: This block's sum, waited for; in the first block the
            whole afterwards.
        exchange: The block's barriers and memory; it has read all stages.
        geometry: The problem.
        tile: The tile.
        consumer: Which consumer.
        thread: Of the warpgroup.

    Returns:
        Whether the accumulators hold the sum; otherwise they are not to be
        stored.
    """
    var count = geometry.split_k.count.value
    if count == 1:
        return True
    if thread < count:
        exchange.free().arrive_at(thread)
    comptime for known in SPLIT_COUNTS:
        comptime if known > 1:
            if count == UInt32(known):
                _exchange[known](
                    accumulators, exchange, tile.split, consumer, thread
                )
    return tile.split == 0


@always_inline
def _exchange[
    dtype: DType, config: Sm90Config, //, count: Int
](
    mut accumulators: Accumulators[
        config.mma_rows(), config.mma_columns(), dtype
    ],
    exchange: SplitExchange[config],
    split: UInt32,
    consumer: UInt32,
    thread: UInt32,
):
    """`sum_splits` of a tile that `count` blocks share. Where quads do not
    divide, the first blocks add up one more."""
    comptime quads = config.accumulators() // QUAD
    comptime least, longer = divmod(quads, count)
    comptime most = ceildiv(quads, count)
    comptime quad_bytes = WARPGROUP * QUAD_BYTES
    comptime assert (
        most * count * quad_bytes <= config.share_bytes()
    ), "there is room for the shares of all blocks"
    var before = split * UInt32(least) + min(split, UInt32(longer))
    var own = UInt32(least)
    comptime if longer > 0:
        own += UInt32(split < UInt32(longer))
    var shares = exchange.share_address(consumer) + thread * QUAD_BYTES
    var sums = exchange.sum_address(consumer) + thread * QUAD_BYTES
    if thread == 0:
        exchange.shares(consumer).arrive_expecting(
            Int(own) * (count - 1) * quad_bytes
        )
        if split == 0:
            exchange.sums(consumer).arrive_expecting(
                (quads - most) * quad_bytes
            )
    exchange.free().wait(0)
    comptime for block in range(count):
        var barrier = peer_address(
            exchange.shares(consumer).address, UInt32(block)
        )
        comptime first = block * least + min(block, longer)
        comptime for i in range(least + Int(block < longer)):
            var at = _quad_address(shares, split * UInt32(most) + UInt32(i))
            var values = _quad_of[first + i](accumulators)
            if split == UInt32(block):
                _store(at, values)
            else:
                send_peer(peer_address(at, UInt32(block)), barrier, values)
    exchange.shares(consumer).wait[sees_cluster=True](0)
    var first = peer_address(exchange.sums(consumer).address, 0)
    comptime for i in range(most):
        if i < least or UInt32(i) < own:
            var sum = _load[dtype](_quad_address(shares, UInt32(i)))
            comptime for block in range(1, count):
                sum += _load[dtype](
                    _quad_address(shares, UInt32(block * most + i))
                )
            var at = _quad_address(sums, before + UInt32(i))
            if split == 0:
                _store(at, sum)
            else:
                send_peer(
                    peer_address(at, 0),
                    first,
                    bitcast[DType.float32, QUAD](sum),
                )
    if split == 0:
        exchange.sums(consumer).wait[sees_cluster=True](0)
        _read(accumulators, sums)


@always_inline
def _quad_address(base: SharedAddress, quad: UInt32) -> SharedAddress:
    """Where a thread's accumulators `QUAD * quad` and following lie."""
    return base + quad * UInt32(WARPGROUP * QUAD_BYTES)


@always_inline
def _quad_of[
    rows: Int, columns: Int, dtype: DType, //, quad: Int
](accumulators: Accumulators[rows, columns, dtype]) -> Quad:
    """A thread's accumulators `QUAD * quad` and following."""
    comptime width = Accumulators[rows, columns, dtype].width
    var values = SIMD[dtype, QUAD]()
    comptime for i in range(QUAD):
        comptime at = QUAD * quad + i
        values[i] = accumulators.values[at // width][at % width]
    return bitcast[DType.float32, QUAD](values)


@always_inline
def _read[
    rows: Int, columns: Int, dtype: DType
](mut accumulators: Accumulators[rows, columns, dtype], own: SharedAddress):
    """Reads a thread's accumulators."""
    comptime width = Accumulators[rows, columns, dtype].width
    comptime for b in range(Accumulators[rows, columns, dtype].blocks):
        comptime for r in range(0, width, QUAD):
            var at = _quad_address(own, UInt32((b * width + r) // QUAD))
            var values = _load[dtype](at)
            comptime for i in range(QUAD):
                accumulators.values[b][r + i] = values[i]


@always_inline
def _load[dtype: DType](address: SharedAddress) -> SIMD[dtype, QUAD]:
    """Loads accumulators from this block's memory."""
    return shared_pointer[dtype](address).unsafe_load[
        width=QUAD, alignment=QUAD_BYTES
    ](0)


@always_inline
def _store[dtype: DType, //](address: SharedAddress, values: SIMD[dtype, QUAD]):
    """Stores accumulators to this block's memory."""
    shared_pointer[dtype](address).unsafe_store[alignment=QUAD_BYTES](0, values)
