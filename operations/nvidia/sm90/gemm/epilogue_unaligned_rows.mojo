"""Loads and stores of buffers whose pixels begin at any element of memory: those
of residual and output are no multiple of 16 bytes, and TMA takes no others.

Each pixel of a buffer goes to another distance from a multiple of 16. A lane
takes two neighbouring chunks, shifts them by that distance and stores 16
aligned bytes. What is left in front of the first such piece and behind the last
is stored element by element, an element a lane.

A residual comes the other way round: the loader's warp copies the aligned
chunks that a pixel touches, without waiting for one after the other; then a
lane shifts two of them to one of the buffer's row, in place.
"""

from std.sys.info import size_of

from ....conv.access import OutputTarget
from ....conv.memory import Reads
from ...run_time import run_time
from ...im2col.tiles import TileGeometry
from ...limits import WARP
from ...pipeline.async_copy import await_copies, close_copies, copy_part
from ...pipeline.barrier import sync_warp
from ...pipeline.chunks import (
    CHUNK_BYTES,
    Words,
    chunk_within,
    load_chunk,
    shared_pointer,
    store_chunk,
    swizzled,
)
from ...pipeline.device_memory import store_half_if, store_if
from ...tma.copy import SharedAddress
from .epilogue_config import (
    CONSUMER_WARPS,
    HALF_BYTES,
    ROW_BYTES,
    SUBTILE_FILTERS,
)
from .epilogue_rows import CHUNKS


@always_inline
def is_unaligned[dtype: DType](geometry: TileGeometry) -> Bool:
    """Whether pixels of residual and output are no multiple of 16 bytes.

    Parameters:
        dtype: Of an element.

    Args:
        geometry: The problem.
    """
    return geometry.group_filters % UInt32(CHUNK_BYTES // size_of[dtype]()) != 0


@fieldwise_init
struct UnalignedPixel(TrivialRegisterPassable):
    """Where in memory a buffer's filters of one pixel lie."""

    var address: UInt64
    """Of the first, whether the pixel is one of the output or not."""
    var bytes: UInt32
    """Of those that there are; of a pixel beyond the output, 0."""

    @staticmethod
    @always_inline
    def of(
        start: UInt64, geometry: TileGeometry, pixel: UInt32, bytes: UInt32
    ) -> Self:
        """Finds them.

        Args:
            start: The address of the buffer's first filter in the tensor's
                first pixel.
            geometry: The problem.
            pixel: Counted along the traversal.
            bytes: Of a pixel of the tensor, from the buffer's first filter on.
        """
        var at = geometry.pixel(pixel)
        var index = UInt64(geometry.output_row(at))
        return Self(
            start + index * UInt64(geometry.filters * HALF_BYTES),
            bytes if geometry.is_output(at) else 0,
        )


@always_inline
def _filter_bytes(filter: UInt32, filters: UInt32) -> UInt32:
    """Bytes of a buffer's filters of one pixel.

    Args:
        filter: The first.
        filters: One beyond the last that there is.
    """
    var count = max(filters, filter) - filter
    return min(count, UInt32(SUBTILE_FILTERS)) * HALF_BYTES


struct UnalignedRowLoad[dtype: DType, pixels: Int](TrivialRegisterPassable):
    """Which part of a residual's buffer a lane of the loader's warp fills: a
    chunk of every fourth pixel. It has few registers, and goes from one to the
    next.

    Parameters:
        dtype: Of the residual, of 16 bits.
        pixels: Of a buffer.
    """

    comptime rows = WARP // CHUNKS
    """Pixels that the warp moves at a time."""
    comptime steps = Self.pixels // Self.rows

    var row: UInt32
    """The lane's first pixel."""
    var chunk: UInt32
    """Of the pixel's row."""

    @always_inline
    def __init__(out self, lane: UInt32):
        """A lane's part.

        Args:
            lane: Of the loader's warp.
        """
        comptime assert size_of[Self.dtype]() == HALF_BYTES
        self.row, self.chunk = divmod(lane, UInt32(CHUNKS))

    @always_inline
    def fill(
        self,
        residual: Reads[Self.dtype],
        geometry: TileGeometry,
        buffer: SharedAddress,
        ends: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """Fills a buffer with the residual of a sub-tile, and zeros beyond the
        output. The warp's lanes together; all see the buffer afterwards.

        Args:
            residual: The residual, at a multiple of 16 bytes.
            geometry: The problem.
            buffer: The buffer, which nobody else uses.
            ends: A chunk for each pixel, of the warp's own.
            pixel: The sub-tile's first pixel.
            filter: The filter of its first column.
            filters: One beyond the last filter that there is.
        """
        var start = UInt64(Int(residual)) + UInt64(filter * HALF_BYTES)
        self._copy(
            start,
            geometry,
            buffer,
            ends,
            pixel + self.row,
            _filter_bytes(filter, filters),
        )
        self._shift(start, geometry, buffer, ends, pixel + self.row)
        sync_warp()

    @staticmethod
    @always_inline
    def _next(address: SharedAddress) -> SharedAddress:
        """The same chunk of the lane's next pixel: half of the swizzle's pattern
        of 8 rows further, every row's bit is the other one.

        Args:
            address: Of a chunk.
        """
        comptime assert Self.rows == 4
        return (address + UInt32(Self.rows * ROW_BYTES)) ^ UInt32(
            Self.rows * CHUNK_BYTES
        )

    @always_inline
    def _copy(
        self,
        start: UInt64,
        geometry: TileGeometry,
        buffer: SharedAddress,
        ends: SharedAddress,
        first: UInt32,
        bytes: UInt32,
    ):
        """Starts copying the chunks that pixels touch: as many as a row has to
        the row, one more to `ends`. Each step is a group of copies.

        Args:
            start: The address of the buffer's first filter in the residual's
                first pixel.
            geometry: The problem.
            buffer: The buffer.
            ends: As for `fill`.
            first: The lane's first pixel.
            bytes: Of a pixel.
        """
        var offset = self.chunk * CHUNK_BYTES
        var to = buffer + swizzled[ROW_BYTES](self.row, self.chunk)
        var end_to = ends + self.row * CHUNK_BYTES
        var pixel = first
        for _ in range(run_time(Self.steps)):
            var at = UnalignedPixel.of(start, geometry, pixel, bytes)
            var head = UInt32(at.address) % CHUNK_BYTES
            # Counted from the chunk that the pixel begins in.
            var end = head + at.bytes if at.bytes > 0 else 0
            var chunks = at.address - UInt64(head)
            copy_part(
                to,
                chunks + UInt64(offset),
                min(max(end, offset) - offset, CHUNK_BYTES),
            )
            if self.chunk == 0:
                copy_part(
                    end_to,
                    chunks + UInt64(ROW_BYTES),
                    max(end, UInt32(ROW_BYTES)) - UInt32(ROW_BYTES),
                )
            close_copies()
            to = Self._next(to)
            end_to += UInt32(Self.rows * CHUNK_BYTES)
            pixel += UInt32(Self.rows)

    @always_inline
    def _shift(
        self,
        start: UInt64,
        geometry: TileGeometry,
        buffer: SharedAddress,
        ends: SharedAddress,
        first: UInt32,
    ):
        """Moves the filters of each pixel to the beginning of its row, once
        they have come: the first half while the second is on its way.

        Args:
            start: The address of the buffer's first filter in the residual's
                first pixel.
            geometry: The problem.
            buffer: The buffer.
            ends: As for `fill`.
            first: The lane's first pixel.
        """
        var last = self.chunk == UInt32(CHUNKS - 1)
        var to = buffer + swizzled[ROW_BYTES](self.row, self.chunk)
        var second = buffer + swizzled[ROW_BYTES](self.row, self.chunk + 1)
        if last:
            second = ends + self.row * CHUNK_BYTES
        var pixel = first
        for step in range(run_time(Self.steps)):
            if step == 0:
                await_copies[Self.steps // 2]()
                sync_warp()
            elif step == UInt32(Self.steps // 2):
                await_copies[0]()
                sync_warp()
            var at = UnalignedPixel.of(start, geometry, pixel, 0)
            var shifted = chunk_within(
                load_chunk[DType.uint32](to),
                load_chunk[DType.uint32](second),
                UInt32(at.address) % CHUNK_BYTES,
            )
            # A lane overwrites what its neighbour has read.
            sync_warp()
            store_chunk(to, shifted)
            to = Self._next(to)
            second = second + UInt32(
                Self.rows * CHUNK_BYTES
            ) if last else Self._next(second)
            pixel += UInt32(Self.rows)


struct UnalignedRowStore[Output: OutputTarget, pixels: Int](
    TrivialRegisterPassable
):
    """Which pixels of an output buffer a thread stores, and which part of each.
    All threads of the consumer have written the buffer.

    Parameters:
        Output: The output, of a 16-bit type, behind which nothing is fused.
        pixels: Of a buffer.
    """

    comptime lanes = CHUNKS
    """That store a pixel: more than there are elements between two pieces."""
    comptime rows = WARP // Self.lanes
    """Pixels that a warp stores at a time."""
    comptime warp_rows = Self.pixels // CONSUMER_WARPS

    var row: UInt32
    """The thread's first pixel."""
    var lane: UInt32
    """The thread's, of its pixel."""

    @always_inline
    def __init__(out self, warp: UInt32, lane: UInt32):
        """A thread's part.

        Args:
            warp: The thread's, of its consumer.
            lane: The thread's, of its warp.
        """
        comptime assert size_of[Self.Output.dtype]() == HALF_BYTES
        var row, part = divmod(lane, UInt32(Self.lanes))
        self.row = warp * UInt32(Self.warp_rows) + row
        self.lane = part

    @always_inline
    def _chunk(
        self, buffer: SharedAddress, row: UInt32, later: UInt32
    ) -> Words:
        """A chunk of a buffer.

        Args:
            buffer: The buffer.
            row: The pixel.
            later: How far behind the lane's own; the first follows the last.
        """
        var chunk = (self.lane + later) % UInt32(Self.lanes)
        return load_chunk[DType.uint32](
            buffer + swizzled[ROW_BYTES](row, chunk)
        )

    @staticmethod
    @always_inline
    def _half(buffer: SharedAddress, row: UInt32, offset: UInt32) -> UInt16:
        """An element of a buffer.

        Args:
            buffer: The buffer.
            row: The pixel.
            offset: In bytes; beyond the pixel's last it begins anew.
        """
        var chunk, byte = divmod(
            offset % UInt32(ROW_BYTES), UInt32(CHUNK_BYTES)
        )
        return shared_pointer[DType.uint16](
            buffer + swizzled[ROW_BYTES](row, chunk) + byte
        ).unsafe_load(0)

    @always_inline
    def store(
        self,
        output: Self.Output,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores the thread's part of a buffer; what lies beyond the output is
        dropped.

        Args:
            output: The output.
            geometry: The problem.
            buffer: The buffer.
            pixel: Its first pixel.
            filter: The filter of its first column.
            filters: One beyond the last filter to store.
        """
        if filter >= filters:
            return
        var start = UInt64(Int(output.data())) + UInt64(filter * HALF_BYTES)
        var bytes = _filter_bytes(filter, filters)
        # Unrolled, a step takes 60 instructions, in a loop 87: no swizzle is
        # computed anew.
        comptime for i in range(Self.warp_rows // Self.rows):
            self._store_row(
                start,
                geometry,
                buffer,
                pixel,
                self.row + UInt32(i * Self.rows),
                bytes,
            )

    @always_inline
    def _store_row(
        self,
        start: UInt64,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        row: UInt32,
        bytes: UInt32,
    ):
        """Stores the thread's part of one pixel.

        Args:
            start: The address of the buffer's first filter in the output's
                first pixel.
            geometry: The problem.
            buffer: The buffer.
            pixel: Its first pixel.
            row: The pixel, counted from it.
            bytes: Of the pixel, from the buffer's first filter on.
        """
        var at = UnalignedPixel.of(start, geometry, pixel + row, bytes)
        var to = at.address
        var end = at.bytes
        # In front of the first piece, and in pieces.
        var head = -UInt32(to) % CHUNK_BYTES
        var body = (max(end, head) - head) // CHUNK_BYTES * CHUNK_BYTES
        var piece = self.lane * CHUNK_BYTES
        store_if[DType.uint32](
            to + UInt64(head + piece),
            chunk_within(
                self._chunk(buffer, row, 0), self._chunk(buffer, row, 1), head
            ),
            piece < body,
        )
        var part = self.lane * HALF_BYTES
        store_half_if(
            to + UInt64(part),
            self._half(buffer, row, part),
            part < min(head, end),
        )
        var tail = head + body + part
        store_half_if(
            to + UInt64(tail), self._half(buffer, row, tail), tail < end
        )
