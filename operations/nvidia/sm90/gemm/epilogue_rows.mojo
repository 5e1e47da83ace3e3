"""Stores of output buffers by the consumer's threads, row by row: where the
TMA cannot, or where the graph compiler fused something behind the
rounding.

Each warp stores what it has written itself, so that no warp waits for another;
or all threads of the consumer wait for each other, and each warp stores whole
rows, in fewer requests to memory.
"""

from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ...epilogue.layout import VisitLayout
from ...im2col.tiles import OutputShape, TileGeometry
from ...limits import WARP
from ...pipeline.chunks import CHUNK_BYTES, load_chunk, swizzled_chunk
from ...pipeline.device_memory import store_if
from ...tma.copy import SharedAddress
from .epilogue_config import (
    CONSUMER_WARPS,
    MATRIX_ROWS,
    ROW_BYTES,
    ROW_FILTERS,
    panel_filters,
    panels,
)

comptime CHUNKS = ROW_BYTES // 16
"""Pieces of 16 bytes of a buffer's row."""


struct RowStore[
    Output: OutputTarget,
    layout: VisitLayout,
    whole: Bool = False,
    roomy: Bool = False,
](TrivialRegisterPassable):
    """Which pixels of an output buffer a thread stores: of those that its warp
    holds, or whole rows.

    Parameters:
        Output: The output.
        layout: How a consumer's values are cut up.
        whole: Whether warps share the buffer out by its rows. All have written
            it.
        roomy: Whether threads have registers left for a second way.
    """

    comptime dtype = Self.Output.dtype
    comptime fused = Self.Output.computes or Self.Output.stores
    comptime width = 16 // size_of[Self.dtype]()
    comptime Chunk = SIMD[Self.dtype, Self.width]
    comptime strips = (
        Self.layout.thread_filters == ROW_FILTERS and not Self.whole
    )
    """Whether a warp has some filters of all pixels."""
    comptime chunks = MATRIX_ROWS // Self.width if Self.strips else CHUNKS
    """Pieces of a row that are a warp's."""
    comptime rows = WARP // Self.chunks
    """That a warp stores at a time."""
    comptime warp_rows = (
        Self.layout.pixels if Self.strips else Self.layout.pixels
        // CONSUMER_WARPS
    )
    comptime steps = Self.warp_rows // Self.rows
    comptime many = Self.whole and Self.roomy and Self.steps > 2
    """Whether the thread stores so many whole rows that it pays to ask whether
    they lie in one row of the output, and not to wait for their stores."""
    comptime held = 1 if Self.strips else panels[Self.dtype]()
    """Panels that the thread has a part of."""
    comptime Chunks = StaticTuple[Self.Chunk, Self.steps]
    """What the thread stores of a panel."""

    var first: UInt32
    """The warp's first row."""
    var row: UInt32
    """The thread's first."""
    var panel: UInt32
    """Of the buffer, where the warp has but one."""
    var chunk: UInt32
    """Of the panel's rows."""

    @always_inline
    def __init__(out self, warp: UInt32, lane: UInt32):
        """A thread's part.

        Args:
            warp: The thread's, of its consumer.
            lane: The thread's, of its warp.
        """
        var index, chunk = divmod(lane, UInt32(Self.chunks))
        # Eight threads at a time read eight pieces that no two rows' swizzles
        # put into the same banks.
        comptime spread = CHUNKS // Self.chunks
        self.row = (
            index % UInt32(spread) * UInt32(Self.chunks)
            + index // UInt32(spread) % UInt32(Self.chunks)
            + index // CHUNKS * CHUNKS
        )
        self.first = 0
        self.panel = 0
        self.chunk = chunk
        comptime if Self.strips:
            comptime filters = UInt32(panel_filters[Self.dtype]())
            var panel, filter = divmod(warp * MATRIX_ROWS, filters)
            self.panel = panel
            self.chunk += filter // UInt32(Self.width)
        else:
            self.first = warp * UInt32(Self.warp_rows)
            self.row += self.first

    @always_inline
    def load[panel: Int](self, buffer: SharedAddress) -> Self.Chunks:
        """Reads what the thread stores of a panel.

        Parameters:
            panel: Which of the thread's `held`.

        Args:
            buffer: The sub-tile, which every thread that it is shared out to
                has written.
        """
        var rows = buffer + (self.panel + UInt32(panel)) * UInt32(
            Self.layout.pixels * ROW_BYTES
        )
        var chunks = Self.Chunks()
        comptime for i in range(Self.steps):
            var row = self.row + UInt32(i * Self.rows)
            chunks[i] = load_chunk[Self.dtype](
                rows
                + row * ROW_BYTES
                + swizzled_chunk[ROW_BYTES](row, self.chunk) * CHUNK_BYTES
            )
        return chunks

    @always_inline
    def store[
        panel: Int
    ](
        self,
        output: Self.Output,
        shape: OutputShape,
        geometry: TileGeometry,
        chunks: Self.Chunks,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores what `load` has read; what lies beyond the output is dropped.

        Parameters:
            panel: Which of the thread's `held`.

        Args:
            output: The output.
            shape: Its shape.
            geometry: The problem.
            chunks: What `load` returned.
            pixel: The buffer's first pixel.
            filter: The filter of its first column.
            filters: One beyond the last filter to store.
        """
        var column = (
            filter
            + (self.panel + UInt32(panel)) * UInt32(panel_filters[Self.dtype]())
            + self.chunk * UInt32(Self.width)
        )
        comptime if Self.fused:
            comptime for i in range(Self.steps):
                var at = geometry.pixel(
                    pixel + self.row + UInt32(i * Self.rows)
                )
                if geometry.is_output(at) and column < filters:
                    var row = geometry.output_row(at)
                    var n, index = shape.index(row)
                    var offset = Int(row) * Int(geometry.filters) + Int(column)
                    output.store[Self.width](
                        n, index, Int(column), offset, chunks[i]
                    )
        else:
            comptime element = size_of[Self.dtype]()
            var start = UInt64(Int(output.data())) + UInt64(column) * UInt64(
                element
            )
            comptime if Self.many:
                var first = geometry.pixel(pixel + self.first)
                if (
                    first.w + UInt32(Self.warp_rows) <= geometry.columns
                    and first.row < geometry.rows
                ):
                    # Neighbours in the output: one look-up serves all.
                    var row = geometry.output_row(first) + self.row - self.first
                    var row_bytes = geometry.filters * UInt32(element)
                    var to = start + UInt64(row) * UInt64(row_bytes)
                    comptime for i in range(Self.steps):
                        store_if(to, chunks[i], column < filters)
                        to += UInt64(row_bytes * UInt32(Self.rows))
                    return
            comptime for i in range(Self.steps):
                var at = geometry.pixel(
                    pixel + self.row + UInt32(i * Self.rows)
                )
                var row = geometry.output_row(at)
                var elements = UInt64(row) * UInt64(geometry.filters)
                store_if(
                    start + elements * UInt64(element),
                    chunks[i],
                    geometry.is_output(at) and column < filters,
                )
