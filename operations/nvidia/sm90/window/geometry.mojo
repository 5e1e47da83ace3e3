"""A problem as the Hopper window kernel sees it: tiles, a tile's window in shared
memory, and the filters there."""

from std.math import ceildiv

from ....conv.device_value import DeviceValue
from ....conv.divisor import Divisor
from ....conv.problem import ConvProblem
from ...geometry import Position
from ...limits import MAX_BOX, MAX_SHARED_BYTES, MMA_K_BYTES, PATTERN_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ..wgmma import MMA_M
from .tiling import (
    BARRIERS_BYTES,
    FEWEST_FILTERS,
    FEWEST_STAGES,
    MAX_STAGES,
    SQUARE,
    Image,
    WindowTiling,
    neighbours,
    slice_steps,
    width_of,
)

comptime HALF_FILTERS = 32
"""Filters whose order in shared memory one load of the filter makes."""


def _pattern(bytes: Int) -> Int:
    """The least multiple of the swizzles' patterns that is no less."""
    return ceildiv(bytes, PATTERN_BYTES) * PATTERN_BYTES


def _descriptor_half(distance: Int, row_bytes: Int) -> UInt32:
    """The upper half of a matrix descriptor (PTX ISA, "Matrix descriptor
    format"): the bytes between groups of 8 rows, and the swizzle."""
    var swizzle = 1
    if row_bytes == 64:
        swizzle = 2
    elif row_bytes == 32:
        swizzle = 3
    return UInt32(distance // CHUNK_BYTES) | UInt32(swizzle << 30)


struct WindowGeometry(DeviceValue, TrivialRegisterPassable):
    """The geometry of a convolution, cut into tiles.

    A tile's window lies in shared memory pixel by pixel, as TMA loads it, a
    slice of the channels at a time. Where the stride along w is more than 1, the
    pixels of even and of odd columns are loaded apart, so that the pixels that a
    multiply reads for one tap are neighbours. Distances in shared memory are in
    chunks of 16 bytes, as matrix descriptors count.
    """

    var tiles: Int32
    """Of all images."""
    var row_tiles: Divisor
    """Of an image."""
    var column_tiles: Divisor
    var planes: Divisor
    """Of an image's output."""
    var rows: Int32
    """Of a plane."""
    var columns: Int32
    var tile_rows: Int32
    """Output pixels of a tile."""
    var tile_columns: Int32
    var output_depth: Divisor
    """Of the problem: pixels count through all of it."""
    var output_height: Divisor
    var output_width: Divisor

    var start: Position
    """The first output pixel's first input pixel: minus the padding."""
    var stride: Position
    var dilation: Position
    var taps_d: Int32
    var taps_h: Int32
    var taps_w: Int32

    var team: Divisor
    """Warpgroups that share a window."""
    var parts: Int32
    var stages: Int32
    """Of a part."""
    var slices: Divisor
    """Of the channels."""
    var steps: Int32
    """Slices of a tile's sum: of the channels, for each tap along d."""
    var slice_channels: Int32
    var depth: Int32
    """Multiplies of a tap of a slice."""
    var last_depth: Int32
    """Of the last slice."""

    var team_columns: Divisor
    """Multiplies of a tile along w."""
    var multiply_rows: Int32
    """Output pixels from a multiply to the next along h."""
    var multiply_columns: Int32
    """The same along w."""
    var multiply_row_chunks: UInt32
    """From a multiply's window to the next along h."""
    var multiply_column_chunks: UInt32
    """The same along w."""
    var tap_row_chunks: UInt32
    """From a tap to the next along h."""
    var pixel_chunks: UInt32
    """From a pixel to the next."""
    var tap_chunks: UInt32
    """From a tap in an even column of the window to the next along w."""
    var odd_tap_chunks: UInt32
    """The same from one in an odd column."""
    var phase_chunks: UInt32
    """From a window's even columns to its odd ones."""
    var warp_rows: Int32
    """Output pixels from a warp's to the next warp's, along h."""
    var warp_columns: Int32
    """The same along w."""
    var half_rows: Int32
    """From the upper 8 pixels of a warp to the lower ones, along h."""
    var half_columns: Int32
    """The same along w."""
    var pixels_half: UInt32
    """Of the descriptors of pixels, the upper half."""
    var filters_half: UInt32
    """Of the descriptors of filters, the upper half."""

    var phases: Int32
    """Loads of a window for the columns modulo the stride."""
    var boxes: Int32
    """Loads of a phase along w."""
    var box_columns: Int32
    """Input columns from one to the next, each `stride` apart."""
    var box_bytes: UInt32
    var window_bytes: UInt32
    """That the loads of a slice of a window bring."""
    var stage_bytes: UInt32

    var filters: Divisor
    """Of the problem."""
    var together: Int32
    """1 if a thread has neighbouring filters, and stores them at once."""
    var tap_bytes: UInt32
    """Of a tap of all filters, of a slice."""
    var row_filter_chunks: UInt32
    """From a row of taps of all filters to the next."""
    var taps: Int32
    """Along all dimensions."""
    var box_taps: Int32
    """Of a load of the filter."""
    var halves: Int32
    """Loads of these taps."""
    var filter_bytes: UInt32
    """Of all filters."""
    var shared_bytes: Int
    """Of a block: barriers, filters, windows, sums of parts."""

    def __init__(
        out self,
        problem: ConvProblem,
        tiling: WindowTiling,
        *,
        element_bytes: Int,
    ):
        """Cuts a problem. Shared memory may not hold it: `shared_bytes`.

        Args:
            problem: The convolution; nothing refuses it.
            tiling: Of a block.
            element_bytes: Of the activation.
        """
        var image = Image(problem)
        var tile_rows = tiling.tile_rows()
        var tile_columns = tiling.tile_columns()
        var row_tiles = ceildiv(image.rows, tile_rows)
        var column_tiles = ceildiv(image.columns, tile_columns)
        self.tiles = Int32(
            image.count * image.planes * row_tiles * column_tiles
        )
        self.row_tiles = Divisor(row_tiles)
        self.column_tiles = Divisor(column_tiles)
        self.planes = Divisor(image.planes)
        self.rows = Int32(image.rows)
        self.columns = Int32(image.columns)
        self.tile_rows = Int32(tile_rows)
        self.tile_columns = Int32(tile_columns)
        self.output_depth = Divisor(problem.output[0])
        self.output_height = Divisor(problem.output[1])
        self.output_width = Divisor(problem.output[2])

        # An axis with one output is strided by nothing.
        var stride_h = problem.stride[1]
        var stride_w = problem.stride[2] if problem.output[2] > 1 else 1
        var pad = problem.pad_before
        self.start = Position(-Int32(pad[0]), -Int32(pad[1]), -Int32(pad[2]), 0)
        self.stride = Position(
            Int32(problem.stride[0]), Int32(stride_h), Int32(stride_w), 1
        )
        self.dilation = Position(
            Int32(problem.dilation[0]),
            Int32(problem.dilation[1]),
            Int32(problem.dilation[2]),
            0,
        )
        self.taps_d = Int32(problem.filter[0])
        self.taps_h = Int32(problem.filter[1])
        self.taps_w = Int32(problem.filter[2])

        var row_bytes = tiling.row_bytes
        var bytes = problem.channels * element_bytes
        var slices = ceildiv(bytes, row_bytes)
        self.team = Divisor(tiling.team())
        self.parts = Int32(tiling.parts)
        self.slices = Divisor(slices)
        self.steps = Int32(slices * problem.filter[0])
        self.slice_channels = Int32(row_bytes // element_bytes)
        self.last_depth = Int32(slice_steps(problem, element_bytes, row_bytes))
        self.depth = Int32(row_bytes // MMA_K_BYTES)
        if slices == 1:
            self.depth = self.last_depth

        var reach = (problem.filter[2] - 1) * problem.dilation[2]
        # One tap, and taps an even dilation apart, are in columns of one kind.
        var mixed = problem.filter[2] > 1 and problem.dilation[2] % 2 == 1
        var phases = stride_w if mixed else 1
        var columns = tile_columns + reach // stride_w
        var window_rows = (
            (tile_rows - 1) * stride_h
            + (problem.filter[1] - 1) * problem.dilation[1]
            + 1
        )
        # A box of several rows must hold them whole.
        var most = MAX_BOX // stride_w // (PATTERN_BYTES // 32)
        most *= PATTERN_BYTES // 32
        var boxes = ceildiv(columns, most) if window_rows == 1 else 1
        if boxes > 1:
            var unit = PATTERN_BYTES // row_bytes
            columns = ceildiv(columns, boxes * unit) * boxes * unit
        var pitch = columns * row_bytes
        var phase_bytes = _pattern(window_rows * pitch)
        var group = SQUARE if tiling.square else MMA_M
        self.team_columns = Divisor(tiling.columns)
        self.multiply_rows = Int32(SQUARE if tiling.square else 1)
        self.multiply_columns = Int32(group)
        self.multiply_row_chunks = UInt32(
            Int(self.multiply_rows) * stride_h * pitch // CHUNK_BYTES
        )
        self.multiply_column_chunks = UInt32(group * row_bytes // CHUNK_BYTES)
        self.tap_row_chunks = UInt32(problem.dilation[1] * pitch // CHUNK_BYTES)
        self.pixel_chunks = UInt32(row_bytes // CHUNK_BYTES)
        self.phase_chunks = UInt32(phase_bytes // CHUNK_BYTES)
        var dilation = UInt32(problem.dilation[2])
        self.tap_chunks = dilation // UInt32(stride_w) * self.pixel_chunks
        self.odd_tap_chunks = self.tap_chunks
        if stride_w == 2 and problem.dilation[2] % 2 == 1:
            self.tap_chunks += self.phase_chunks
            self.odd_tap_chunks += self.pixel_chunks - self.phase_chunks
        self.warp_rows = Int32(2 if tiling.square else 0)
        self.warp_columns = Int32(0 if tiling.square else 2 * SQUARE)
        self.half_rows = Int32(1 if tiling.square else 0)
        self.half_columns = Int32(0 if tiling.square else SQUARE)
        self.pixels_half = _descriptor_half(
            stride_h * pitch if tiling.square else SQUARE * row_bytes, row_bytes
        )
        self.filters_half = _descriptor_half(SQUARE * row_bytes, row_bytes)

        self.phases = Int32(phases)
        self.boxes = Int32(boxes)
        self.box_columns = Int32(columns // boxes * stride_w)
        self.box_bytes = UInt32(columns // boxes * window_rows * row_bytes)
        self.window_bytes = UInt32(phases * columns * window_rows * row_bytes)
        var stage_bytes = phases * phase_bytes
        self.stage_bytes = UInt32(stage_bytes)

        var width = FEWEST_FILTERS << width_of(problem.filters)
        var taps = problem.taps()
        var tap_bytes = width * row_bytes
        self.filters = Divisor(problem.filters)
        self.together = Int32(
            1 if problem.filters % neighbours(width) == 0 else 0
        )
        self.tap_bytes = UInt32(tap_bytes)
        self.row_filter_chunks = UInt32(
            problem.filter[2] * tap_bytes // CHUNK_BYTES
        )
        self.taps = Int32(taps)
        self.halves = Int32(ceildiv(width, HALF_FILTERS))
        self.box_taps = Int32(1 if width > HALF_FILTERS else taps)
        var filter_bytes = slices * taps * tap_bytes
        self.filter_bytes = UInt32(filter_bytes)
        var sums = (tiling.parts - 1) * tiling.team() * MMA_M * width * 4
        var fixed = BARRIERS_BYTES + _pattern(filter_bytes) + sums
        var free = MAX_SHARED_BYTES - fixed
        var stages = free // (tiling.parts * stage_bytes)
        stages = min(max(stages, FEWEST_STAGES), MAX_STAGES)
        self.stages = Int32(stages)
        self.shared_bytes = fixed + tiling.parts * stages * stage_bytes

    @always_inline
    def zero(self) -> UInt32:
        """A zero that the compiler does not know."""
        return UInt32(self.together >> 1)

    @always_inline
    def stages_at(self, base: UInt32) -> UInt32:
        """The address of the first stage.

        Args:
            base: Of the block's shared memory.
        """
        var end = base + BARRIERS_BYTES + self.filter_bytes
        return (end + (PATTERN_BYTES - 1)) & ~UInt32(PATTERN_BYTES - 1)

    @always_inline
    def place(self, tile: Int32) -> TilePlace:
        """A tile's place; columns innermost, images outermost.

        Args:
            tile: Counted over all images.
        """
        var rest, column = self.column_tiles.split(UInt32(tile))
        var plane, row = self.row_tiles.split(rest)
        return TilePlace(
            Int32(plane),
            Int32(row) * self.tile_rows,
            Int32(column) * self.tile_columns,
        )

    @always_inline
    def position(self, pixel: UInt32) -> Position:
        """The position of an output pixel of the problem.

        Args:
            pixel: Counted over all images.
        """
        var rest, q = self.output_width.split(pixel)
        var slice, p = self.output_height.split(rest)
        var n, z = self.output_depth.split(slice)
        return Position(Int32(z), Int32(p), Int32(q), Int32(n))


@fieldwise_init
struct TilePlace(TrivialRegisterPassable):
    """Where a tile's first output pixel is."""

    var plane: Int32
    """Counted over all images."""
    var row: Int32
    var column: Int32
