"""Stores of output buffers behind which the graph compiler fused something.

That work loads its own operands, and what it stores may be one of them as far
as the compiler knows: no load moves in front of an earlier call's store. So
every call takes as many neighbouring filters as a thread has of a buffer, and
their loads are under way together. A warp has too few of one pixel: the
consumer's threads share the buffer out anew.
"""

from std.sys.info import size_of

from ....conv.access import OutputTarget
from ...run_time import run_time
from ...im2col.tiles import OutputShape, TileGeometry
from ...pipeline.chunks import CHUNK_BYTES, load_chunk, swizzled
from ...tma.copy import SharedAddress
from .epilogue_config import (
    CONSUMER_THREADS,
    ROW_BYTES,
    panel_filters,
    panels,
)


struct FusedStore[Output: OutputTarget, pixels: Int](TrivialRegisterPassable):
    """Which filters of which pixel of an output buffer a thread stores.

    Parameters:
        Output: The output.
        pixels: Of a buffer.
    """

    comptime dtype = Self.Output.dtype
    comptime chunk_filters = CHUNK_BYTES // size_of[Self.dtype]()
    comptime chunks = (
        Self.pixels
        * panels[Self.dtype]()
        * ROW_BYTES
        // (CONSUMER_THREADS * CHUNK_BYTES)
    )
    """Pieces of 16 bytes that a thread has, side by side."""
    comptime filters = Self.chunks * Self.chunk_filters
    """Filters that a thread has."""
    comptime threads_per_row = ROW_BYTES // (Self.chunks * CHUNK_BYTES)

    var panel: UInt32
    """The panel of the buffer."""
    var row: UInt32
    """The pixel."""
    var chunk: UInt32
    """The first piece of the panel's row."""

    @always_inline
    def __init__(out self, thread: UInt32):
        """A thread's part.

        Args:
            thread: Of the consumer.
        """
        var index, part = divmod(thread, UInt32(Self.threads_per_row))
        self.panel, self.row = divmod(index, UInt32(Self.pixels))
        self.chunk = part * UInt32(Self.chunks)

    @always_inline
    def _load(
        self, buffer: SharedAddress, index: UInt32
    ) -> SIMD[Self.dtype, Self.chunk_filters]:
        """A piece of the thread's part of a buffer."""
        return load_chunk[Self.dtype](
            buffer
            + self.panel * UInt32(Self.pixels * ROW_BYTES)
            + swizzled[ROW_BYTES](self.row, self.chunk + index)
        )

    @always_inline
    def store(
        self,
        output: Self.Output,
        shape: OutputShape,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores the thread's part of a buffer that all of the consumer's
        threads have written.

        Args:
            output: The output.
            shape: Its.
            geometry: The problem.
            buffer: The buffer.
            pixel: The buffer's first pixel.
            filter: The filter of its first column.
            filters: One beyond the last filter to store.
        """
        var at = geometry.pixel(pixel + self.row)
        if not geometry.is_output(at):
            return
        var column = (
            filter
            + self.panel * UInt32(panel_filters[Self.dtype]())
            + self.chunk * UInt32(Self.chunk_filters)
        )
        var row = geometry.output_row(at)
        var n, index = shape.index(row)
        var offset = Int(row) * Int(geometry.filters) + Int(column)
        if geometry.group_filters % UInt32(Self.filters) == 0:
            if column < filters:
                var values = SIMD[Self.dtype, Self.filters](0)
                comptime for i in range(Self.chunks):
                    values = values.insert[offset=i * Self.chunk_filters](
                        self._load(buffer, UInt32(i))
                    )
                output.store[Self.filters](
                    n, index, Int(column), offset, values
                )
            return
        # The thread's part ends beyond the last filter, or its first element
        # lies at no multiple of the part.
        for i in range(run_time(Self.chunks)):
            var first = i * UInt32(Self.chunk_filters)
            if column + first < filters:
                output.store[Self.chunk_filters](
                    n,
                    index,
                    Int(column + first),
                    offset + Int(first),
                    self._load(buffer, i),
                )
