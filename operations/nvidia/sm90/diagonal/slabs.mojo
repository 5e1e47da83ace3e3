"""How the slab kernel (slab_kernel.mojo) cuts a problem: groups of 16 and 32
channels, 3x3, where each block has several tiles.

A block has `SLAB` channels, whose filters stay in shared memory, and computes
tiles of `SQUARE` by `SQUARE` output pixels. A tile's window of the input is
loaded once, and every tap of a group is multiplied from there, for all of the
group's filters at once. At stride 2 the even and the odd columns of a window are
loaded apart, so that the pixels that a tap sees are neighbours.
"""

from std.math import ceildiv

from ....conv.device_value import DeviceValue
from ....conv.divisor import Divisor, SmallDivisor
from ....conv.problem import ConvProblem
from ...limits import MAX_SHARED_BYTES, PATTERN_BYTES, WARP, WARPGROUP
from ...pipeline.chunks import CHUNK_BYTES
from .plan import MATRIX, PIXEL_BYTES, SLAB, DiagonalConfig

comptime SQUARE = MATRIX
"""Rows and columns of output pixels of a tile: those of one multiply."""

comptime TEAMS = 2
"""Of a block. They take its tiles in turns: one finishes while the other
multiplies."""

comptime MEMBERS = 2
"""Warpgroups of a team: each multiplies a part of the slab's channels."""

comptime MEMBER_CHANNELS = SLAB // MEMBERS
"""Of a warpgroup."""

comptime TEAM_THREADS = MEMBERS * WARPGROUP
"""Threads of a team."""

comptime CONSUMERS = TEAMS * TEAM_THREADS
"""Threads of a block that multiply."""

comptime SLAB_THREADS = CONSUMERS + 2 * WARP
"""Threads of a block: one more warp loads windows, and one stores outputs."""

comptime TILE_BYTES = SQUARE * SQUARE * PIXEL_BYTES
"""Bytes of a tile's outputs."""

comptime FEWEST_BUFFERS = 2 * TEAMS
"""Tiles' outputs in shared memory, two of each team: one is written, while the
other is stored."""

comptime MOST_BUFFERS = 4 * TEAMS
"""The same where residuals are loaded there for the tiles to come, at most."""

comptime MAX_SLAB_STAGES = 8
"""Windows in shared memory, at most."""

comptime WIDE_CHUNKS = 4
"""Of 8 channels: groups that are wide."""

comptime WIDE_SHARE = 0.2
"""Of what a problem's blocks can compute at a time, its outputs, at least, where
groups are wide: with fewer the diagonal kernel was faster."""

comptime NARROW_SHARE = 0.4
"""The same where groups are narrow: the diagonal kernel reads half as much for
each of their outputs."""


@fieldwise_init
struct SlabShape(ImplicitlyCopyable, Movable):
    """What the slab kernel of a configuration has in shared memory."""

    var stride: Int
    """Along h and w."""
    var taps: Int
    """Along h and w."""
    var group_channels: Int

    @staticmethod
    def of(config: DiagonalConfig) -> SlabShape:
        """The shape of a configuration.

        Args:
            config: For groups of several chunks.
        """
        return SlabShape(
            config.stride, config.taps, config.group_chunks * MATRIX
        )

    def rows(self) -> Int:
        """Input rows of a window."""
        return (SQUARE - 1) * self.stride + self.taps

    def columns(self) -> Int:
        """Input pixels of a row of a window, of those that one load brings."""
        return SQUARE + (self.taps - 1) // self.stride

    def phase_bytes(self) -> Int:
        """Bytes that a load of a window brings."""
        return self.rows() * self.columns() * PIXEL_BYTES

    def stage_bytes(self) -> Int:
        """Bytes of a window: one load, or one of even and one of odd columns.
        """
        return self.stride * self.phase_bytes()

    def row_bytes(self) -> Int:
        """Bytes of a filter's tap: a row of the multiply's second operand."""
        return 2 * self.group_channels

    def tap_bytes(self) -> Int:
        """Bytes of a tap of the slab's filters."""
        return SLAB * self.row_bytes()

    def filter_bytes(self) -> Int:
        """Bytes of the slab's filters."""
        return self.taps * self.taps * self.tap_bytes()

    def buffers_offset(self) -> Int:
        """Shared memory before the outputs: barriers and filters."""
        return PATTERN_BYTES + self.filter_bytes()

    def ring_offset(self, buffers: Int) -> Int:
        """Shared memory before the windows.

        Args:
            buffers: Tiles' outputs.
        """
        return self.buffers_offset() + buffers * TILE_BYTES

    def most_stages(self, buffers: Int) -> Int:
        """Windows that shared memory holds, as many for each team: two teams
        that took turns at one would not know its rounds apart.

        Args:
            buffers: Tiles' outputs.
        """
        var free = MAX_SHARED_BYTES - self.ring_offset(buffers)
        var stages = min(free // self.stage_bytes(), MAX_SLAB_STAGES)
        return stages // TEAMS * TEAMS


@fieldwise_init
struct SlabTiling(ImplicitlyCopyable, Movable, Writable):
    """How a problem is cut into slabs and tiles."""

    var slabs: Int
    var slab_blocks: Int
    """Blocks of each slab."""
    var tiles: Int
    """Of a slab."""
    var row_tiles: Int
    """Of an image."""
    var column_tiles: Int
    var buffers: Int
    """Tiles' outputs in shared memory."""
    var stages: Int
    """Windows in shared memory."""
    var ring_offset: Int
    """Shared memory before the windows."""
    var shared_bytes: Int
    """Of a block."""

    def __init__(
        out self,
        config: DiagonalConfig,
        problem: ConvProblem,
        multiprocessors: Int,
        has_residual: Bool,
    ):
        """Cuts a problem, one block a multiprocessor.

        Args:
            config: A configuration that does not refuse the problem.
            problem: The convolution, with at least one output.
            multiprocessors: Of the device.
            has_residual: Whether a residual is loaded.
        """
        var shape = SlabShape.of(config)
        self.slabs = ceildiv(problem.channels, SLAB)
        self.row_tiles = ceildiv(problem.output[1], SQUARE)
        self.column_tiles = ceildiv(problem.output[2], SQUARE)
        self.tiles = (
            problem.batch
            * problem.output[0]
            * self.row_tiles
            * self.column_tiles
        )
        self.slab_blocks = min(
            max(multiprocessors // self.slabs, 1), self.tiles
        )
        # More for residuals, as long as they cost no window.
        var stages = shape.most_stages(FEWEST_BUFFERS)
        self.buffers = FEWEST_BUFFERS
        if has_residual:
            while (
                self.buffers < MOST_BUFFERS
                and shape.most_stages(self.buffers + TEAMS) == stages
            ):
                self.buffers += TEAMS
        var most = ceildiv(ceildiv(self.tiles, self.slab_blocks), TEAMS) * TEAMS
        self.stages = min(stages, most)
        self.ring_offset = shape.ring_offset(self.buffers)
        self.shared_bytes = self.ring_offset + self.stages * shape.stage_bytes()

    def blocks(self) -> Int:
        """Blocks of a launch."""
        return self.slabs * self.slab_blocks

    @staticmethod
    def suits(
        config: DiagonalConfig, problem: ConvProblem, multiprocessors: Int
    ) -> Bool:
        """Whether a problem is cut so: groups of several chunks of channels, by
        timings of 47 convolutions on an H200.

        Args:
            config: A configuration that does not refuse the problem.
            problem: The convolution.
            multiprocessors: Of the device.
        """
        if config.group_chunks == 1:
            return False
        var tiling = SlabTiling(config, problem, multiprocessors, False)
        var wide = config.group_chunks >= WIDE_CHUNKS
        return tiling.slabs <= multiprocessors and tiling.share(
            problem, multiprocessors
        ) >= (WIDE_SHARE if wide else NARROW_SHARE)

    def share(self, problem: ConvProblem, multiprocessors: Int) -> Float64:
        """Outputs of a problem, over those that its blocks can compute in the
        same time: beyond an image, behind the last channel, and on
        multiprocessors that have no block while others have several tiles.

        Args:
            problem: The convolution.
            multiprocessors: Of the device.
        """
        var outputs = problem.gemm_m() * problem.channels
        var most = self.tiles * SQUARE * SQUARE * self.slabs * SLAB
        var share = Float64(outputs) / Float64(most)
        if self.slab_blocks < self.tiles:
            share *= Float64(self.blocks()) / Float64(multiprocessors)
        return share

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line."""
        writer.write(
            t"{self.tiles} tiles of {SQUARE}x{SQUARE} pixels and {SLAB}"
            t" channels for each of {self.slabs} slabs, {self.blocks()} blocks"
            t" of {self.stages} windows, {self.shared_bytes} bytes of shared"
            t" memory"
        )


@fieldwise_init
struct SlabPlace(TrivialRegisterPassable):
    """Where a tile is."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    """The first output row."""
    var column: UInt32
    """The first output column."""


@fieldwise_init
struct SlabGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the slab kernel sees it."""

    var channels: UInt32
    var slabs: SmallDivisor
    var slab_blocks: UInt32
    """Blocks of each slab."""
    var tiles: UInt32
    """Of a slab."""
    var column_tiles: Divisor
    """Of an image."""
    var row_tiles: Divisor
    var planes: Divisor
    """Output planes."""
    var buffers: UInt32
    """Tiles' outputs in shared memory."""
    var stages: UInt32
    """Windows in shared memory."""
    var ring_offset: UInt32
    """Shared memory before the windows."""
    var step_d: Int32
    var start_d: Int32
    var start_h: Int32
    var start_w: Int32
    var out_rows: UInt32
    var out_columns: UInt32

    @staticmethod
    def of(problem: ConvProblem, tiling: SlabTiling) -> SlabGeometry:
        """Builds the geometry from a problem and its cut.

        Args:
            problem: The convolution.
            tiling: Its cut.
        """
        return SlabGeometry(
            channels=UInt32(problem.channels),
            slabs=SmallDivisor(tiling.slabs),
            slab_blocks=UInt32(tiling.slab_blocks),
            tiles=UInt32(tiling.tiles),
            column_tiles=Divisor(tiling.column_tiles),
            row_tiles=Divisor(tiling.row_tiles),
            planes=Divisor(problem.output[0]),
            buffers=UInt32(tiling.buffers),
            stages=UInt32(tiling.stages),
            ring_offset=UInt32(tiling.ring_offset),
            step_d=Int32(problem.stride[0]),
            start_d=Int32(-problem.pad_before[0]),
            start_h=Int32(-problem.pad_before[1]),
            start_w=Int32(-problem.pad_before[2]),
            out_rows=UInt32(problem.output[1]),
            out_columns=UInt32(problem.output[2]),
        )

    @always_inline
    def place(self, tile: UInt32) -> SlabPlace:
        """Where a tile is; columns change the fastest, images the slowest.

        Args:
            tile: Of a slab's.
        """
        var rest, across = self.column_tiles.split(tile)
        var plane_of_image, down = self.row_tiles.split(rest)
        var image, plane = self.planes.split(plane_of_image)
        return SlabPlace(
            image, plane, down * UInt32(SQUARE), across * UInt32(SQUARE)
        )

    @always_inline
    def output_offset(self, place: SlabPlace, p: UInt32, q: UInt32) -> Int:
        """Elements before an output pixel.

        Args:
            place: A tile of its image and plane.
            p: The row.
            q: The column.
        """
        var plane = Int(place.image) * Int(self.planes.value) + Int(place.plane)
        var line = plane * Int(self.out_rows) + Int(p)
        return (line * Int(self.out_columns) + Int(q)) * Int(self.channels)


struct SlabWork(TrivialRegisterPassable):
    """The tiles of a block."""

    var channel: UInt32
    """The slab's first."""
    var part: UInt32
    """The first tile, of the slab's."""
    var count: UInt32
    """One or more, as no slab has fewer than it has blocks."""

    @always_inline
    def __init__(out self, geometry: SlabGeometry, block: UInt32):
        """Every tile of a slab whose number is the block's own, modulo the
        slab's blocks.

        Args:
            geometry: The problem.
            block: The block.
        """
        var part, slab = geometry.slabs.split(block)
        self.channel = slab * UInt32(SLAB)
        self.part = part
        self.count = (
            geometry.tiles - part + geometry.slab_blocks - 1
        ) // geometry.slab_blocks

    @always_inline
    def place(self, geometry: SlabGeometry, index: UInt32) -> SlabPlace:
        """Where a tile is.

        Args:
            geometry: The problem.
            index: Of the tile, of the block's.
        """
        return geometry.place(self.part + index * geometry.slab_blocks)


@always_inline
def descriptor_half[row_bytes: Int](distance: Int) -> UInt32:
    """The upper half of a matrix descriptor (PTX ISA, "Matrix descriptor
    format"): the distance of 8-row groups, and the swizzle.

    Parameters:
        row_bytes: Of the swizzle's span: 32, 64 or 128.

    Args:
        distance: In bytes.
    """
    comptime swizzle = 1 if row_bytes == 128 else 2 if row_bytes == 64 else 3
    return UInt32(distance // CHUNK_BYTES) | UInt32(swizzle << 30)
