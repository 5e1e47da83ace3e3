"""A problem as the kernel sees it: images, their tiles, and a tile's window in
shared memory."""

from std.math import ceildiv

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.problem import ConvProblem
from ..geometry import GpuGeometry, Position, keeps_pixels
from ..limits import MAX_INDEX
from ..pipeline.chunks import CHUNK_BYTES
from .tile import (
    JOINED_TAPS,
    MATRIX_ROWS,
    Tiling,
    WarpTile,
    odd_chunks,
)

comptime STORE_VECTORS = Int32(0)
"""Neighbouring filters of a pixel are stored 16 bytes at a time."""

comptime STORE_RUNS = Int32(1)
"""Neighbouring filters of neighbouring pixels are, which are one run."""

comptime STORE_ELEMENTS = Int32(2)
"""Single elements are stored, of neighbouring threads side by side."""


@fieldwise_init
struct Images(ImplicitlyCopyable, Movable):
    """The images that a problem's pixels are: its own; its slices along d; or
    one of a single row, where output pixel m is made of input pixel m alone."""

    var count: Int
    var height: Int
    var width: Int
    var rows: Int
    """Of the output."""
    var columns: Int
    """Of the output."""
    var row_stride: Int
    var column_stride: Int

    def __init__(out self, problem: ConvProblem):
        """Reads a problem.

        Args:
            problem: The convolution.
        """
        if keeps_pixels(problem):
            var pixels = problem.gemm_m()
            self = Self(1, 1, pixels, 1, pixels, 1, 1)
        else:
            self = Self(
                problem.batch * problem.input[0],
                problem.input[1],
                problem.input[2],
                problem.output[1],
                problem.output[2],
                problem.stride[1],
                problem.stride[2],
            )


def has_planes(problem: ConvProblem) -> Bool:
    """Whether the slices along d are images of their own.

    Args:
        problem: The convolution.
    """
    return (
        problem.filter[0] == 1
        and problem.input[0] == problem.output[0]
        and problem.pad_before[0] == 0
        and problem.pad_after[0] == 0
    )


struct WindowGeometry(DeviceValue, TrivialRegisterPassable):
    """The geometry of a convolution, cut into tiles.

    A tile's window lies in shared memory pixel by pixel, `pitch` bytes each, of
    which a slice of the channels is loaded. In a row the pixels of even columns
    come first where the stride along w is 2, so that the pixels that a multiply
    reads for one tap are neighbours.
    """

    var general: GpuGeometry
    """The problem's."""
    var output_depth: Divisor
    var output_height: Divisor
    var output_width: Divisor

    var height: Int32
    """Of an image."""
    var width: Int32
    var rows: Int32
    """Of an image's output."""
    var columns: Int32

    var tiles: Int32
    """Of all images."""
    var row_tiles: Divisor
    """Of an image."""
    var column_tiles: Divisor
    var tile_rows: Int32
    """Output pixels of a tile."""
    var tile_columns: Int32
    var row_stride: Int32
    var column_stride: Int32

    var warp_columns: UInt32
    """Warps along w."""
    var warps: UInt32
    """Of a tile's pixels."""
    var parts: UInt32
    """Warps of the same pixels."""
    var warp_tile_rows: Int32
    """Output pixels of a warp."""
    var warp_tile_columns: Int32
    var step_rows: Int32
    """From one multiply of a warp to its next: 1 or 0 rows."""
    var step_columns: Int32
    """The same: 0 columns, or `MATRIX_ROWS`."""

    var window_rows: UInt32
    """Input pixels of a tile."""
    var window_columns: UInt32
    var phases: UInt32
    """1 where the stride along w is 2, otherwise 0."""
    var phase_bytes: UInt32
    """From a window row's first pixel to that of its odd columns."""
    var pitch: UInt32
    """Bytes from pixel to pixel."""
    var row_bytes: UInt32
    """From row to row."""
    var step_bytes: UInt32
    """From one multiply's pixels to those of the warp's next."""

    var chunks: UInt32
    """Of a pixel's slice."""
    var pixel_chunks: UInt32
    """Of a pixel's channels."""
    var slices: Int32
    var joined: Int32
    """1 if a window's row is read once for all taps along h, otherwise 0."""

    var filter_chunks: Divisor
    """Of a tap of a filter in shared memory: of all slices."""
    var filter_pitch: UInt32
    """Bytes from one filter's tap to the next filter's."""
    var filter_bytes: UInt32
    """Of all filters."""
    var stage_bytes: UInt32
    """Of a window's slice."""
    var stages: Int32
    var patch_stride: UInt32
    """Elements from one pixel's sums to the next's, when they are stored."""
    var patch_bytes: UInt32
    """Of a warp's sums that are stored at once."""
    var stores: Int32
    """A `STORE_*` code."""
    var shared_bytes: Int
    """Of a block: filters, windows, sums that are stored."""
    var pieces: Divisor
    """Stores of the sums of a multiply."""

    def __init__(
        out self,
        problem: ConvProblem,
        tile: WarpTile,
        tiling: Tiling,
        *,
        input_bytes: Int,
        output_bytes: Int,
        placed: Bool,
    ):
        """Cuts a problem.

        Args:
            problem: The convolution; nothing refuses it.
            tile: Of a warp.
            tiling: Of a block.
            input_bytes: Of an element of the activation.
            output_bytes: Of an element of the output.
            placed: Whether stores ask where a pixel is.
        """
        self.general = GpuGeometry(problem)
        self.output_depth = Divisor(problem.output[0])
        self.output_height = Divisor(problem.output[1])
        self.output_width = Divisor(problem.output[2])
        var images = Images(problem)
        self.height = Int32(images.height)
        self.width = Int32(images.width)
        self.rows = Int32(images.rows)
        self.columns = Int32(images.columns)

        var stack = tile.rows
        var warp_rows = stack if tiling.along_rows else 1
        var warp_columns = MATRIX_ROWS * (1 if tiling.along_rows else stack)
        var tile_rows = tiling.warp_rows * warp_rows
        var tile_columns = tiling.warp_columns * warp_columns
        var row_tiles = ceildiv(images.rows, tile_rows)
        var column_tiles = ceildiv(images.columns, tile_columns)
        self.tiles = Int32(images.count * row_tiles * column_tiles)
        self.row_tiles = Divisor(row_tiles)
        self.column_tiles = Divisor(column_tiles)
        self.tile_rows = Int32(tile_rows)
        self.tile_columns = Int32(tile_columns)
        self.warp_columns = UInt32(tiling.warp_columns)
        self.warps = UInt32(tiling.warp_rows * tiling.warp_columns)
        self.parts = UInt32(tiling.parts)
        self.warp_tile_rows = Int32(warp_rows)
        self.warp_tile_columns = Int32(warp_columns)
        self.step_rows = Int32(1 if tiling.along_rows else 0)
        self.step_columns = Int32(0 if tiling.along_rows else MATRIX_ROWS)

        var stride = images.column_stride
        var window_columns = (
            (tile_columns - 1) * stride
            + (problem.filter[2] - 1) * problem.dilation[2]
            + 1
        )
        var window_rows = (
            (tile_rows - 1) * images.row_stride
            + (problem.filter[1] - 1) * problem.dilation[1]
            + 1
        )
        var phase = ceildiv(window_columns, stride)
        var pitch = odd_chunks(tiling.chunks)
        self.window_rows = UInt32(window_rows)
        self.window_columns = UInt32(window_columns)
        self.row_stride = Int32(images.row_stride)
        self.column_stride = Int32(stride)
        self.phases = UInt32(stride - 1)
        self.phase_bytes = UInt32(phase * pitch)
        self.pitch = UInt32(pitch)
        var row_bytes = phase * stride * pitch
        self.row_bytes = UInt32(row_bytes)
        self.step_bytes = UInt32(
            images.row_stride
            * row_bytes if tiling.along_rows else MATRIX_ROWS
            * pitch
        )

        var pixel_chunks = problem.channels * input_bytes // CHUNK_BYTES
        var slices = ceildiv(pixel_chunks, tiling.chunks)
        self.chunks = UInt32(tiling.chunks)
        self.pixel_chunks = UInt32(pixel_chunks)
        self.slices = Int32(slices)
        self.joined = Int32(
            1 if tiling.along_rows
            and problem.filter[1] == JOINED_TAPS
            and problem.dilation[1] == 1
            and images.row_stride == 1 else 0
        )

        self.filter_chunks = Divisor(slices * tiling.chunks)
        self.filter_pitch = UInt32(odd_chunks(slices * tiling.chunks))
        var filter_bytes = (
            problem.taps() * tile.filters * Int(self.filter_pitch)
        )
        var stage_bytes = window_rows * row_bytes
        self.filter_bytes = UInt32(filter_bytes)
        self.stage_bytes = UInt32(stage_bytes)
        self.stages = Int32(tiling.stages)

        var filters = problem.filters
        var width = CHUNK_BYTES // output_bytes
        if filters % width == 0:
            self.stores = STORE_VECTORS
        elif images.columns * filters % width == 0 and not placed:
            self.stores = STORE_RUNS
        else:
            self.stores = STORE_ELEMENTS
            width = 1
        self.pieces = Divisor(MATRIX_ROWS * filters // width)
        # An odd multiple of 8: four rows of a store are in all banks.
        self.patch_stride = UInt32(
            (filters // 8 | 1) * 8 if filters % 8 == 0 else filters
        )
        self.patch_bytes = (
            UInt32(tile.patch_rows() * MATRIX_ROWS * 4) * self.patch_stride
        )
        self.shared_bytes = (
            filter_bytes
            + tiling.stages * stage_bytes
            + tiling.warps() * Int(self.patch_bytes)
        )

    @always_inline
    def column_bytes(self, column: UInt32) -> UInt32:
        """The place of a window's column in its row.

        Args:
            column: Of the window.
        """
        return (column >> self.phases) * self.pitch + (
            column & self.phases
        ) * self.phase_bytes

    @always_inline
    def output(self, pixel: Int) -> Position:
        """The position of an output pixel of the problem.

        Args:
            pixel: Counted over all images.
        """
        if self.general.pixels >= MAX_INDEX:
            return self.general.pixel(pixel)
        var rest, q = self.output_width.split(UInt32(pixel))
        var slice, p = self.output_height.split(rest)
        var n, z = self.output_depth.split(slice)
        return Position(Int32(z), Int32(p), Int32(q), Int32(n))


@fieldwise_init
struct TilePlace(TrivialRegisterPassable):
    """Where a tile is."""

    var image: Int32
    var row: Int32
    """Its first output pixel's."""
    var column: Int32

    @staticmethod
    @always_inline
    def of(geometry: WindowGeometry, tile: Int32) -> Self:
        """A tile's place; columns innermost, images outermost.

        Args:
            geometry: The problem.
            tile: Counted over all images.
        """
        var rest, column = geometry.column_tiles.split(UInt32(tile))
        var image, row = geometry.row_tiles.split(rest)
        return Self(
            Int32(image),
            Int32(row) * geometry.tile_rows,
            Int32(column) * geometry.tile_columns,
        )
