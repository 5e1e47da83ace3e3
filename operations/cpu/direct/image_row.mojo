"""A row of the output image: its taps, its tiles, its loads.

Shared by the kernels that convolve directly, without a matrix: a tile is
`COLUMNS` neighbouring output pixels of one image row.
"""

from std.math import ceildiv

from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from ..pixel import Pixel
from .channels import Lanes, load_lanes

comptime COLUMNS = 8
"""Output pixels of a tile: as many independent sums as hide the latency of a
multiply-add, and few enough to leave registers for the filter."""

comptime MAX_SPAN_FILTERS = 256
"""Filters of the widest span."""

comptime SPAN_SUMS = 4096
"""Sums of the largest span: they stay in L1 until they are stored."""


@fieldwise_init
struct TapRange(ImplicitlyCopyable, Movable):
    """Taps `[begin, end)` along an axis that lie inside the image."""

    var begin: Int
    var end: Int

    @always_inline
    def __init__(out self, problem: ConvProblem, axis: Int, origin: Int):
        """The taps of an output position.

        Args:
            problem: The convolution.
            axis: The spatial axis.
            origin: The input position of tap 0, perhaps outside the image.
        """
        self.begin = problem.taps_before(axis, origin, 0)
        self.end = problem.taps_before(axis, origin, problem.input[axis])


@fieldwise_init
struct ImageRow[dtype: DType](ImplicitlyCopyable, Movable):
    """A row of the output image, and what it reads.

    Parameters:
        dtype: Of the activation.
    """

    var problem: ConvProblem
    var plane: Int
    """Of the output."""
    var line: Int
    """Of the output's plane."""
    var start: Reads[Self.dtype]
    """What tap 0 of the row's first pixel reads, perhaps outside the image."""
    var w: Int
    """Where along w that lies."""
    var slice_stride: Int
    """Elements between what two slices of the filter read."""
    var row_stride: Int
    """Elements between what two rows of a slice read."""
    var depth: TapRange
    """The filter's slices that lie inside the image."""
    var height: TapRange
    """The filter's rows that lie inside the image."""
    var zero: Float32
    """What stands for 0 in the activation, where it is integers."""

    def __init__(
        out self,
        activation: Reads[Self.dtype],
        problem: ConvProblem,
        index: Int,
        zero: Float32,
    ):
        """Finds the row's taps.

        Args:
            activation: The activation.
            problem: The convolution.
            index: The row, counted over images and depths.
            zero: What stands for 0.
        """
        self.zero = zero
        var pixel = Pixel(problem, index * problem.output[2])
        var origin = pixel.input(problem)
        var input_row = problem.input[2] * problem.channels
        self.problem = problem
        self.plane = pixel.at[0]
        self.line = pixel.at[1]
        self.start = activation.unsafe_offset(origin.input_offset(problem))
        self.w = origin.at[2]
        self.slice_stride = problem.dilation[0] * problem.input[1] * input_row
        self.row_stride = problem.dilation[1] * input_row
        self.depth = TapRange(problem, 0, origin.at[0])
        self.height = TapRange(problem, 1, origin.at[1])

    def slices(self) -> Int:
        """Slices of the filter that lie inside the image."""
        return self.depth.end - self.depth.begin

    def height_below(self) -> TapRange:
        """The filter's rows that lie inside the image, of the output row below.
        """
        ref problem = self.problem
        var origin = (self.line + 1) * problem.stride[1] - problem.pad_before[1]
        return TapRange(problem, 1, origin)

    def inside(self, span: Span) -> Columns:
        """The columns of a span all of whose taps lie inside the width.

        Args:
            span: The span.
        """
        ref problem = self.problem
        var stride = problem.stride[2]
        var last = problem.input[2] - problem.span(2) - self.w
        var begin = min(span.q_end, max(span.q, ceildiv(-self.w, stride)))
        if last < 0:
            return Columns(begin, begin)
        return Columns(begin, max(begin, min(span.q_end, last // stride + 1)))

    @always_inline
    def input(self, q: Int, t: Int, r: Int) -> InputRow[Self.dtype]:
        """The row of the input image that a filter row reads.

        Args:
            q: The output column that it is read for.
            t: The filter row's slice, of `depth`.
            r: The filter row, of `height`.

        Returns:
            The input row, from what tap 0 reads on.
        """
        var column = q * self.problem.stride[2]
        return InputRow(
            self.start.unsafe_offset(
                t * self.slice_stride
                + r * self.row_stride
                + column * self.problem.channels
            ),
            self.w + column,
            self.problem.input[2],
            self.problem.channels,
            self.zero,
        )


@fieldwise_init
struct Columns(ImplicitlyCopyable, Movable):
    """Output columns `[begin, end)`."""

    var begin: Int
    var end: Int

    def count(self) -> Int:
        """How many."""
        return self.end - self.begin


@fieldwise_init
struct Span(ImplicitlyCopyable, Movable):
    """What a direct kernel computes at once: output columns `[q, q_end)` of an
    image row by filters `[begin, end)`."""

    var q: Int
    var q_end: Int
    var begin: Int
    var end: Int

    def filters(self) -> Int:
        """How many filters, and the elements between two columns' sums."""
        return self.end - self.begin


@fieldwise_init
struct ColumnTile(ImplicitlyCopyable, Movable):
    """The tiles of a span, in turn."""

    var q: Int
    """The tile's first output column."""
    var inside: Bool
    """Whether the tile is whole and every tap lies inside the width."""
    var following: Int

    def __init__(out self, span: Span):
        """In front of the first tile.

        Args:
            span: The span.
        """
        self.q = span.q
        self.inside = False
        self.following = span.q

    @always_inline
    def next(mut self, row: ImageRow, span: Span) -> Bool:
        """Moves to the next tile; the last one overlaps the one before rather
        than be narrower, where the span is long enough.

        Args:
            row: The image row.
            span: The span.

        Returns:
            Whether there is one.
        """
        if self.following >= span.q_end:
            return False
        ref problem = row.problem
        self.q = max(span.q, min(self.following, span.q_end - COLUMNS))
        self.following = self.q + COLUMNS
        var first = row.w + self.q * problem.stride[2]
        var last = first + (COLUMNS - 1) * problem.stride[2] + problem.span(2)
        self.inside = (
            first >= 0
            and last <= problem.input[2]
            and self.following <= span.q_end
        )
        return True


@fieldwise_init
struct InputRow[dtype: DType](ImplicitlyCopyable, Movable):
    """A row of the input image, from a position that may lie left of it.

    Parameters:
        dtype: Of the activation.
    """

    var start: Reads[Self.dtype]
    var w: Int
    """The position."""
    var width: Int
    """Of the image."""
    var channels: Int
    var zero: Float32
    """As `ImageRow` has it."""

    @always_inline
    def contains(self, column: Int) -> Bool:
        """Whether a pixel lies inside the image.

        Args:
            column: The pixel, counted from the row's first one.
        """
        # As unsigned numbers, what lies left of the image is far right of it.
        return UInt(self.w + column) < UInt(self.width)

    @always_inline
    def pixel(self, column: Int) -> Reads[Self.dtype]:
        """The channels of a pixel.

        Args:
            column: The pixel, counted from the row's first one, inside the
                image.
        """
        return self.start.unsafe_offset(column * self.channels)

    @always_inline
    def load[
        width: Int, checked: Bool
    ](self, column: Int, channel: Int) -> SIMD[DType.float32, width]:
        """Loads neighbouring channels of a pixel.

        Parameters:
            width: How many channels.
            checked: Whether the pixel may lie left or right of the image,
                where there are zeros.

        Args:
            column: The pixel, counted from the row's first one.
            channel: The first channel.
        """
        return rebind[SIMD[DType.float32, width]](
            self.load_lanes[Lanes.plain(width), checked](column, channel)
        )

    @always_inline
    def load_lanes[
        lanes: Lanes, checked: Bool
    ](self, column: Int, channel: Int) -> SIMD[DType.float32, lanes.width]:
        """Loads neighbouring channels of a pixel as lanes.

        Parameters:
            lanes: The lanes.
            checked: Whether the pixel may lie left or right of the image,
                where there are zeros.

        Args:
            column: The pixel, counted from the row's first one.
            channel: The first channel.
        """
        comptime if checked:
            if not self.contains(column):
                return SIMD[DType.float32, lanes.width](0)
        var values = load_lanes[lanes](self.pixel(column), channel)
        comptime if Self.dtype.is_integral():
            return values - self.zero
        return values
