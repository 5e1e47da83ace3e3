"""The epilogue: accumulators -> registers of the output's type -> shared
memory -> output, 64 pixels by 128 bytes at a time."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..pipeline.barrier import sync_threads
from ..conv.memory import Writes
from ..tma.copy import (
    SharedAddress,
    commit_stores,
    load_shared,
    publish_to_engine,
    store_pixels,
    store_tile,
    wait_stores_read,
)
from ..tma.descriptor import TensorMap
from .config import MMA_M, ROW_BYTES, Sm90Config, WARPGROUP
from .mma import Accumulators
from .scheduler import Tile, TileGeometry

comptime FIRST_NAME = 1
"""The named barrier of the first consumer's epilogue; the others follow."""


@always_inline
def _store_matrices(address: SharedAddress, values: SIMD[DType.uint32, 4]):
    """Stores four 8x8 matrices of 16-bit elements; lane l gives the address of
    row l % 8 of matrix l / 8."""
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,r,r,r,r,~{memory}",
    ](address, values[0], values[1], values[2], values[3])


@always_inline
def _swizzled_row(thread: UInt32) -> SharedAddress:
    """Where a thread's `stmatrix` row begins in an output buffer: row and
    swizzled chunk of the first 16 columns."""
    var warp, lane = divmod(thread, UInt32(32))
    var row = warp * 16 + lane % 16
    var chunk = lane // 16
    return row * ROW_BYTES + ((chunk ^ (row % 8)) * 16)


@always_inline
def write_fragment[
    out_type: DType, pixels: Int, filters: Int, block: Int, first: Int
](
    accumulators: Accumulators[pixels, filters],
    buffer: SharedAddress,
    thread: UInt32,
):
    """Rounds 64 pixels by `ROW_BYTES` of the accumulators, and writes them to
    shared memory, swizzled.

    Parameters:
        out_type: Of the output, 16 bits.
        pixels: Of the accumulators.
        filters: Of the accumulators.
        block: The 64-pixel block.
        first: The first filter.

    Args:
        accumulators: The warpgroup's values.
        buffer: Where to.
        thread: Of the warpgroup.
    """
    comptime columns = ROW_BYTES // size_of[out_type]()
    var row = buffer + _swizzled_row(thread)
    comptime for c in range(columns // 16):
        var packed = SIMD[DType.uint32, 4](0)
        comptime for i in range(4):
            comptime r = (first // 8 + 2 * c) * 4 + 2 * i
            var pair = SIMD[DType.float32, 2](
                accumulators.values[block][r], accumulators.values[block][r + 1]
            ).cast[out_type]()
            packed[i] = bitcast[DType.uint32, 1](pair)
        # 16 columns are two chunks: the swizzle's exclusive or moves them.
        _store_matrices(row ^ UInt32(c * 32), packed)


@always_inline
def store_accumulators[
    config: Sm90Config, out_type: DType
](
    ref map: TensorMap,
    output: Writes[out_type],
    accumulators: Accumulators[config.consumer_pixels(), config.tile_n],
    buffers: SharedAddress,
    geometry: TileGeometry,
    tile: Tile,
    consumer: UInt32,
    thread: UInt32,
):
    """Stores a consumer's part of a tile; what lies beyond the output is
    dropped.

    Parameters:
        config: The configuration.
        out_type: Of the output.

    Args:
        map: The output's descriptor.
        output: The output.
        accumulators: The consumer's values, settled.
        buffers: The consumer's `output_stages` buffers.
        geometry: The problem.
        tile: The tile; its `pixel` is the consumer's first.
        consumer: Which consumer.
        thread: Of the warpgroup.
    """
    comptime columns = ROW_BYTES // size_of[out_type]()
    comptime parts = config.tile_n // columns
    comptime blocks = config.consumer_pixels() // MMA_M
    var name = Int(consumer) + FIRST_NAME
    comptime for block in range(blocks):
        var rows = RowStore[out_type](
            geometry, tile.pixel + UInt32(block * MMA_M), thread
        )
        comptime for part in range(parts):
            comptime stage = (block * parts + part) % config.output_stages
            var buffer = buffers + UInt32(stage * config.output_stage_bytes())
            var pixel = tile.pixel + UInt32(block * MMA_M)
            var filter = tile.filter + UInt32(part * columns)
            _await_buffer[config](name, thread)
            write_fragment[out_type, block=block, first = part * columns](
                accumulators, buffer, thread
            )
            comptime if config.engine_store:
                publish_to_engine()
            sync_threads[WARPGROUP](name)
            comptime if config.engine_store:
                if thread == 0:
                    _store_buffer[config](map, buffer, geometry, pixel, filter)
            else:
                rows.store(output, buffer, filter, geometry.filters)


@always_inline
def _await_buffer[config: Sm90Config](name: Int, thread: UInt32):
    """Waits until the next buffer has been stored. Threads that store rows
    meet once a buffer anyway: with two buffers, nobody reads the older."""
    comptime if config.engine_store:
        if thread == 0:
            wait_stores_read[config.output_stages - 1]()
        sync_threads[WARPGROUP](name)
    elif config.output_stages == 1:
        sync_threads[WARPGROUP](name)


@always_inline
def _store_buffer[
    config: Sm90Config
](
    ref map: TensorMap,
    buffer: SharedAddress,
    geometry: TileGeometry,
    pixel: UInt32,
    filter: UInt32,
):
    """Has the copy engine store a buffer."""
    comptime if config.halo > 0:
        var at = geometry.pixel(pixel)
        # The engine takes no walk that starts behind the last image.
        if UInt32(at.image) < geometry.images:
            store_pixels[4](
                map,
                buffer,
                IndexList[4](Int(filter), Int(at.w), Int(at.h), Int(at.image)),
            )
    else:
        store_tile[2](map, buffer, IndexList[2](Int(filter), Int(pixel)))
    commit_stores()


struct RowStore[out_type: DType](TrivialRegisterPassable):
    """Which pixels of a 64-pixel block a thread stores, and where: 8 threads
    share a row of a buffer.

    Parameters:
        out_type: Of the output.
    """

    comptime width = 16 // size_of[Self.out_type]()
    comptime chunks = ROW_BYTES // 16
    comptime rows = WARPGROUP // Self.chunks
    comptime steps = MMA_M // Self.rows

    var offsets: StaticTuple[Int, Self.steps]
    """Of each of the thread's pixels in the output; negative if it has none."""
    var source: SharedAddress
    """The thread's part of its first row, counted from the buffer."""
    var column: UInt32
    """The thread's first column of the buffer."""

    @always_inline
    def __init__(
        out self, geometry: TileGeometry, pixel: UInt32, thread: UInt32
    ):
        """Finds the thread's pixels.

        Args:
            geometry: The problem.
            pixel: The block's first pixel.
            thread: Of the warpgroup.
        """
        var row, chunk = divmod(thread, UInt32(Self.chunks))
        self.column = chunk * UInt32(Self.width)
        self.source = row * ROW_BYTES + (chunk ^ (row % 8)) * 16
        self.offsets = StaticTuple[Int, Self.steps](fill=-1)
        comptime for i in range(Self.steps):
            var at = geometry.pixel(pixel + row + UInt32(i * Self.rows))
            if geometry.is_output(at):
                self.offsets[i] = geometry.output_offset(at)

    @always_inline
    def store(
        self,
        output: Writes[Self.out_type],
        buffer: SharedAddress,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores the thread's part of a buffer.

        Args:
            output: The output.
            buffer: The buffer.
            filter: The filter of its first column.
            filters: Of the problem.
        """
        var first = filter + self.column
        comptime for i in range(Self.steps):
            var values = load_shared[Self.out_type, Self.width](
                buffer + self.source + UInt32(i * Self.rows * ROW_BYTES)
            )
            if self.offsets[i] >= 0 and first < filters:
                output.unsafe_store[alignment=16](
                    self.offsets[i] + Int(first), values
                )
