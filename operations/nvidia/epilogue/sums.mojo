"""The visitor that adds up each filter's values over all output pixels, and
their squares: what the statistics of batch normalization need.

Every reducer (`Visited.reducer`) has a row of the workspace that it alone reads
and writes; a second kernel adds up the rows. Every sum is thus taken in one
order, which depends on configuration, problem and number of multiprocessors
alone: launches agree bit by bit.

Where a thread has few filters (`VisitLayout.keeps_filters`), it adds up its own
values, tile after tile; the reducer is its consumer. Where it has whole pixels,
a warp adds up those of its threads, the warps theirs, and every sub-tile of a
tile along the pixels has its own place in a row.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives.warp import shuffle_xor, vote
from max.gpu.sync import barrier
from std.collections import Optional
from std.math import ceildiv
from std.utils import StaticTuple

from ...conv.memory import Reads, Writes
from ...conv.problem import ConvProblem
from ..limits import PATTERN_BYTES, WARP
from ..overlap import wait_for_earlier_kernels
from ..pipeline.chunks import shared_pointer
from ..stream import LaunchGrid, Stream
from ..tma.copy import SharedAddress
from .activations import keep_branch
from .callbacks import EpilogueVisitor, LaunchShape, Subtile, Visited
from .channels import ChannelState
from .layout import Fragments, VisitLayout

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

    Both are overwritten.

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
    """The workspace, `[reducers, kinds, K]`."""
    var filters: UInt32
    """`K`."""

    # The host.

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        if layout.whole_pixels():
            if layout.filters == WARP:
                return None
            return String(
                t"sums over whole pixels need sub-tiles of {WARP} filters, one"
                t" a thread of a warp; here {layout.filters}"
            )
        if not layout.keeps_filters():
            return String(
                "sums over pixels need filters as the multiply's rows: each of"
                " a consumer's threads then has the same filters all the time"
            )
        return None

    @staticmethod
    def _buffer_bytes(layout: VisitLayout) -> Int:
        """Shared memory of a sub-tile's sums, of each warp."""
        return Self.KINDS * layout.threads // WARP * layout.filters * 4

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        if layout.keeps_filters():
            return 0
        var bytes = layout.buffers() * Self._buffer_bytes(layout)
        return ceildiv(bytes, PATTERN_BYTES) * PATTERN_BYTES

    @staticmethod
    def shares(layout: VisitLayout) -> Bool:
        return not layout.keeps_filters()

    def workspace_elements(self, shape: LaunchShape) -> Int:
        return shape.reducers * Self.KINDS * shape.problem.filters

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        return Self(
            self.sums, self.squares, workspace, UInt32(shape.problem.filters)
        )

    def conclude(self, mut queue: Stream, shape: LaunchShape) raises:
        """Adds up the reducers' rows."""
        comptime bytes = 4 * ROWS_BLOCK * ROWS_BLOCK
        queue.enqueue[add_rows](
            LaunchGrid(
                ceildiv(Self.KINDS * shape.problem.filters, ROWS_BLOCK),
                ROWS_BLOCK * ROWS_BLOCK,
                shared_bytes=bytes,
            ),
            self.rows.as_imm(),
            self.sums,
            self.squares,
            UInt32(shape.reducers),
            self.filters,
            UInt32(Self.KINDS),
        )

    # The consumer.

    @always_inline
    def _row[
        Values: Fragments
    ](self, at: Visited[Values]) -> Writes[DType.float32]:
        """The reducer's row of the workspace."""
        return self.rows.unsafe_offset(
            Int(at.reducer) * Self.KINDS * Int(self.filters)
        )

    @always_inline
    def start[Values: Fragments](self, at: Visited[Values]):
        """Clears the consumer's row, if it will be added to."""
        comptime if Values.layout.keeps_filters():
            var row = self._row(at)
            var count = UInt32(Self.KINDS) * self.filters
            comptime threads = UInt32(Values.layout.threads)
            for i in range(at.place.thread(), count, threads):
                row[unsafe_offset=Int(i)] = 0

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Takes up the sums of the thread's filters where the consumer's last
        tile of them left off; of the threads that share them, the first
        does."""
        var state = Self.State(ChannelState(0), ChannelState(0), 0, 0, 0, 0)
        comptime if Values.layout.keeps_filters():
            var row = self._row(at)
            comptime for i in range(Self._kept(Values.layout)):
                var filter = self._filter(at, i)
                if (
                    Self._lane(at) % COLUMN_LANES == 0
                    and filter < at.filter_end()
                ):
                    state.sums[i] = row[unsafe_offset=Int(filter)]
                    comptime if Self.with_squares:
                        state.squares[i] = row[
                            unsafe_offset=Int(self.filters + filter)
                        ]
        return state

    @staticmethod
    def _kept(layout: VisitLayout) -> Int:
        """Filters of a thread in all sub-tiles."""
        return layout.thread_filters * layout.filter_subtiles

    @staticmethod
    @always_inline
    def _lane[Values: Fragments](at: Visited[Values]) -> UInt32:
        """The thread's in its warp."""
        return at.place.thread() % UInt32(WARP)

    @staticmethod
    @always_inline
    def _filter[Values: Fragments](at: Visited[Values], index: Int) -> UInt32:
        """The filter of one of the thread's sums."""
        comptime layout = Values.layout
        return (
            at.tile.filter
            + at.place.filter()
            + UInt32(
                index // layout.thread_filters * layout.filters
                + Values.thread_filter(index % layout.thread_filters)
            )
        )

    @always_inline
    def previsit[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """Finds out which pixels of the sub-tile are output: each lane looks
        at one, or two."""
        comptime if Values.layout.keeps_filters():
            state.new_sums = 0
            state.new_squares = 0
            var pixel = at.pixel(subtile) + Self._lane(at)
            var geometry = at.geometry
            state.low = vote[DType.uint32](
                geometry.is_output(geometry.pixel(pixel))
            )
            state.high = UInt32.MAX
            comptime if Values.layout.pixels > 32:
                state.high = vote[DType.uint32](
                    geometry.is_output(geometry.pixel(pixel + 32))
                )

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """See `EpilogueVisitor`; where there is no pixel, nobody stores the
        value, and it becomes 0."""
        comptime if Values.layout.whole_pixels():
            return self._visit_pixel(at, subtile, values)
        elif not Values.layout.keeps_filters():
            # `refusal` keeps every launch away from such a layout.
            return values
        else:
            comptime assert Values.layout.pixels <= 64
            var counted = values
            if (state.low & state.high) != UInt32.MAX:
                keep_branch()
                counted = Self._masked(state, at, group, values)
            comptime for i in range(size):
                comptime row = Values.filter_index(i)
                state.new_sums[row] += counted[i]
                comptime if Self.with_squares:
                    state.new_squares[row] = counted[i].fma(
                        counted[i], state.new_squares[row]
                    )
            return counted

    @always_inline
    def reduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """Adds the sub-tile's sums to those of its filters."""
        comptime if Values.layout.keeps_filters():
            comptime for part in range(Values.layout.filter_subtiles):
                if subtile.part == UInt32(part):
                    comptime for row in range(2):
                        state.sums[2 * part + row] += state.new_sums[row]
                        comptime if Self.with_squares:
                            state.squares[2 * part + row] += state.new_squares[
                                row
                            ]

    @staticmethod
    @always_inline
    def _masked[
        Values: Fragments, //, size: Int
    ](
        state: Self.State,
        at: Visited[Values],
        group: UInt32,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """The values, 0 where there is no pixel."""
        var result = values
        var low = state.low >> at.place.pixel()
        var high = state.high >> at.place.pixel()
        comptime for i in range(size):
            # Each half of the mask has 32 pixels.
            comptime offset = Values.pixel_of(i)
            var pixel = Values.group_pixels(group) + UInt32(offset)
            var mask = low if pixel < 32 else high
            if (mask >> (pixel % 32)) & 1 == 0:
                result[i] = 0
        return result

    @staticmethod
    @always_inline
    def _buffer[
        Values: Fragments
    ](at: Visited[Values], subtile: Subtile, warp: UInt32) -> SharedAddress:
        """Where a warp's sums of a sub-tile are in shared memory."""
        comptime buffers = UInt32(Values.layout.buffers())
        comptime bytes = UInt32(Self._buffer_bytes(Values.layout))
        comptime warp_bytes = UInt32(Values.layout.filters * 4)
        return at.memory + subtile.count % buffers * bytes + warp * warp_bytes

    @always_inline
    def _visit_pixel[
        Values: Fragments, //, size: Int
    ](
        self,
        at: Visited[Values],
        subtile: Subtile,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """`visit` of all filters of one pixel: adds up the warp's pixels."""
        comptime assert size == Values.layout.filters and size == WARP
        var pixel = at.geometry.pixel(at.pixel(subtile) + at.place.pixel())
        var counted = values
        if not at.geometry.is_output(pixel):
            counted = 0
        var warp, lane = divmod(at.place.thread(), UInt32(WARP))
        comptime warps = UInt32(Values.layout.threads // WARP)
        var sum = _sum_of_pixels(counted, lane)
        shared_pointer[DType.float32](
            Self._buffer(at, subtile, warp) + lane * 4
        ).unsafe_store(0, sum)
        comptime if Self.with_squares:
            var square = _sum_of_pixels(counted * counted, lane)
            shared_pointer[DType.float32](
                Self._buffer(at, subtile, warps + warp) + lane * 4
            ).unsafe_store(0, square)
        return counted

    @always_inline
    def postreduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """Adds up what the warps have of a sub-tile of whole pixels, a thread a
        filter, and leaves it in the reducer's row."""
        comptime layout = Values.layout
        comptime if not layout.keeps_filters():
            var index = at.place.thread()
            var filter = at.filter(subtile) + index
            # Of a tile beyond the last pixel nobody asks for sums.
            if (
                index >= UInt32(layout.filters)
                or filter >= at.filter_end()
                or not at.geometry.is_output(at.geometry.pixel(at.tile.pixel))
            ):
                return
            comptime warps = layout.threads // WARP
            var row = self._row(at)
            comptime for kind in range(Self.KINDS):
                var sum = Float32(0)
                comptime for warp in range(warps):
                    sum += shared_pointer[DType.float32](
                        Self._buffer(at, subtile, UInt32(kind * warps + warp))
                        + index * 4
                    ).unsafe_load(0)
                row[unsafe_offset=kind * Int(self.filters) + Int(filter)] = sum

    @always_inline
    def end[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values]):
        """Adds up what the threads have that share filters, and leaves it in
        the consumer's row."""
        comptime if Values.layout.keeps_filters():
            var row = self._row(at)
            comptime for i in range(Self._kept(Values.layout)):
                var filter = self._filter(at, i)
                var stores = (
                    Self._lane(at) % COLUMN_LANES == 0
                    and filter < at.filter_end()
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


@always_inline
def _sum_of_pixels[
    size: Int
](values: SIMD[DType.float32, size], lane: UInt32) -> Float32:
    """The sum over a warp's threads of one of their values, of lane l the l-th:
    in each step lanes exchange the half of the values that the other keeps."""
    comptime assert size == WARP
    var left = StaticTuple[Float32, WARP](fill=0)
    comptime for i in range(WARP):
        left[i] = values[i]
    comptime for step in range(5):
        comptime half = WARP >> (step + 1)
        var keeps_upper = lane & UInt32(half) != 0
        comptime for i in range(half):
            var kept = left[i + half] if keeps_upper else left[i]
            var given = left[i] if keeps_upper else left[i + half]
            left[i] = kept + shuffle_xor(given, UInt32(half))
    return left[0]


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
    wait_for_earlier_kernels()
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
