"""The visitor that adds up each filter's values over all output pixels, and
their squares: what the statistics of batch normalization need.

Every consumer of the grid adds up its own tiles, in a row of the workspace that
it alone reads and writes; a second kernel adds up the rows. Every sum is thus
taken in one order, which depends on configuration, problem and number of
multiprocessors alone: launches agree bit by bit.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives.grid_controls import (
    wait_on_dependent_grids,
)
from max.gpu.primitives.warp import shuffle_xor, vote
from max.gpu.sync import barrier
from std.collections import Optional
from std.math import ceildiv

from ...epilogue.activations import keep_branch
from ....conv.memory import Reads, Writes
from ....conv.problem import ConvProblem
from ...stream import LaunchGrid, Stream
from .config import Sm90Config
from .epilogue_callbacks import (
    EpilogueVisitor,
    LaunchShape,
    Residual,
    Subtile,
    VisitLayout,
    Visited,
)
from .epilogue_config import CONSUMER_THREADS, SUBTILE_FILTERS
from .epilogue_fragment import MATRIX_ROWS, MATRIX_VALUES, Place
from .epilogue_visitor import ChannelState

comptime COLUMN_LANES = UInt32(4)
"""Threads that hold values of the same filters: neighbours in a warp."""

comptime ROWS_BLOCK = 32
"""Rows and columns of the workspace that a block adds up at a time."""


@fieldwise_init
struct SumState(TrivialRegisterPassable):
    """A thread's sums of its filters, two of each part; those of the sub-tile
    that is visited; and which pixels of it there are."""

    var sums: ChannelState
    var squares: ChannelState
    var new_sums: SIMD[DType.float32, 2]
    var new_squares: SIMD[DType.float32, 2]
    var low: UInt32
    """A bit for each of a sub-tile's first 32 pixels."""
    var high: UInt32
    """For the others."""


@fieldwise_init
struct ChannelSums[with_squares: Bool](EpilogueVisitor):
    """Adds up the values that it sees, in float32: `sums[k]`, and, if asked
    for, `squares[k]` of their squares, over all images and output pixels. The
    values of pixels go on unchanged; put `Rounded` in front for the sums of
    what is stored.

    Both are overwritten. Filters must be the multiply's rows.

    Parameters:
        with_squares: Whether squares are added up too.
    """

    comptime State = SumState
    comptime starts = True
    comptime KINDS = 2 if Self.with_squares else 1

    var sums: Writes[DType.float32]
    """`[K]` in device memory."""
    var squares: Writes[DType.float32]
    """As `sums`, if there are squares."""
    var rows: Writes[DType.float32]
    """The workspace, `[consumers of the grid, kinds, K]`."""
    var filters: UInt32
    """`K`."""

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "ChannelSums"

    # The host.

    def can_implement(
        self, config: Sm90Config, problem: ConvProblem
    ) -> Optional[String]:
        """See `EpilogueVisitor`."""
        if not config.swapped:
            return String(
                "sums over pixels need filters as the multiply's rows: each of"
                " a consumer's threads then has the same filters all the time"
            )
        return None

    def workspace(self, shape: LaunchShape) -> Int:
        """See `EpilogueVisitor`."""
        return shape.consumers() * Self.KINDS * shape.problem.filters

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        """See `EpilogueVisitor`."""
        return Self(
            self.sums, self.squares, workspace, UInt32(shape.problem.filters)
        )

    def conclude(self, mut queue: Stream, shape: LaunchShape) raises:
        """Adds up the consumers' rows."""
        comptime bytes = 4 * ROWS_BLOCK * ROWS_BLOCK
        queue.enqueue(
            queue.ctx.compile_function[add_rows](),
            LaunchGrid(
                ceildiv(Self.KINDS * shape.problem.filters, ROWS_BLOCK),
                ROWS_BLOCK * ROWS_BLOCK,
                shared_bytes=bytes,
                overlap=True,
            ),
            self.rows.as_imm(),
            self.sums,
            self.squares,
            UInt32(shape.consumers()),
            self.filters,
            UInt32(Self.KINDS),
        )

    # The consumer.

    @always_inline
    def _row[
        layout: VisitLayout
    ](self, at: Visited[layout]) -> Writes[DType.float32]:
        """The consumer's row of the workspace."""
        return self.rows.unsafe_offset(
            Int(at.consumer) * Self.KINDS * Int(self.filters)
        )

    @always_inline
    def start[layout: VisitLayout](self, at: Visited[layout]):
        """Clears the consumer's row."""
        var row = self._row(at)
        var count = UInt32(Self.KINDS) * self.filters
        for i in range(at.thread, count, UInt32(CONSUMER_THREADS)):
            row[unsafe_offset=Int(i)] = 0

    @always_inline
    def begin[layout: VisitLayout](self, at: Visited[layout]) -> Self.State:
        """Takes up the sums of the thread's filters where the consumer's last
        tile of them left off; of the threads that share them, the first
        does."""
        var state = Self.State(ChannelState(0), ChannelState(0), 0, 0, 0, 0)
        var row = self._row(at)
        comptime for i in range(2 * layout.parts):
            var filter = self._filter(at, i)
            if at.place.lane % COLUMN_LANES == 0 and filter < at.filter_end():
                state.sums[i] = row[unsafe_offset=Int(filter)]
                comptime if Self.with_squares:
                    state.squares[i] = row[
                        unsafe_offset=Int(self.filters + filter)
                    ]
        return state

    @staticmethod
    @always_inline
    def _filter[layout: VisitLayout](at: Visited[layout], index: Int) -> UInt32:
        """The filter of one of the thread's sums."""
        return (
            at.tile.filter
            + at.place.filter()
            + UInt32(index // 2 * SUBTILE_FILTERS + 8 * (index % 2))
        )

    @always_inline
    def previsit[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """Finds out which pixels of the sub-tile are output: each lane looks
        at one, or two."""
        state.new_sums = 0
        state.new_squares = 0
        var pixel = at.pixel(subtile) + at.place.lane
        var geometry = at.geometry
        state.low = vote[DType.uint32](
            geometry.is_output(geometry.pixel(pixel))
        )
        state.high = UInt32.MAX
        comptime if layout.pixels > 32:
            state.high = vote[DType.uint32](
                geometry.is_output(geometry.pixel(pixel + 32))
            )

    @always_inline
    def visit[
        layout: VisitLayout, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[layout],
        subtile: Subtile,
        group: UInt32,
        residual: Residual[layout],
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """See `EpilogueVisitor`; where there is no pixel, nobody stores the
        value, and it becomes 0."""
        comptime assert layout.pixels <= 64
        var counted = values
        if (state.low & state.high) != UInt32.MAX:
            keep_branch()
            counted = self._masked[layout](state, at, group, values)
        comptime for i in range(size):
            comptime row = Place[layout.swapped].filter_of(i) // 8
            state.new_sums[row] += counted[i]
            comptime if Self.with_squares:
                state.new_squares[row] = counted[i].fma(
                    counted[i], state.new_squares[row]
                )
        return counted

    @always_inline
    def reduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """Adds the sub-tile's sums to those of its filters."""
        comptime for part in range(layout.parts):
            if subtile.part == UInt32(part):
                comptime for row in range(2):
                    state.sums[2 * part + row] += state.new_sums[row]
                    comptime if Self.with_squares:
                        state.squares[2 * part + row] += state.new_squares[row]

    @staticmethod
    @always_inline
    def _masked[
        layout: VisitLayout, size: Int
    ](
        state: Self.State,
        at: Visited[layout],
        group: UInt32,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """The values, 0 where there is no pixel."""
        var result = values
        var low = state.low >> at.place.pixel()
        var high = state.high >> at.place.pixel()
        comptime for i in range(size):
            # Each half of a mask is of four matrices' pixels.
            var matrices = group + UInt32(i // MATRIX_VALUES)
            var mask = low if matrices < 2 else high
            comptime pixel = Place[layout.swapped].pixel_of(i % MATRIX_VALUES)
            if (mask >> (matrices % 2 * MATRIX_ROWS)) & UInt32(1 << pixel) == 0:
                result[i] = 0
        return result

    @always_inline
    def end[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout]):
        """Adds up what the threads have that share filters, and leaves it in
        the consumer's row."""
        var row = self._row(at)
        comptime for i in range(2 * layout.parts):
            var filter = self._filter(at, i)
            var stores = (
                at.place.lane % COLUMN_LANES == 0 and filter < at.filter_end()
            )
            var sum = _sum_of_lanes(state.sums[i])
            if stores:
                row[unsafe_offset=Int(filter)] = sum
            comptime if Self.with_squares:
                var square = _sum_of_lanes(state.squares[i])
                if stores:
                    row[unsafe_offset=Int(self.filters + filter)] = square


@always_inline
def _sum_of_lanes(value: Float32) -> Float32:
    """The sum over the lanes that hold the same filters."""
    var sum = value + shuffle_xor(value, 1)
    return sum + shuffle_xor(sum, 2)


def sum_channels(sums: Writes[DType.float32]) -> ChannelSums[False]:
    """The visitor that adds up values.

    Args:
        sums: `[K]` in device memory.
    """
    return ChannelSums[False](sums, sums, sums, 0)


def sum_channels(
    sums: Writes[DType.float32], squares: Writes[DType.float32]
) -> ChannelSums[True]:
    """The visitor that adds up values and their squares.

    Args:
        sums: `[K]` in device memory.
        squares: `[K]` in device memory.
    """
    return ChannelSums[True](sums, squares, sums, 0)


def add_rows(
    rows: Reads[DType.float32],
    sums: Writes[DType.float32],
    squares: Writes[DType.float32],
    count: UInt32,
    filters: UInt32,
    kinds: UInt32,
):
    """Adds up rows, column by column; `ROWS_BLOCK` squared threads a block.

    Args:
        rows: `[count, kinds, filters]`.
        sums: `[filters]`, of kind 0.
        squares: `[filters]`, of kind 1, if there is one.
        count: Of the rows.
        filters: Of a kind.
        kinds: 1 or 2.
    """
    var partial = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    # The blocks may have come before the rows were complete.
    wait_on_dependent_grids()
    var row, column = divmod(UInt32(thread_idx.x), UInt32(ROWS_BLOCK))
    var at = UInt32(block_idx.x) * UInt32(ROWS_BLOCK) + column
    var width = kinds * filters
    var sum = Float32(0)
    if at < width:
        for r in range(row, count, UInt32(ROWS_BLOCK)):
            sum += rows[unsafe_offset=Int(r) * Int(width) + Int(at)]
    partial[unsafe_offset=Int(thread_idx.x)] = sum
    barrier()
    if row != 0 or at >= width:
        return
    for r in range(1, ROWS_BLOCK):
        sum += partial[unsafe_offset=r * ROWS_BLOCK + Int(column)]
    if at < filters:
        sums[unsafe_offset=Int(at)] = sum
    else:
        squares[unsafe_offset=Int(at - filters)] = sum
