"""Stores of output buffers whose rows begin at any element of memory: pixels of
the output are no multiple of 16 bytes.

A row of 64 filters goes to an address that is a different distance from a
multiple of 16 in every pixel. Each lane shifts two neighbouring chunks of the
buffer by that distance and stores 16 aligned bytes. What is left in front of
the first and behind the last such piece is stored element by element, an
element a lane.
"""

from std.memory import bitcast
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
    ROW_BYTES,
    SUBTILE_FILTERS,
)
from .epilogue_rows import CHUNKS, store_if

comptime Words = SIMD[DType.uint32, 4]
"""A chunk."""


@always_inline
def window[element: Int](first: Words, second: Words, offset: UInt32) -> Words:
    """16 bytes of two chunks side by side.

    Parameters:
        element: Bytes of an element, 2 or 4.

    Args:
        first: A chunk.
        second: The one behind it.
        offset: Of the bytes, from 0 to 15, a multiple of `element`.
    """
    var words = first.join(second)
    # Only the words that the next step reads; none is indexed at run time.
    var pairs = SIMD[DType.uint32, 8](0)
    comptime for i in range(6):
        pairs[i] = words[i + 2] if offset & 8 != 0 else words[i]
    var singles = SIMD[DType.uint32, 8](0)
    comptime for i in range(5):
        singles[i] = pairs[i + 1] if offset & 4 != 0 else pairs[i]
    var result = Words(0)
    comptime for i in range(4):
        comptime if element == 4:
            result[i] = singles[i]
        else:
            result[i] = llvm_intrinsic["llvm.fshr.i32", UInt32](
                singles[i + 1], singles[i], offset % 4 * 8
            )
    return result


@always_inline
def _store_element_if[
    dtype: DType
](address: UInt64, value: Scalar[dtype], condition: Bool):
    """Stores an element to device memory, or not, without a branch."""
    comptime bits = 8 * size_of[dtype]()
    comptime register = "h" if bits == 16 else "r"
    comptime text = String(
        """{
        .reg .pred stored;
        setp.ne.u32 stored, $2, 0;
        @stored st.global.b""",
        bits,
        """ [$0], $1;
        }""",
    )
    comptime constraints = String("l,", register, ",r,~{memory}")
    inlined_assembly[text, NoneType, constraints=constraints](
        address,
        bitcast[DType.uint16 if bits == 16 else DType.uint32, 1](value),
        UInt32(condition),
    )


struct UnalignedRowStore[Output: OutputTarget, pixels: Int](
    TrivialRegisterPassable
):
    """Which pixels of an output buffer a thread stores, and which part of their
    rows. All threads of the consumer have written the buffer.

    Parameters:
        Output: The output, behind which nothing is fused.
        pixels: Of a buffer.
    """

    comptime dtype = Self.Output.dtype
    comptime element = size_of[Self.dtype]()
    comptime row_bytes = SUBTILE_FILTERS * Self.element
    """Of a pixel, over all panels."""
    comptime lanes = Self.row_bytes // CHUNK_BYTES
    """That store a pixel."""
    comptime rows = WARP // Self.lanes
    """That a warp stores at a time."""
    comptime warp_rows = Self.pixels // CONSUMER_WARPS
    comptime steps = Self.warp_rows // Self.rows

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
        var row, part = divmod(lane, UInt32(Self.lanes))
        self.row = warp * UInt32(Self.warp_rows) + row
        self.lane = part

    @staticmethod
    @always_inline
    def _chunk(row: UInt32, index: UInt32) -> UInt32:
        """The offset in a buffer of a chunk of a pixel.

        Args:
            row: The pixel.
            index: The chunk, over all panels.
        """
        var panel, chunk = divmod(index, UInt32(CHUNKS))
        return panel * UInt32(Self.pixels * ROW_BYTES) + swizzled[ROW_BYTES](
            row, chunk
        )

    @always_inline
    def _element(
        self, buffer: SharedAddress, row: UInt32, offset: UInt32
    ) -> Scalar[Self.dtype]:
        """An element of a buffer.

        Args:
            buffer: The buffer.
            row: The pixel.
            offset: In bytes, from the pixel's first.
        """
        var chunk, byte = divmod(offset, UInt32(CHUNK_BYTES))
        return shared_pointer[Self.dtype](
            buffer + Self._chunk(row, chunk) + byte
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
        comptime element = UInt32(Self.element)
        var count = min(filters - filter, UInt32(SUBTILE_FILTERS))
        var start = UInt64(Int(output.data())) + UInt64(filter * element)
        var next = (self.lane + 1) % UInt32(Self.lanes)
        comptime for i in range(Self.steps):
            var row = self.row + UInt32(i * Self.rows)
            var at = geometry.pixel(pixel + row)
            var index = UInt64(geometry.output_row(at))
            var to = start + index * UInt64(geometry.filters * element)
            var bytes = count * element if geometry.is_output(at) else 0
            # In front of the first aligned piece, and in whole ones.
            var head = -UInt32(to) % CHUNK_BYTES
            var body = (max(bytes, head) - head) // CHUNK_BYTES * CHUNK_BYTES
            var words = window[Self.element](
                bitcast[DType.uint32, 4](
                    load_chunk[Self.dtype](buffer + Self._chunk(row, self.lane))
                ),
                bitcast[DType.uint32, 4](
                    load_chunk[Self.dtype](buffer + Self._chunk(row, next))
                ),
                head,
            )
            var piece = self.lane * CHUNK_BYTES
            store_if[DType.uint32, 4](
                to + UInt64(head + piece), words, piece < body
            )
            # Fewer elements are left at each end than a pixel has lanes.
            var part = self.lane * element
            _store_element_if(
                to + UInt64(part),
                self._element(buffer, row, part),
                part < min(head, bytes),
            )
            var tail = head + body + part
            _store_element_if(
                to + UInt64(tail),
                self._element(buffer, row, tail % UInt32(Self.row_bytes)),
                tail < bytes,
            )
