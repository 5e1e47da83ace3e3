"""Tiles whose sum is cut into parts: a block adds up some of the stages, and
the last one to come adds up the parts, always in the same order.

The workspace is a counter for every consumer of every tile, then their parts,
each thread's accumulators as the registers hold them.
"""

from std.collections import Optional

from ..conv.memory import Writes
from ..pipeline.barrier import any_thread, count_arrival, sync_threads
from .config import Sm90Config, WARPGROUP
from .mma import Accumulators
from .scheduler import Tile, TileGeometry
from .walk import Walk

comptime MAX_WORKSPACE_BYTES = 64 << 20
"""Of the parts of all tiles."""

comptime CHUNK = 4
"""Accumulators that a thread stores or loads at once."""

comptime COUNTER_BYTES = 4
"""Of a counter, and of an accumulator."""


def counters(config: Sm90Config, tiles: Int) -> Int:
    """Counters of a workspace, rounded up so that the parts are aligned.

    Args:
        config: The configuration.
        tiles: Of the problem, in whole clusters.
    """
    var units = tiles * config.cluster_size() * config.tile_consumers()
    return (units + WARPGROUP - 1) // WARPGROUP * WARPGROUP


def workspace_elements(config: Sm90Config, tiles: Int, parts: Int) -> Int:
    """Elements of 4 bytes of a workspace: none if nothing is cut.

    Args:
        config: The configuration.
        tiles: Of the problem, in whole clusters.
        parts: Of a tile.
    """
    if parts == 1:
        return 0
    var sums = config.accumulators() * WARPGROUP * parts
    var units = tiles * config.cluster_size() * config.tile_consumers()
    return counters(config, tiles) + units * sums


def split_refusal[
    in_type: DType
](config: Sm90Config, walk: Walk, parts: Int) -> Optional[String]:
    """Why tiles cannot be cut so.

    Parameters:
        in_type: Of the activation.

    Args:
        config: The configuration.
        walk: The problem's; `can_implement` has agreed.
        parts: Of a tile.

    Returns:
        The reason, or None.
    """
    if parts == 1:
        return None
    if not config.splits:
        return String(t"parts: the configuration cuts no tile into {parts}")
    var geometry = TileGeometry.of[in_type](config, walk)
    var rounds = Int(geometry.rounds(config.halo))
    if parts < 1 or parts > rounds:
        return String(
            t"parts: {parts}, but a tile has {rounds} stages; 1 to {rounds} are"
            t" allowed"
        )
    var tiles = Int(geometry.tiles())
    var bytes = workspace_elements(config, tiles, parts) * COUNTER_BYTES
    if bytes > MAX_WORKSPACE_BYTES:
        return String(
            t"parts: {parts} parts of {tiles} tiles take {bytes} bytes, but a"
            t" workspace has at most {MAX_WORKSPACE_BYTES}"
        )
    return None


@always_inline
def sum_parts[
    config: Sm90Config
](
    mut accumulators: Accumulators[config.mma_rows(), config.mma_columns()],
    workspace: Writes[DType.float32],
    geometry: TileGeometry,
    tile: Tile,
    consumer: UInt32,
    thread: UInt32,
    name: Int,
) -> Bool:
    """Adds up the parts of a consumer's tile, if this is the last to come.

    Parameters:
        config: The configuration.

    Args:
        accumulators: This part, settled; the whole sum afterwards.
        workspace: The workspace, its counters 0.
        geometry: The problem.
        tile: The tile.
        consumer: Which consumer.
        thread: Of the warpgroup.
        name: A named barrier of the warpgroup.

    Returns:
        Whether the accumulators hold the whole sum; otherwise they are not to
        be stored.
    """
    comptime part_elements = config.accumulators() * WARPGROUP
    comptime units = UInt32(config.tile_consumers())
    var parts = geometry.parts.value
    if parts == 1:
        return True
    var unit = tile.slot * units + consumer
    var sums = workspace.unsafe_offset(
        Int(geometry.counters)
        + Int(unit * parts) * part_elements
        + Int(thread) * CHUNK
    )
    _store(accumulators, sums.unsafe_offset(Int(tile.part) * part_elements))
    sync_threads[WARPGROUP](name)
    var last = False
    if thread == 0:
        var counter = workspace.unsafe_bitcast[UInt32]().unsafe_offset(
            Int(unit)
        )
        last = count_arrival(counter) == parts - 1
    if not any_thread[WARPGROUP](name, last):
        return False
    accumulators = Accumulators[config.mma_rows(), config.mma_columns()]()
    for part in range(Int(parts)):
        _add(accumulators, sums.unsafe_offset(part * part_elements))
    return True


@always_inline
def _store[
    rows: Int, columns: Int
](accumulators: Accumulators[rows, columns], to: Writes[DType.float32]):
    """Stores a thread's accumulators, `CHUNK` every `CHUNK * WARPGROUP`."""
    comptime width = Accumulators[rows, columns].width
    comptime for b in range(Accumulators[rows, columns].blocks):
        comptime for r in range(0, width, CHUNK):
            var values = SIMD[DType.float32, CHUNK]()
            comptime for i in range(CHUNK):
                values[i] = accumulators.values[b][r + i]
            to.unsafe_store[alignment=16]((b * width + r) * WARPGROUP, values)


@always_inline
def _add[
    rows: Int, columns: Int
](mut accumulators: Accumulators[rows, columns], sums: Writes[DType.float32]):
    """Adds what `_store` has stored."""
    comptime width = Accumulators[rows, columns].width
    comptime for b in range(Accumulators[rows, columns].blocks):
        comptime for r in range(0, width, CHUNK):
            var values = sums.unsafe_load[width=CHUNK, alignment=16](
                (b * width + r) * WARPGROUP
            )
            comptime for i in range(CHUNK):
                accumulators.values[b][r + i] += values[i]
