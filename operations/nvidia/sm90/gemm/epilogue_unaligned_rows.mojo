"""Stores of output buffers whose pixels begin at any element of memory: those
of the output are no multiple of 16 bytes.

Each pixel of a buffer goes to another distance from a multiple of 16. A lane
takes two neighbouring chunks, shifts them by that distance and stores 16
aligned bytes. What is left in front of the first such piece and behind the last
is stored element by element, an element a lane.
"""

from std.sys import llvm_intrinsic
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of

from ....conv.access import OutputTarget
from ...im2col.tiles import TileGeometry
from ...limits import WARP
from ...pipeline.chunks import (
    CHUNK_BYTES,
    load_chunk,
    shared_pointer,
    swizzled,
)
from ...tma.copy import SharedAddress
from .epilogue_config import (
    CONSUMER_WARPS,
    HALF_BYTES,
    ROW_BYTES,
    SUBTILE_FILTERS,
)
from .epilogue_rows import CHUNKS, store_if

comptime Words = SIMD[DType.uint32, CHUNK_BYTES // size_of[DType.uint32]()]
"""A chunk."""


@always_inline
def _window(first: Words, second: Words, offset: UInt32) -> Words:
    """16 bytes of two chunks side by side.

    Args:
        first: A chunk.
        second: The one behind it.
        offset: Of the bytes: 0, 2, .. 14.
    """
    # Each step keeps the words that the next one reads: an index that is known
    # at run time only would put them into local memory.
    var words = first.join(second)
    var by_pairs = SIMD[DType.uint32, 8](0)
    comptime for i in range(6):
        by_pairs[i] = words[i + 2] if offset & 8 != 0 else words[i]
    var by_words = SIMD[DType.uint32, 8](0)
    comptime for i in range(5):
        by_words[i] = by_pairs[i + 1] if offset & 4 != 0 else by_pairs[i]
    var result = Words(0)
    comptime for i in range(4):
        result[i] = llvm_intrinsic["llvm.fshr.i32", UInt32](
            by_words[i + 1], by_words[i], offset % 4 * 8
        )
    return result


@always_inline
def _store_half_if(address: UInt64, value: UInt16, condition: Bool):
    """Stores 2 bytes to device memory, or not, without a branch."""
    inlined_assembly[
        """{
        .reg .pred stored;
        setp.ne.u32 stored, $2, 0;
        @stored st.global.b16 [$0], $1;
        }""",
        NoneType,
        constraints="l,h,r,~{memory}",
    ](address, value, UInt32(condition))


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
        var bytes = min(filters - filter, UInt32(SUBTILE_FILTERS)) * HALF_BYTES
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
        var at = geometry.pixel(pixel + row)
        var index = UInt64(geometry.output_row(at))
        var to = start + index * UInt64(geometry.filters * HALF_BYTES)
        var end = bytes if geometry.is_output(at) else 0
        # In front of the first piece, and in pieces.
        var head = -UInt32(to) % CHUNK_BYTES
        var body = (max(end, head) - head) // CHUNK_BYTES * CHUNK_BYTES
        var piece = self.lane * CHUNK_BYTES
        store_if[DType.uint32](
            to + UInt64(head + piece),
            _window(
                self._chunk(buffer, row, 0), self._chunk(buffer, row, 1), head
            ),
            piece < body,
        )
        var part = self.lane * HALF_BYTES
        _store_half_if(
            to + UInt64(part),
            self._half(buffer, row, part),
            part < min(head, end),
        )
        var tail = head + body + part
        _store_half_if(
            to + UInt64(tail), self._half(buffer, row, tail), tail < end
        )
