"""A row of the output image: its taps, its tiles, its loads.

Shared by the kernels that convolve directly, without a matrix: a tile is
`COLUMNS` neighbouring output pixels of one image row.
"""

from std.math import ceildiv
from std.utils import IndexList

from ..conv.memory import Reads
from ..conv.problem import SPATIAL, ConvProblem
from .tile_io import Pixel, pixel_offset

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
        var dilation = problem.dilation[axis]
        self.begin = ceildiv(max(0, -origin), dilation)
        self.end = max(
            self.begin,
            min(
                problem.filter[axis],
                ceildiv(problem.input[axis] - origin, dilation),
            ),
        )


@fieldwise_init
struct RowTaps(ImplicitlyCopyable, Movable):
    """Where a row of output pixels reads: the input position of its first
    pixel's tap 0, and the filter rows that lie inside the image."""

    var pixel: Pixel
    var origin: IndexList[SPATIAL]
    var depth: TapRange
    var height: TapRange

    def __init__(out self, problem: ConvProblem, row: Int):
        """The taps of the image row that begins at a GEMM row.

        Args:
            problem: The convolution.
            row: The row of the implicit GEMM.
        """
        self.pixel = Pixel(problem, row)
        self.origin = self.pixel.at * problem.stride - problem.pad_before
        self.depth = TapRange(problem, 0, self.origin[0])
        self.height = TapRange(problem, 1, self.origin[1])


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
    def next(mut self, problem: ConvProblem, line: RowTaps, span: Span) -> Bool:
        """Moves to the next tile; the last one overlaps the one before rather
        than be narrower, where the span is long enough.

        Args:
            problem: The convolution.
            line: The row's taps.
            span: The span.

        Returns:
            Whether there is one.
        """
        if self.following >= span.q_end:
            return False
        self.q = max(span.q, min(self.following, span.q_end - COLUMNS))
        self.following = self.q + COLUMNS
        var first = line.origin[2] + self.q * problem.stride[2]
        var last = first + (COLUMNS - 1) * problem.stride[2] + problem.span(2)
        self.inside = (
            first >= 0
            and last <= problem.input[2]
            and self.following <= span.q_end
        )
        return True


@fieldwise_init
struct InputRow[dtype: DType](ImplicitlyCopyable, Movable):
    """A row of the input image, from a position that may lie left of it."""

    var start: Reads[Self.dtype]
    var w: Int
    var width: Int
    var channels: Int

    @always_inline
    def __init__(
        out self,
        x: Reads[Self.dtype],
        problem: ConvProblem,
        n: Int,
        at: IndexList[SPATIAL],
    ):
        """The row from a pixel on.

        Args:
            x: The activation.
            problem: The convolution.
            n: The image.
            at: The pixel, inside the image's depth and height.
        """
        self.start = x.unsafe_offset(
            pixel_offset(problem, n, at) * problem.channels
        )
        self.w = at[2]
        self.width = problem.input[2]
        self.channels = problem.channels

    @always_inline
    def contains(self, column: Int) -> Bool:
        """Whether a pixel lies inside the image.

        Args:
            column: The pixel, counted from the row's first one.

        Returns:
            Whether it does.
        """
        var w = self.w + column
        return 0 <= w < self.width

    @always_inline
    def pixel(self, column: Int) -> Reads[Self.dtype]:
        """The channels of a pixel.

        Args:
            column: The pixel, counted from the row's first one, inside the
                image.

        Returns:
            Where they lie.
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

        Returns:
            The values.
        """
        comptime if checked:
            if not self.contains(column):
                return SIMD[DType.float32, width](0)
        return (
            self.pixel(column)
            .unsafe_load[width=width](channel)
            .cast[DType.float32]()
        )
