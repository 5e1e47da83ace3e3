"""The filters of the Hopper stem kernel, the offsets of their taps, and their
scales and biases, in shared memory."""

from std.memory import bitcast
from std.utils import StaticTuple

from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ...im2col.traversal import ROW_BYTES
from ...pipeline.chunks import CHUNK_BYTES, swizzled_chunk
from ...tma.copy import SharedAddress
from .geometry import (
    ATOM_STEPS,
    NO_QUAD,
    QUAD,
    STEP_QUADS,
    StemConfig,
    StemGeometry,
)
from .staging import load_elements_if, store_shared
from .storage import FACTOR_BYTES

comptime ATOM_QUADS = UInt32(ATOM_STEPS * STEP_QUADS)
"""Quads that share a row of shared memory."""

comptime PACKED_TOGETHER = 5
"""Quads of filters that a thread loads before it stores the first."""


@always_inline
def write_table[
    config: StemConfig
](
    geometry: StemGeometry,
    table: SharedAddress,
    zeros: SharedAddress,
    thread: UInt32,
):
    """Writes a quad of zeros, and the offsets of all quads: for each of the four
    threads that share a row, chunk by chunk.

    Parameters:
        config: The configuration.

    Args:
        geometry: The problem.
        table: Where to write the offsets.
        zeros: Where to write the zeros.
        thread: Of the consumers.
    """
    comptime entries = UInt32(config.chunk_offsets())
    if thread == 0:
        store_shared(zeros, SIMD[DType.uint32, 2](0))
    var count = geometry.chunks.value * entries
    for i in range(
        thread, count * STEP_QUADS, UInt32(config.consumer_threads())
    ):
        var part, entry = divmod(i, count)
        var chunk, step = divmod(entry, entries)
        var offset = NO_QUAD
        if step < UInt32(config.steps):
            var quad = (chunk * UInt32(config.steps) + step) * STEP_QUADS + part
            offset = geometry.tap_offset(quad)
        store_shared(table + i * 4, SIMD[DType.uint32, 1](offset))


@always_inline
def pack_filter[
    dtype: DType, //, config: StemConfig
](
    filter: Reads[dtype],
    geometry: StemGeometry,
    to: SharedAddress,
    first_filter: UInt32,
    thread: UInt32,
):
    """Writes the block's filters: rows of 128 bytes, 4 steps, swizzled.

    Column `8*j + 2*t + e` of the multiply is filter `32*(j/4) + 8*t +
    2*(j%4) + e` of the tile, and quad t of a step has the products 2*t,
    2*t+1, 2*t+8, 2*t+9, as a thread holds them.

    Parameters:
        dtype: Of the filter.
        config: The configuration.

    Args:
        filter: `[K, T, R, S, C]`.
        geometry: The problem.
        to: Where to write.
        first_filter: The block's first.
        thread: Of the consumers.
    """
    comptime quads = UInt32(config.steps * STEP_QUADS)
    comptime columns = UInt32(config.tile_n)
    comptime batch = UInt32(PACKED_TOGETHER * config.consumer_threads())
    var tap_quads = geometry.tap_quads()
    var taps = tap_quads >> geometry.quad_shift
    var count = geometry.tiles_n * geometry.chunks.value * columns * quads
    # The same turns for all threads: uniform registers hold the descriptors.
    for start in range(UInt32(0), count, batch):
        var values = StaticTuple[SIMD[dtype, QUAD], PACKED_TOGETHER](
            fill=SIMD[dtype, QUAD](0)
        )
        var rows = StaticTuple[SharedAddress, PACKED_TOGETHER](fill=to)
        comptime for n in range(PACKED_TOGETHER):
            var i = start + UInt32(n * config.consumer_threads()) + thread
            var index, at = divmod(i, quads)
            var chunk_index, column = divmod(index, columns)
            var tile, chunk = geometry.chunks.split(chunk_index)
            var quad = chunk * quads + at
            var j = column // 8
            var k = (
                first_filter
                + tile * columns
                + (j // 4) * 32
                + (column % 8) // 2 * 8
                + (j % 4) * 2
                + column % 2
            )
            var exists = i < count and quad < tap_quads and k < geometry.filters
            var tap = quad >> geometry.quad_shift
            var c = (quad - (tap << geometry.quad_shift)) * QUAD
            var from_ = Int(k * taps + tap) * Int(geometry.tap_channels) + Int(
                c
            )
            values[n] = load_elements_if(
                exists, filter.unsafe_offset(from_), c, geometry.tap_channels
            )
            var atom = chunk_index * UInt32(config.atoms()) + at // ATOM_QUADS
            rows[n] = to + (atom * columns + column) * ROW_BYTES
        comptime for n in range(PACKED_TOGETHER):
            var i = start + UInt32(n * config.consumer_threads()) + thread
            if i < count:
                var at = i % quads
                var pairs = bitcast[DType.uint32, 2](values[n])
                var first = at % ATOM_QUADS // STEP_QUADS * 2
                # Tiles begin at multiples of 8 rows: a column's swizzle is its
                # row's.
                var column = i // quads % columns
                comptime for half in range(2):
                    var moved = swizzled_chunk[ROW_BYTES](
                        column, first + UInt32(half)
                    )
                    store_shared(
                        rows[n] + moved * CHUNK_BYTES + at % STEP_QUADS * 4,
                        SIMD[DType.uint32, 1](pairs[half]),
                    )


@always_inline
def write_factors[
    config: StemConfig
](
    epilogue: Epilogue,
    geometry: StemGeometry,
    to: SharedAddress,
    first_filter: UInt32,
    halves: Bool,
    thread: UInt32,
):
    """Writes the scales of each multiply's filters, then their biases; 1 and 0
    where there is none.

    Parameters:
        config: The configuration.

    Args:
        epilogue: What happens before the store.
        geometry: The problem.
        to: Where to write.
        first_filter: The block's first.
        halves: Whether to write half of each.
        thread: Of the consumers.
    """
    comptime columns = UInt32(config.tile_n)
    comptime float_bytes = FACTOR_BYTES // 2
    var unit = Float32(0.5) if halves else Float32(1)
    var count = geometry.tiles_n * columns
    # The same turns for all threads, as above.
    for start in range(UInt32(0), count, UInt32(config.consumer_threads())):
        var i = start + thread
        var filter = first_filter + i
        var scale = Float32(1)
        var bias = Float32(0)
        if i < count and filter < geometry.filters:
            scale = epilogue.scaled[1](scale, Int(filter))
            bias = epilogue.load_bias[1](Int(filter))
        if i < count:
            var tile, column = divmod(i, columns)
            var at = to + (2 * tile * columns + column) * float_bytes
            store_shared(at, SIMD[DType.float32, 1](scale * unit))
            store_shared(
                at + columns * float_bytes, SIMD[DType.float32, 1](bias * unit)
            )
