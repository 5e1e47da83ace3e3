"""How a block of the Hopper window kernel cuts an image, and what of a pixel is
loaded at once."""

from std.math import ceildiv

from ....conv.problem import ConvProblem
from ...geometry import keeps_pixels
from ...limits import MMA_K_BYTES, PATTERN_BYTES, WARP, WARPGROUP
from ..wgmma import MMA_M

comptime MAX_FILTERS = 64
"""Of a multiply."""

comptime FEWEST_FILTERS = 8
"""Of a multiply. The next ones have twice as many each."""

comptime WIDTHS = 4
"""Numbers of filters that are compiled: 8, 16, 32 and 64."""

comptime CONSUMERS = [6, 6, 5, 4]
"""Warpgroups of a block that multiply, at most, for each of `WIDTHS`: the sums
take registers."""

comptime MAX_PARTS = 4
"""Warpgroups, or teams of them, that share the channels of a tile, at most."""

comptime MAX_STAGES = 8
"""Windows of a part that shared memory holds, at most."""

comptime MAX_SLICES = 32
"""Slices of the channels, at most: their filters have a barrier each."""

comptime FEWEST_STAGES = 2
"""The same, at least."""

comptime SQUARE = 8
"""Pixels of a multiply along h and along w, where they are a square."""

comptime BARRIERS_BYTES = PATTERN_BYTES
"""In front of the filters."""

comptime ROWS = [32, 64, 128]
"""Bytes of a pixel's slice of channels, each the span of a swizzle."""


def width_of(filters: Int) -> Int:
    """Which number of filters computes a problem: 0 for the fewest.

    Args:
        filters: The problem's, up to `MAX_FILTERS`.
    """
    var width = 0
    while FEWEST_FILTERS << width < filters:
        width += 1
    return width


def neighbours(columns: Int) -> Int:
    """Neighbouring filters of a pixel that a thread stores at once.

    Args:
        columns: Filters of a multiply.
    """
    return min(8, columns // 4)


@fieldwise_init
struct Image(ImplicitlyCopyable, Movable):
    """A problem's images as the kernel sees them: its own; or one of a single
    row, where output pixel m is made of input pixel m alone."""

    var count: Int
    var depth: Int
    var height: Int
    var width: Int
    var planes: Int
    """Of the output."""
    var rows: Int
    """Of the output."""
    var columns: Int
    """Of the output."""

    def __init__(out self, problem: ConvProblem):
        """Reads a problem.

        Args:
            problem: The convolution.
        """
        if keeps_pixels(problem):
            var pixels = problem.gemm_m()
            self = Self(1, 1, 1, pixels, 1, 1, pixels)
        else:
            self = Self(
                problem.batch,
                problem.input[0],
                problem.input[1],
                problem.input[2],
                problem.output[0],
                problem.output[1],
                problem.output[2],
            )


@fieldwise_init
struct WindowTiling(Equatable, ImplicitlyCopyable, Movable, Writable):
    """A tile is `rows` by `columns` multiplies of `MMA_M` pixels each, a
    warpgroup each."""

    var square: Bool
    """Whether a multiply's pixels are 8 by 8, otherwise 64 of one row."""
    var rows: Int
    """Multiplies along h."""
    var columns: Int
    """Multiplies along w."""
    var parts: Int
    """Of the sum: as many warpgroups multiply the same pixels by other
    channels."""
    var row_bytes: Int
    """Of a pixel's slice of channels, one of `ROWS`."""

    def team(self) -> Int:
        """Warpgroups that share a window."""
        return self.rows * self.columns

    def consumers(self) -> Int:
        """Warpgroups that multiply."""
        return self.team() * self.parts

    def threads(self) -> Int:
        """Of a block: each part has a warp that loads."""
        return self.consumers() * WARPGROUP + self.parts * WARP

    def tile_rows(self) -> Int:
        """Output pixels of a tile along h."""
        return self.rows * (SQUARE if self.square else 1)

    def tile_columns(self) -> Int:
        """Output pixels of a tile along w."""
        return self.columns * (SQUARE if self.square else MMA_M)

    def write_to(self, mut writer: Some[Writer]):
        """Writes the tiling on one line."""
        var shape = "8x8" if self.square else "1x64"
        writer.write(
            t"{self.rows}x{self.columns} multiplies of {shape} pixels,"
            t" {self.parts} parts, rows of {self.row_bytes} bytes"
        )


def most_consumers(filters: Int) -> Int:
    """Warpgroups of a block that multiply, at most.

    Args:
        filters: Of a multiply, or of a problem.
    """
    return materialize[CONSUMERS]()[width_of(filters)]


def most_threads(columns: Int) -> Int:
    """Threads of a block, at most.

    Args:
        columns: Filters of a multiply.
    """
    return most_consumers(columns) * WARPGROUP + MAX_PARTS * WARP


def slice_steps(
    problem: ConvProblem, element_bytes: Int, row_bytes: Int
) -> Int:
    """Multiplies of the last slice of a tap's channels, each `MMA_K_BYTES` deep.

    Args:
        problem: The convolution.
        element_bytes: Of the activation.
        row_bytes: Of a slice.
    """
    var bytes = problem.channels * element_bytes
    return ceildiv(
        bytes - (ceildiv(bytes, row_bytes) - 1) * row_bytes, MMA_K_BYTES
    )
