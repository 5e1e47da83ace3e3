"""Where blocks and threads of the strip kernel are in the problem."""

from max.gpu import block_idx, thread_idx
from std.utils import IndexList

from ..conv.problem import SPATIAL
from .depthwise_strips import COLUMNS, LANES, StripConfig, StripGeometry


@fieldwise_init
struct StripBlock(TrivialRegisterPassable):
    """Where a block and a thread of it are in the problem."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    """The block's first output row."""
    var end: UInt32
    """Behind its last."""
    var column: UInt32
    """The thread's first output column."""
    var channel: UInt32
    """The thread's first channel."""
    var block_channel: UInt32
    var d: Int32
    var h: Int32
    var w: Int32
    """The block's first input pixel."""
    var last_h: Int32
    """Behind its last input row."""
    var active: Bool
    """Whether the thread has channels and columns."""
    var strip: UInt32
    var lane: UInt32

    @always_inline
    def __init__(out self, config: StripConfig, geometry: StripGeometry):
        """Finds them.

        Args:
            config: The configuration.
            geometry: The problem.
        """
        var rest, slab = geometry.slabs.split(UInt32(block_idx.x))
        var more, group = geometry.groups.split(rest)
        var down, segment = geometry.segments.split(more)
        self.image, self.plane = geometry.out_planes.split(down)
        var strip, lane = divmod(UInt32(thread_idx.x), UInt32(LANES))
        # What is behind the last strip reads the last.
        self.strip = min(strip, geometry.strips - 1)
        self.lane = lane
        self.row = segment * geometry.rows
        self.end = min(self.row + geometry.rows, geometry.out_rows)
        var first = group * geometry.strips * UInt32(COLUMNS)
        self.column = first + self.strip * UInt32(COLUMNS)
        self.block_channel = slab * UInt32(LANES * config.width)
        self.channel = self.block_channel + self.lane * UInt32(config.width)
        self.d = Int32(self.plane) * geometry.step_d + geometry.start_d
        self.h = Int32(self.row) * Int32(config.stride) + geometry.start_h
        self.w = Int32(first) * Int32(config.stride) + geometry.start_w
        var steps = (self.end - self.row + UInt32(config.rows() - 1)) // UInt32(
            config.rows()
        )
        self.last_h = (
            self.h
            + Int32(steps) * Int32(config.step_rows())
            + Int32(config.window() - config.step_rows())
        )
        self.active = (
            strip < geometry.strips and self.channel < geometry.channels
        )
        if not self.active:
            self.channel = 0

    @always_inline
    def output_offset(self, geometry: StripGeometry) -> Int:
        """Elements in front of the thread's first output.

        Args:
            geometry: The problem.
        """
        var plane = Int(self.image) * Int(geometry.out_planes.value) + Int(
            self.plane
        )
        var line = plane * Int(geometry.out_rows) + Int(self.row)
        return (line * Int(geometry.out_columns) + Int(self.column)) * Int(
            geometry.channels
        ) + Int(self.channel)


struct StripPlace(TrivialRegisterPassable):
    """Where a thread's outputs of a step are."""

    var image: Int
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var channel: Int
    var offset: Int
    """Of the first output."""
    var row_elements: Int
    """From a row to the next."""
    var channels: UInt32
    var rows_left: UInt32
    """Rows of the block from here on; none if the thread has no outputs."""
    var columns_left: UInt32

    @always_inline
    def __init__(
        out self,
        geometry: StripGeometry,
        block: StripBlock,
        row: UInt32,
        offset: Int,
    ):
        """Finds them.

        Args:
            geometry: The problem.
            block: The block.
            row: The step's first row.
            offset: The first output's offset.
        """
        self.image = Int(block.image)
        self.plane = block.plane
        self.row = row
        self.column = block.column
        self.channel = Int(block.channel)
        self.offset = offset
        self.row_elements = Int(geometry.out_columns) * Int(geometry.channels)
        self.channels = geometry.channels
        self.rows_left = block.end - row if block.active else 0
        self.columns_left = geometry.out_columns - min(
            block.column, geometry.out_columns
        )

    @always_inline
    def exists[p: Int, q: Int](self) -> Bool:
        """Whether there is an output.

        Parameters:
            p: Its row of the step.
            q: Its column of the thread.
        """
        return UInt32(p) < self.rows_left and UInt32(q) < self.columns_left

    @always_inline
    def offset_of[p: Int, q: Int](self) -> Int:
        """An output's offset.

        Parameters:
            p: As for `exists`.
            q: As for `exists`.
        """
        return (
            self.offset + p * self.row_elements + Int(UInt32(q) * self.channels)
        )

    @always_inline
    def safe_offset[p: Int, q: Int](self) -> Int:
        """An output's offset, 0 if there is none.

        Parameters:
            p: As for `exists`.
            q: As for `exists`.
        """
        return self.offset_of[p, q]() if self.exists[p, q]() else 0

    @always_inline
    def safe_position[p: Int, q: Int](self) -> IndexList[SPATIAL]:
        """An output's pixel, the first of the plane if there is none.

        Parameters:
            p: As for `exists`.
            q: As for `exists`.
        """
        var there = self.exists[p, q]()
        return IndexList[SPATIAL](
            Int(self.plane),
            Int(self.row) + p if there else 0,
            Int(self.column) + q if there else 0,
        )
