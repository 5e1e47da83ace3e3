"""How the implicit GEMM is cut into tasks."""

from std.math import ceildiv

from ...conv.fields import PANEL
from ...conv.problem import ConvProblem
from ..config import CPU_TILE
from .mma import tile_rows

comptime MAX_BLOCK_TILES = 8
"""Register tiles of pixels of the largest task."""

comptime L1_FILTER_ELEMENTS = 1 << 13
"""Packed filter that may take most of L1."""

comptime ACCESS_GATHER = 0
"""Rows of the implicit im2col matrix are gathered: always possible."""

comptime ACCESS_STRIPS = 1
"""Tiles keep to rows of the output image and read strips of the input image's
rows: where they lie, or copied with their padding."""

comptime ACCESS_MATRIX = 2
"""The activation is the implicit GEMM's matrix as it lies in memory."""


@fieldwise_init
struct RowTile(ImplicitlyCopyable, Movable):
    """Rows `[row, row + rows)` of the implicit GEMM, a register tile's."""

    var row: Int
    var rows: Int


@fieldwise_init
struct Tiling(ImplicitlyCopyable, Movable):
    """A cut of the output pixels into register tiles: `lines` of `length`
    pixels, each in `per_line` tiles of at most `rows`."""

    var lines: Int
    var length: Int
    var per_line: Int
    var rows: Int

    def __init__(out self, lines: Int, length: Int):
        """Cuts lines evenly, since short tiles multiply less in a load, and at
        even pixels, since tiles of an odd number of rows waste one.

        Args:
            lines: How many.
            length: Pixels of each.
        """
        self.lines = lines
        self.length = length
        self.per_line = ceildiv(length, CPU_TILE.rows)
        self.rows = tile_rows(
            min(length, 2 * ceildiv(ceildiv(length, 2), self.per_line))
        )

    def computed(self) -> Int:
        """Pixels of a line that are computed, the excess ones included."""
        return self.length if self.length == 1 else ceildiv(self.length, 2) * 2

    def tiles(self) -> Int:
        """How many tiles there are."""
        return self.lines * self.per_line

    def tile(self, index: Int) -> RowTile:
        """A tile.

        Args:
            index: From 0 to `tiles() - 1`.

        Returns:
            Its rows.
        """
        var line, place = divmod(index, self.per_line)
        var pairs = ceildiv(self.length, 2)
        var first = place * pairs // self.per_line * 2
        var end = min((place + 1) * pairs // self.per_line * 2, self.length)
        return RowTile(line * self.length + first, end - first)


@fieldwise_init
struct Blocking(ImplicitlyCopyable, Movable, Writable):
    """A cut of the implicit GEMM into tasks of `tiles x panels` register
    tiles of `group_count` groups, each accumulated over slices of `depth`
    products."""

    var access: Int
    """An `ACCESS_*` code."""
    var tiling: Tiling
    var tiles: Int
    var panels: Int
    var group_count: Int
    var depth: Int
    var row_blocks: Int
    var panel_blocks: Int
    var group_blocks: Int
    var tile_elements: Int
    """Float32 values of scratch that a tile's activations take."""
    var streams: Bool
    """Whether panels are fetched ahead: the filter is too large for caches."""

    def tasks(self) -> Int:
        """How many tasks there are."""
        return self.row_blocks * self.panel_blocks * self.group_blocks

    def gathered_stride(self) -> Int:
        """Elements between two gathered rows."""
        return row_stride(self.depth)

    def units(self) -> Int:
        """Register tiles side by side over a group's panels of a task."""
        return ceildiv(self.panels, CPU_TILE.panels)

    def sums(self, products: Int) -> Int:
        """Register tiles whose partial sums a task keeps: all, or one where no
        sum outlives its tile.

        Args:
            products: Of an output.
        """
        if self.depth >= products:
            return 1
        return self.tiles * self.group_count * self.units()

    def activations(self) -> Int:
        """Float32 values of scratch that a task's activations take: those of
        its tiles, or of one where only the last is gathered."""
        var tiles = 1 if self.access == ACCESS_MATRIX else self.tiles
        return tiles * self.tile_elements

    def cached_panels(self) -> Int:
        """Panels that are multiplied by one tile after the other: as many as
        stay in L1, so that a tile's output is written in long pieces."""
        var unit = self.depth * CPU_TILE.columns()
        return max(1, L1_FILTER_ELEMENTS // unit) * CPU_TILE.panels

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line.

        Args:
            writer: Where to.
        """
        writer.write(
            t"{self.tasks()} tasks of {self.tiles * self.tiling.rows} pixels x"
            t" {self.panels * self.group_count * PANEL} filters,"
            t" {self.depth} products deep"
        )


def row_stride(depth: Int) -> Int:
    """Elements between two gathered rows: room for the gather's excess, and an
    odd number of cache lines, so that the rows of a tile do not compete for
    one cache set.

    Args:
        depth: Products of a row.
    """
    return ((ceildiv(depth, PANEL) + 1) | 1) * PANEL


@fieldwise_init
struct Task(ImplicitlyCopyable, Movable):
    """A block of outputs: register tiles of pixels by panels of some groups."""

    var group: Int
    var groups: Int
    var tile: Int
    var tiles: Int
    var panel: Int
    var panels: Int

    def __init__(
        out self, problem: ConvProblem, blocking: Blocking, index: Int
    ):
        """The block of a task, neighbouring tasks sharing filter panels.

        Args:
            problem: The convolution.
            blocking: The cut.
            index: From 0 to `blocking.tasks() - 1`.
        """
        var rest, row_block = divmod(index, blocking.row_blocks)
        var group_block, panel_block = divmod(rest, blocking.panel_blocks)
        self.group = group_block * blocking.group_count
        self.groups = min(blocking.group_count, problem.groups - self.group)
        self.tile = row_block * blocking.tiles
        self.tiles = min(blocking.tiles, blocking.tiling.tiles() - self.tile)
        self.panel = panel_block * blocking.panels
        self.panels = min(blocking.panels, problem.panels() - self.panel)
