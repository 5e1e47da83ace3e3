"""Split-K on Hopper: each block of a cluster multiplies some of a tile's stages,
and together they add up their sums, always in the same order.

Every block writes its accumulators to its shared memory, adds up its share of
them over all blocks, and leaves the sums with the first block, which stores the
tile. The rings' memory serves: a block of such a cluster has just one tile.
"""

from std.collections import Optional
from std.memory import bitcast

from ...im2col.tiles import Tile, TileGeometry
from ...im2col.traversal import Traversal
from ...pipeline.barrier import sync_cluster, sync_threads
from ...pipeline.exchange import (
    QUAD,
    QUAD_BYTES,
    load_peer,
    peer_address,
    store_peer,
)
from ...limits import WARPGROUP
from ...split_k import MAX_SPLIT_K
from ...tma.copy import SharedAddress
from .config import Sm90Config
from .mma import Accumulators

comptime CONSUMERS_NAME = 15
"""The named barrier of all consumers."""


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
    if split_k != 2 and split_k != 4 and split_k != MAX_SPLIT_K:
        return String(t"split_k: {split_k} is not 1, 2, 4 or {MAX_SPLIT_K}")
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


@always_inline
def sum_splits[
    dtype: DType, //, config: Sm90Config
](
    mut accumulators: Accumulators[
        config.mma_rows(), config.mma_columns(), dtype
    ],
    rings: SharedAddress,
    geometry: TileGeometry,
    tile: Tile,
    consumer: UInt32,
    thread: UInt32,
) -> Bool:
    """Adds up the sums of a consumer's tile, with the other blocks of the
    cluster. Threads that are no consumer's call `await_sums` meanwhile.

    Args:
        accumulators: This block's sum, waited for; in the first block the
            whole afterwards.
        rings: Where the rings' stages begin; all have been read.
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
    comptime bytes = config.accumulators() * WARPGROUP * 4
    var own = rings + consumer * UInt32(bytes) + thread * QUAD_BYTES
    # Another consumer may still read the rings.
    sync_threads[config.consumers * WARPGROUP](CONSUMERS_NAME)
    _write(accumulators, own)
    sync_cluster()
    comptime for known in [2, 4, MAX_SPLIT_K]:
        if count == UInt32(known):
            _add_share[dtype, known, config.accumulators() // QUAD](
                own, tile.split
            )
    sync_cluster()
    if tile.split != 0:
        return False
    _read(accumulators, own)
    return True


@always_inline
def await_sums(geometry: TileGeometry):
    """What threads that are no consumer's do while `sum_splits` runs."""
    if geometry.split_k.count.value > 1:
        sync_cluster()
        sync_cluster()


@always_inline
def _quad_address(own: SharedAddress, quad: UInt32) -> SharedAddress:
    """Where a thread's accumulators `QUAD * quad` and following lie."""
    return own + quad * UInt32(WARPGROUP * QUAD_BYTES)


@always_inline
def _write[
    rows: Int, columns: Int, dtype: DType
](accumulators: Accumulators[rows, columns, dtype], own: SharedAddress):
    """Writes a thread's accumulators."""
    comptime width = Accumulators[rows, columns, dtype].width
    comptime for b in range(Accumulators[rows, columns, dtype].blocks):
        comptime for r in range(0, width, QUAD):
            var values = SIMD[dtype, QUAD]()
            comptime for i in range(QUAD):
                values[i] = accumulators.values[b][r + i]
            store_peer(
                _quad_address(own, UInt32((b * width + r) // QUAD)),
                bitcast[DType.float32, QUAD](values),
            )


@always_inline
def _read[
    rows: Int, columns: Int, dtype: DType
](mut accumulators: Accumulators[rows, columns, dtype], own: SharedAddress):
    """Reads what `_write` has written."""
    comptime width = Accumulators[rows, columns, dtype].width
    comptime for b in range(Accumulators[rows, columns, dtype].blocks):
        comptime for r in range(0, width, QUAD):
            var values = _quad[dtype](
                _quad_address(own, UInt32((b * width + r) // QUAD))
            )
            comptime for i in range(QUAD):
                accumulators.values[b][r + i] = values[i]


@always_inline
def _add_share[
    dtype: DType, count: Int, quads: Int
](own: SharedAddress, split: UInt32):
    """Adds up this block's share of the accumulators, in the first block."""
    comptime assert quads % count == 0
    comptime share = quads // count
    comptime for i in range(share):
        var address = _quad_address(own, split * UInt32(share) + UInt32(i))
        var sum = _quad[dtype](peer_address(address, 0))
        comptime for block in range(1, count):
            sum += _quad[dtype](peer_address(address, UInt32(block)))
        store_peer(peer_address(address, 0), bitcast[DType.float32, QUAD](sum))


@always_inline
def _quad[dtype: DType](address: SharedAddress) -> SIMD[dtype, QUAD]:
    """Some accumulators of a block of the cluster."""
    return bitcast[dtype, QUAD](load_peer(address))
