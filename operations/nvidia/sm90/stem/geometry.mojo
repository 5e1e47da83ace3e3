"""Stems, the convolutions of few input channels: which of them the Hopper stem
kernel takes, and what it does with a tile.

TMA cannot load pixels whose bytes are no multiple of 16. Threads stage the
input pixels of an output tile instead, as quads: 4 channels, 8 bytes, with
zeros for missing channels and for pixels outside the image. Of images of one
channel a quad has up to 4 neighbouring columns instead, if the taps of a filter's
row come in so many: they are the channels of one tap then. The filter's taps
are quads too, and 4 quads are the depth of a multiply. Of the four threads that
share a row of the multiply, thread t reads quads t, t + 4, t + 8 and so on.
"""

from std.math import ceildiv

from ....conv.device_value import DeviceValue
from ....conv.divisor import Divisor, SmallDivisor
from ....conv.problem import ConvProblem
from ...im2col.traversal import ROW_BYTES
from ...limits import WARPGROUP
from ..wgmma import MMA_M

comptime QUAD = 4
"""Channels that are staged together."""

comptime QUAD_BYTES = 8
"""Bytes of a quad."""

comptime STEP_QUADS = 4
"""Quads that one multiply takes."""

comptime ATOM_STEPS = 4
"""Multiplies whose filters share a row of shared memory."""

comptime GROUP_FILTERS = 8
"""Neighbouring filters of a pixel that a thread stores."""

comptime PART_FILTERS = 4 * GROUP_FILTERS
"""Neighbouring filters of a pixel that four threads store."""

comptime STAGES = 2
"""Tiles of input pixels that shared memory holds."""

comptime PAIR_CHANNELS = 3
"""Channels of pixels that are staged two by two."""

comptime STRIP_QUADS = 4
"""Neighbouring quads that are staged together where a quad has several columns:
a strip."""

comptime PAIRS_TOGETHER = 6
comptime STRIPS_TOGETHER = 3
comptime QUADS_TOGETHER = 8
comptime PARTS_TOGETHER = 4
"""Pairs of pixels, strips, quads, or quads whose elements are loaded one by one,
that a producer's thread loads before it stores the first."""

comptime NO_QUAD = UInt32(1) << 30
"""The offset of a quad that is no tap: beyond every address, so that the
zeros are read instead."""


@fieldwise_init
struct StemConfig(ImplicitlyCopyable, Movable, Writable):
    """How the stem kernel is built."""

    var steps: Int
    """Multiplies whose activations a thread holds at a time, a chunk."""
    var tile_n: Int
    """Filters of a multiply, 32 or 64."""
    var consumers: Int
    """Warpgroups that multiply."""
    var resident: Int
    """Blocks of a multiprocessor."""

    def consumer_threads(self) -> Int:
        """Threads that multiply."""
        return self.consumers * WARPGROUP

    def threads(self) -> Int:
        """Threads of a block: the producer's warpgroup comes first."""
        return WARPGROUP + self.consumer_threads()

    def atoms(self) -> Int:
        """Rows of `ROW_BYTES` that a chunk of one filter takes."""
        return ceildiv(self.steps, ATOM_STEPS)

    def chunk_bytes(self) -> Int:
        """Shared memory of a chunk of `tile_n` filters."""
        return self.atoms() * self.tile_n * ROW_BYTES

    def chunk_offsets(self) -> Int:
        """Entries of the table of offsets that a thread reads for a chunk."""
        return self.atoms() * ATOM_STEPS

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        writer.write(
            t"stem of {self.steps} steps a chunk, {self.tile_n} filters a tile"
        )


comptime STEM_CANDIDATES = 3
"""Configurations to choose from."""


def stem_candidate(index: Int) -> StemConfig:
    """A configuration to choose from.

    Args:
        index: From 0 to `STEM_CANDIDATES - 1`.
    """
    if index == 0:
        # Few registers: two blocks, which wait for one another less.
        return StemConfig(steps=3, tile_n=32, consumers=2, resident=2)
    if index == 1:
        return StemConfig(steps=3, tile_n=64, consumers=3, resident=1)
    return StemConfig(steps=13, tile_n=64, consumers=3, resident=1)


@fieldwise_init
struct StemGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the stem kernel sees it.

    A tile is `tile_rows` by `tile_columns` output pixels of one plane of one
    image; a block computes `tiles_n` multiplies' filters of each of its tiles.
    """

    var channels: UInt32
    """Of an input pixel."""
    var tap_channels: UInt32
    """Of a tap: the input's, or the columns of a quad."""
    var quad_shift: UInt32
    """The logarithm of the quads of a pixel."""
    var depth: Int32
    var height: Int32
    var width: Int32
    var step_d: Int32
    var step_h: Int32
    var step_w: Int32
    """Input pixels between neighbouring output pixels: the strides."""
    var start_d: Int32
    var start_h: Int32
    var start_w: Int32
    """The first output pixel's first input pixel: minus the padding."""
    var dilation_d: Int32
    var dilation_h: Int32
    var dilation_w: Int32
    """From a tap to the next, in columns."""
    var taps_d: UInt32
    var taps_h: Divisor
    var taps_w: Divisor
    """Those of a quad are one."""
    var out_planes: Divisor
    var out_rows: UInt32
    var out_columns: UInt32
    var filters: UInt32
    var tile_rows: UInt32
    var tile_columns: SmallDivisor
    var tiles_h: Divisor
    var tiles_w: Divisor
    var tiles: UInt32
    """Tiles of all images, counted once for each block of filters."""
    var filter_blocks: Divisor
    var tiles_n: UInt32
    var staged_rows: UInt32
    """Rows of a staged tile in each plane."""
    var staged_quads: SmallDivisor
    """Quads of a staged row."""
    var row_quads: UInt32
    """From a staged row to the next."""
    var staged_columns: UInt32
    """Input columns that a staged row has elements of."""
    var staged_units: SmallDivisor
    """Pairs or strips that a staged row has parts of, where there are such."""
    var row_bytes: UInt32
    var column_bytes: UInt32
    """From an output pixel's first staged quad to its neighbour's."""
    var chunks: SmallDivisor

    @always_inline
    def tap_quads(self) -> UInt32:
        """Quads of the filter."""
        return (self.taps_d * self.taps_h.value * self.taps_w.value) << (
            self.quad_shift
        )

    @always_inline
    def tile_pixels(self) -> UInt32:
        """Output pixels of a whole tile."""
        return self.tile_rows * self.tile_columns.value

    @always_inline
    def multiplies(self) -> UInt32:
        """Multiplies' rows that a tile fills."""
        return (self.tile_pixels() + UInt32(MMA_M - 1)) // UInt32(MMA_M)

    @always_inline
    def tile(self, index: UInt32) -> StemTile:
        """The position of a tile."""
        var across, w = self.tiles_w.split(index)
        var down, h = self.tiles_h.split(across)
        var image, plane = self.out_planes.split(down)
        var row = h * self.tile_rows
        var column = w * self.tile_columns.value
        return StemTile(
            image,
            plane,
            row,
            column,
            min(self.tile_rows, self.out_rows - row),
            self.out_columns - column,
        )

    @always_inline
    def first_output(self, tile: StemTile) -> Int:
        """The first element of a tile's first pixel in the output."""
        var plane = Int(tile.image) * Int(self.out_planes.value) + Int(
            tile.plane
        )
        var line = plane * Int(self.out_rows) + Int(tile.row)
        return (line * Int(self.out_columns) + Int(tile.column)) * Int(
            self.filters
        )

    @always_inline
    def stage_quads(self) -> UInt32:
        """Quads of a staged tile."""
        return self.taps_d * self.staged_rows * self.row_quads

    @always_inline
    def tap_offset(self, quad: UInt32) -> UInt32:
        """Bytes from an output pixel's first staged quad to one of its taps;
        `NO_QUAD` after the last.

        Args:
            quad: Counted over the taps, in the filter's order.
        """
        if quad >= self.tap_quads():
            return NO_QUAD
        var tap = quad >> self.quad_shift
        var part = quad & ((UInt32(1) << self.quad_shift) - 1)
        var row, s = self.taps_w.split(tap)
        var plane, r = self.taps_h.split(row)
        var staged = plane * self.staged_rows + r * UInt32(self.dilation_h)
        var column = (s * UInt32(self.dilation_w)) << self.quad_shift
        return (staged * self.row_quads + column + part) * QUAD_BYTES


@fieldwise_init
struct StemTile(TrivialRegisterPassable):
    """The first output pixel of a tile."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var rows: UInt32
    """Its rows that are in the image."""
    var columns: UInt32
    """From its first column to the image's end."""


def tap_columns(problem: ConvProblem) -> Int:
    """Neighbouring columns that a quad has: as many taps of a filter's row are
    one. Elements of a quad that are no taps would spread what is not finite:
    they divide the row's taps."""
    if problem.channels == 1 and problem.dilation[2] == 1:
        for columns in range(QUAD, 1, -1):
            if problem.filter[2] % columns == 0:
                return columns
    return 1


def quads_of(problem: ConvProblem) -> Int:
    """Quads of a pixel."""
    return 1 if problem.channels <= QUAD else 2
