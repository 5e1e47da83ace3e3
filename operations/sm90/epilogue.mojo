"""The epilogue: accumulators -> registers of the output's type -> shared
memory -> output, a buffer of 128 bytes of some pixels at a time."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..pipeline.barrier import sync_threads
from ..conv.memory import Writes
from ..tma.copy import (
    SharedAddress,
    commit_stores,
    publish_to_engine,
    store_tile,
    wait_stores_read,
)
from ..tma.descriptor import TensorMap
from .config import MMA_M, Sm90Config, WARPGROUP
from .mma import Accumulators
from .scheduler import Tile, TileGeometry
from .walk import ROW_BYTES

comptime FIRST_NAME = 1
"""The named barrier of the first consumer's epilogue; the others follow."""


@always_inline
def _load_chunk[
    dtype: DType, width: Int
](address: SharedAddress) -> SIMD[dtype, width]:
    """Reads 16 bytes of shared memory at a multiple of 16."""
    comptime assert width * size_of[dtype]() == 16
    var data = Pointer[
        Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ](unsafe_from_address=Int(address))
    return data.unsafe_load[width=width, alignment=16](0)


@always_inline
def _store_matrices[
    transpose: Bool
](address: SharedAddress, values: SIMD[DType.uint32, 4]):
    """Stores four 8x8 matrices of 16-bit elements; lane l gives the address of
    row (transposed: column) l % 8 of matrix l / 8."""
    comptime name = String(
        "stmatrix.sync.aligned.m8n8.x4",
        ".trans" if transpose else "",
        ".shared.b16 [$0], {$1, $2, $3, $4};",
    )
    inlined_assembly[name, NoneType, constraints="r,r,r,r,r,~{memory}"](
        address, values[0], values[1], values[2], values[3]
    )


@always_inline
def _pack[
    out_type: DType, rows: Int, columns: Int, block: Int, column: Int
](accumulators: Accumulators[rows, columns]) -> SIMD[DType.uint32, 4]:
    """A warp's 16 rows by 16 columns of the accumulators, rounded: four 8x8
    matrices, rows first."""
    var packed = SIMD[DType.uint32, 4](0)
    comptime for i in range(4):
        comptime r = column // 2 + 2 * i
        var pair = SIMD[DType.float32, 2](
            accumulators.values[block][r], accumulators.values[block][r + 1]
        ).cast[out_type]()
        packed[i] = bitcast[DType.uint32, 1](pair)
    return packed


@always_inline
def write_buffer[
    config: Sm90Config, out_type: DType, pixel: Int, filter: Int
](
    accumulators: Accumulators[config.mma_rows(), config.mma_columns()],
    buffer: SharedAddress,
    thread: UInt32,
):
    """Rounds `store_pixels` by `ROW_BYTES` of the accumulators, and writes
    them to an output buffer: a row a pixel, swizzled.

    Parameters:
        config: The configuration.
        out_type: Of the output, 16 bits.
        pixel: The first pixel.
        filter: The first filter.

    Args:
        accumulators: The warpgroup's values.
        buffer: Where to.
        thread: Of the warpgroup.
    """
    comptime filters = ROW_BYTES // size_of[out_type]()
    var warp, lane = divmod(thread, UInt32(32))
    comptime if config.swapped:
        # A warp holds 16 filters, two chunks of every row.
        var row = (lane // 16) * 8 + lane % 8
        var chunk = warp * 2 + (lane // 8) % 2
        var to = buffer + row * ROW_BYTES + (chunk ^ (row % 8)) * 16
        comptime for c in range(config.store_pixels() // 16):
            _store_matrices[True](
                to + UInt32(c * 16 * ROW_BYTES),
                _pack[out_type, block=filter // MMA_M, column=pixel + c * 16](
                    accumulators
                ),
            )
    else:
        # A warp holds 16 pixels; the swizzle moves pairs of chunks together.
        var row = warp * 16 + lane % 16
        var chunk = lane // 16
        var to = buffer + row * ROW_BYTES + (chunk ^ (row % 8)) * 16
        comptime for c in range(filters // 16):
            _store_matrices[False](
                to ^ UInt32(c * 32),
                _pack[out_type, block=pixel // MMA_M, column=filter + c * 16](
                    accumulators
                ),
            )


@always_inline
def store_accumulators[
    config: Sm90Config, out_type: DType
](
    ref map: TensorMap,
    output: Writes[out_type],
    accumulators: Accumulators[config.mma_rows(), config.mma_columns()],
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
    comptime pixels = config.store_pixels()
    comptime parts = config.consumer_filters() // columns
    var name = Int(consumer) + FIRST_NAME
    comptime for block in range(config.consumer_pixels() // pixels):
        var pixel = tile.pixel + UInt32(block * pixels)
        var rows = RowStore[out_type, pixels](geometry, pixel, thread)
        comptime for part in range(parts):
            comptime stage = (block * parts + part) % config.output_stages
            var buffer = buffers + UInt32(stage * config.output_stage_bytes())
            var filter = tile.filter + UInt32(part * columns)
            _await_buffer[config](name, thread)
            write_buffer[
                config,
                out_type,
                pixel=block * pixels,
                filter=part * columns,
            ](accumulators, buffer, thread)
            comptime if config.engine_store:
                publish_to_engine()
            sync_threads[WARPGROUP](name)
            comptime if config.engine_store:
                if thread == 0:
                    store_tile[3](
                        map,
                        buffer,
                        IndexList[3](
                            Int(filter - tile.group * geometry.group_filters),
                            Int(pixel),
                            Int(tile.group),
                        ),
                    )
                    commit_stores()
            else:
                rows.store(output, buffer, filter, tile.filter_end(geometry))


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


struct RowStore[out_type: DType, pixels: Int](TrivialRegisterPassable):
    """Which pixels of an output buffer a thread stores, and where: 8 threads
    share a row.

    Parameters:
        out_type: Of the output.
        pixels: Of a buffer.
    """

    comptime width = 16 // size_of[Self.out_type]()
    comptime chunks = ROW_BYTES // 16
    comptime rows = WARPGROUP // Self.chunks
    comptime steps = Self.pixels // Self.rows

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
            pixel: The buffer's first pixel.
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
        filter_end: UInt32,
    ):
        """Stores the thread's part of a buffer.

        Args:
            output: The output.
            buffer: The buffer.
            filter: The filter of its first column.
            filter_end: The first filter that is not stored.
        """
        var first = filter + self.column
        comptime for i in range(Self.steps):
            var values = _load_chunk[Self.out_type, Self.width](
                buffer + self.source + UInt32(i * Self.rows * ROW_BYTES)
            )
            if self.offsets[i] >= 0 and first < filter_end:
                output.unsafe_store[alignment=16](
                    self.offsets[i] + Int(first), values
                )
