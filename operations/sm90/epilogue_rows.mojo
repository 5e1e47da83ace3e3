"""Stores of output buffers by the consumer's threads, row by row: where the
copy engine cannot, or where the graph compiler fused something behind the
rounding.

Each warp stores what it has written itself, so that no warp waits for another;
or all threads of the consumer wait for each other, and each warp stores whole
rows, in fewer requests to memory.
"""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..conv.access import OutputTarget
from ..conv.problem import SPATIAL
from ..conv.tiles import OutputShape, TileGeometry
from ..pipeline.chunks import load_chunk
from ..tma.copy import SharedAddress
from .epilogue_config import CONSUMER_WARPS, ROW_BYTES
from .epilogue_fragment import (
    MATRIX_ROWS,
    Place,
    panel_filters,
    panels,
)

comptime WARP = 32
"""Threads of a warp."""

comptime CHUNKS = ROW_BYTES // 16
"""Pieces of 16 bytes of a buffer's row."""


@always_inline
def _store_if[
    dtype: DType, width: Int
](address: UInt64, values: SIMD[dtype, width], condition: Bool):
    """Stores 16 bytes to device memory, or not, without a branch."""
    var words = bitcast[DType.uint32, 4](values)
    inlined_assembly[
        """{
        .reg .pred stored;
        setp.ne.u32 stored, $5, 0;
        @stored st.global.v4.b32 [$0], {$1, $2, $3, $4};
        }""",
        NoneType,
        constraints="l,r,r,r,r,r,~{memory}",
    ](address, words[0], words[1], words[2], words[3], UInt32(condition))


struct RowStore[
    Output: OutputTarget, pixels: Int, swapped: Bool, whole: Bool = False
](TrivialRegisterPassable):
    """Which pixels of an output buffer a thread stores: of those that its warp
    holds, or whole rows.

    Parameters:
        Output: The output.
        pixels: Of a buffer.
        swapped: As in `Place`.
        whole: Whether warps share the buffer out by its rows. All have written
            it.
    """

    comptime dtype = Self.Output.dtype
    comptime fused = Self.Output.computes or Self.Output.stores
    comptime width = 16 // size_of[Self.dtype]()
    comptime Chunk = SIMD[Self.dtype, Self.width]
    comptime strips = Self.swapped and not Self.whole
    """Whether a warp has some filters of all pixels."""
    comptime chunks = MATRIX_ROWS // Self.width if Self.strips else CHUNKS
    """Pieces of a row that are a warp's."""
    comptime rows = WARP // Self.chunks
    """That a warp stores at a time."""
    comptime warp_rows = (
        Self.pixels if Self.strips else Self.pixels // CONSUMER_WARPS
    )
    comptime steps = Self.warp_rows // Self.rows

    var row: UInt32
    """The thread's first."""
    var panel: UInt32
    """Of the buffer, where the warp has but one."""
    var chunk: UInt32
    """Of the panel's rows."""

    @always_inline
    def __init__(out self, place: Place[Self.swapped]):
        """A thread's part.

        Args:
            place: The thread's.
        """
        var index, chunk = divmod(place.lane, UInt32(Self.chunks))
        # Eight threads at a time read eight pieces that no two rows' swizzles
        # put into the same banks.
        comptime spread = CHUNKS // Self.chunks
        self.row = (
            index % UInt32(spread) * UInt32(Self.chunks)
            + index // UInt32(spread) % UInt32(Self.chunks)
            + index // CHUNKS * CHUNKS
        )
        self.panel = 0
        self.chunk = chunk
        comptime if Self.strips:
            comptime filters = UInt32(panel_filters[Self.dtype]())
            var panel, filter = divmod(place.warp * MATRIX_ROWS, filters)
            self.panel = panel
            self.chunk += filter // UInt32(Self.width)
        else:
            self.row += place.warp * UInt32(Self.warp_rows)

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
        """Stores the thread's part of a buffer, neighbouring filters of one
        pixel at a time.

        Args:
            output: The output.
            shape: Its.
            geometry: The problem.
            buffer: The buffer.
            pixel: The buffer's first pixel.
            filter: The filter of its first column.
            filters: One beyond the last filter to store.
        """
        comptime if Self.strips:
            self._store_panel(
                self.panel,
                output,
                shape,
                geometry,
                buffer,
                pixel,
                filter,
                filters,
            )
        else:
            comptime for panel in range(panels[Self.dtype]()):
                self._store_panel(
                    UInt32(panel),
                    output,
                    shape,
                    geometry,
                    buffer,
                    pixel,
                    filter,
                    filters,
                )

    @always_inline
    def _store_panel(
        self,
        panel: UInt32,
        output: Self.Output,
        shape: OutputShape,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """`store`, of a panel."""
        var column = (
            filter
            + panel * UInt32(panel_filters[Self.dtype]())
            + self.chunk * UInt32(Self.width)
        )
        # All loads first: a store would wait for each.
        var chunks = StaticTuple[Self.Chunk, Self.steps]()
        comptime for i in range(Self.steps):
            var row = self.row + UInt32(i * Self.rows)
            chunks[i] = load_chunk[Self.dtype](
                buffer
                + (panel * UInt32(Self.pixels) + row) * ROW_BYTES
                + (self.chunk ^ (row % CHUNKS)) * 16
            )
        var start = UInt64(Int(output.data())) + UInt64(column) * UInt64(
            size_of[Self.dtype]()
        )
        comptime for i in range(Self.steps):
            var at = geometry.pixel(pixel + self.row + UInt32(i * Self.rows))
            var row = geometry.output_row(at)
            var stored = geometry.is_output(at) and column < filters
            comptime if Self.fused:
                if stored:
                    var n, index = shape.index(row)
                    var offset = Int(row) * Int(geometry.filters) + Int(column)
                    output.store[Self.width](
                        n, index, Int(column), offset, chunks[i]
                    )
            else:
                var elements = UInt64(row) * UInt64(geometry.filters)
                _store_if(
                    start + elements * UInt64(size_of[Self.dtype]()),
                    chunks[i],
                    stored,
                )
