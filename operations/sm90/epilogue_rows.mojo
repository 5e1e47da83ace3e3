"""Stores of output buffers by the consumer's threads, row by row: where the
copy engine cannot, or where the graph compiler fused something behind the
rounding."""

from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..conv.access import OutputTarget
from ..conv.problem import SPATIAL
from ..tma.copy import SharedAddress
from .config import WARPGROUP
from .epilogue_config import ROW_BYTES
from .epilogue_fragment import load_chunk, panel_filters, panels
from .epilogue_params import OutputShape
from .scheduler import TileGeometry


struct RowStore[Output: OutputTarget, pixels: Int](TrivialRegisterPassable):
    """Which pixels of an output buffer a thread stores, and where: 8 threads
    share a row.

    Parameters:
        Output: The output.
        pixels: Of a buffer.
    """

    comptime out_type = Self.Output.dtype
    comptime fused = Self.Output.computes or Self.Output.stores
    comptime width = 16 // size_of[Self.out_type]()
    comptime chunks = ROW_BYTES // 16
    comptime rows = WARPGROUP // Self.chunks
    comptime steps = Self.pixels // Self.rows

    comptime NOWHERE = UInt32.MAX

    var rows_at: StaticTuple[UInt32, Self.steps]
    """Of each of the thread's pixels in the output `[N*Z*P*Q, K]`, or
    `NOWHERE`."""
    var filters: UInt32
    """Of a row."""
    var source: SharedAddress
    """The thread's part of its first row, counted from the panel."""
    var column: UInt32
    """The thread's first column of a panel."""

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
        self.filters = geometry.filters
        self.column = chunk * UInt32(Self.width)
        self.source = row * ROW_BYTES + (chunk ^ (row % 8)) * 16
        self.rows_at = StaticTuple[UInt32, Self.steps](fill=Self.NOWHERE)
        comptime for i in range(Self.steps):
            var at = geometry.pixel(pixel + row + UInt32(i * Self.rows))
            if geometry.is_output(at):
                self.rows_at[i] = geometry.output_row(at)

    @always_inline
    def store(
        self,
        output: Self.Output,
        shape: OutputShape,
        buffer: SharedAddress,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores the thread's part of a buffer, neighbouring filters of one
        pixel at a time.

        Args:
            output: The output.
            shape: Its.
            buffer: The buffer.
            filter: The filter of its first column.
            filters: One beyond the last filter to store.
        """
        comptime for panel in range(panels[Self.out_type]()):
            var column = (
                filter
                + self.column
                + UInt32(panel * panel_filters[Self.out_type]())
            )
            comptime for i in range(Self.steps):
                var values = load_chunk[Self.out_type](
                    buffer
                    + self.source
                    + UInt32((panel * Self.pixels + i * Self.rows) * ROW_BYTES)
                )
                if self.rows_at[i] != Self.NOWHERE and column < filters:
                    var n = 0
                    var at = IndexList[SPATIAL](fill=0)
                    comptime if Self.fused:
                        n, at = shape.index(self.rows_at[i])
                    var offset = Int(self.rows_at[i]) * Int(self.filters)
                    output.store[Self.width](
                        n, at, Int(column), offset + Int(column), values
                    )
