"""A row of the output image: its taps, its tiles, its loads.

Shared by the kernels that convolve directly, without a matrix: a tile is
`COLUMNS` neighbouring output pixels of one image row.
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.utils import IndexList

from ..conv.problem import SPATIAL, ConvProblem
from .tile_io import Pixel, load_activation

comptime COLUMNS = 8
"""Output pixels of a tile: as many independent sums as hide the latency of a
multiply-add, and few enough to leave registers for the filter."""


@fieldwise_init
struct TapRange(ImplicitlyCopyable, Movable):
    """Taps `[begin, end)` along an axis that lie inside the image."""

    var begin: Int
    var end: Int

    @always_inline
    def __init__(
        out self, problem: ConvProblem, axis: Int, origin: Int
    ):
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
struct ColumnTile(ImplicitlyCopyable, Movable):
    """The tiles of an image row, in turn."""

    var q: Int
    """The tile's first output column."""
    var inside: Bool
    """Whether the tile is whole and every tap lies inside the width."""
    var following: Int

    def __init__(out self, problem: ConvProblem, line: RowTaps):
        """In front of the first tile.

        Args:
            problem: The convolution.
            line: The row's taps.
        """
        self.q = 0
        self.inside = False
        self.following = 0

    @always_inline
    def next(mut self, problem: ConvProblem, line: RowTaps) -> Bool:
        """Moves to the next tile; the last one overlaps the one before rather
        than be narrower, where the row is long enough.

        Args:
            problem: The convolution.
            line: The row's taps.

        Returns:
            Whether there is one.
        """
        var columns = problem.output[2]
        if self.following >= columns:
            return False
        self.q = max(0, min(self.following, columns - COLUMNS))
        self.following = self.q + COLUMNS
        var first = line.origin[2] + self.q * problem.stride[2]
        var last = first + (COLUMNS - 1) * problem.stride[2] + problem.span(2)
        self.inside = (
            first >= 0
            and last <= problem.input[2]
            and self.following <= columns
        )
        return True


@always_inline
def load_column[
    width: Int, checked: Bool
](
    x: ManagedTensorSlice,
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    channel: Int,
) -> SIMD[DType.float32, width]:
    """Loads neighbouring channels of an input pixel.

    Parameters:
        width: How many channels.
        checked: Whether the pixel may lie left or right of the image, where
            there are zeros.

    Args:
        x: The activation.
        problem: The convolution.
        n: The image.
        at: The pixel, inside the image's depth and height.
        channel: The first channel.

    Returns:
        The values.
    """
    comptime if checked:
        if at[2] < 0 or at[2] >= problem.input[2]:
            return SIMD[DType.float32, width](0)
    return load_activation[width](x, problem, n, at, channel)
