"""How the implicit GEMM is cut into tasks."""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL, ROW_BYTES
from ...conv.problem import ConvProblem
from ..config import CPU_TILE, MOST_TILE_PANELS, tile_panels
from .mma import tile_rows

comptime MAX_BLOCK_TILES = 18
"""Register tiles of pixels of the largest task."""

comptime L1_FILTER_ELEMENTS = 1 << 13
"""Packed filter that may take most of L1."""

comptime LONG_DEPTH = 256
"""Products of the shallowest slice whose multiply hides a tile's store, and
during which a tile of output arrives."""

comptime STORED_SUMS = 1 << 11
"""Sums that are stored at once: few enough to stay in L1 beside the filter,
and enough that what a store costs in advance does not show."""

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
        self = Self(lines, length, most_rows=CPU_TILE.rows)

    def __init__(out self, lines: Int, length: Int, *, most_rows: Int):
        """The same, into tiles of no more pixels than are given.

        Args:
            lines: How many.
            length: Pixels of each.
            most_rows: Pixels of a tile, from 1 to `CPU_TILE.rows`; even, unless
                it is 1 or `CPU_TILE.rows`.
        """
        self.lines = lines
        self.length = length
        self.per_line = ceildiv(length, most_rows)
        self.rows = tile_rows(
            min(length, 2 * ceildiv(ceildiv(length, 2), self.per_line))
        )

    def computed(self) -> Int:
        """Pixels of a line that are computed, the excess ones included."""
        return self.length if self.length == 1 else ceildiv(self.length, 2) * 2

    def tiles(self) -> Int:
        """How many tiles there are."""
        return self.lines * self.per_line


struct TileCursor(ImplicitlyCopyable, Movable):
    """Goes through the tiles of a cut without a division for each."""

    var _tiling: Tiling
    var _line: Int
    var _place: Int
    """Of the next tile in its line."""
    var _first: Int
    """The next tile's first pixel in its line, in pairs; and what is left of
    the division that gives it."""
    var _first_rest: Int
    var _pairs: Int
    """Pairs of pixels of a tile; and what is left of them."""
    var _pairs_rest: Int

    def __init__(out self, tiling: Tiling, index: Int):
        """Stands in front of a tile.

        Args:
            tiling: The cut.
            index: From 0 to `tiling.tiles() - 1`.
        """
        var pairs = ceildiv(tiling.length, 2)
        self._tiling = tiling
        self._line, self._place = divmod(index, tiling.per_line)
        self._first, self._first_rest = divmod(
            self._place * pairs, tiling.per_line
        )
        self._pairs, self._pairs_rest = divmod(pairs, tiling.per_line)

    @always_inline
    def next(mut self) -> RowTile:
        """Moves to the next tile.

        Returns:
            The rows of the one behind.
        """
        ref tiling = self._tiling
        var first = self._first * 2
        self._first += self._pairs
        self._first_rest += self._pairs_rest
        if self._first_rest >= tiling.per_line:
            self._first_rest -= tiling.per_line
            self._first += 1
        var rows = min(self._first * 2, tiling.length) - first
        var tile = RowTile(self._line * tiling.length + first, rows)
        self._place += 1
        if self._place == tiling.per_line:
            self._line += 1
            self._place = 0
            self._first = 0
        return tile


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
    var products: Int
    """Of an output, with the zeros that fill up the packed filter's rows."""
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
        return gathered_stride(self.depth, size_of[DType.float32]())

    def tile_panels(self) -> Int:
        """Filter panels of a register tile."""
        return tile_panels(self.tiling.rows)

    def is_narrow(self) -> Bool:
        """Whether a tile of fewer pixels would have more of a task's panels."""
        var panels = self.tile_panels()
        return panels < min(MOST_TILE_PANELS, self.panels)

    def units(self) -> Int:
        """Pieces of `CPU_TILE.panels` of a group's panels of a task."""
        return ceildiv(self.panels, CPU_TILE.panels)

    def is_sliced(self) -> Bool:
        """Whether partial sums outlive their tile."""
        return self.depth < self.products

    def stored_panels(self) -> Int:
        """Panels that a tile is multiplied by, and stored for, one after the
        other: as many as stay in L1, so that its output is written in long
        pieces."""
        var panels = self.tile_panels()
        var columns = panels * PANEL
        var cached = L1_FILTER_ELEMENTS // (self.depth * columns)
        var most = STORED_SUMS // (self.tiling.rows * columns)
        var tiles = max(1, min(cached, most))
        return min(tiles, ceildiv(self.panels, panels)) * panels

    def stored_tiles(self) -> Int:
        """Tiles that are stored together: their pixels lie side by side. A
        store that goes with a long multiply costs less than many at once."""
        if self.is_sliced() or self.depth >= LONG_DEPTH:
            return 1
        var sums = self.tiling.rows * self.stored_panels() * PANEL
        return min(self.tiles, max(1, STORED_SUMS // sums))

    def sums(self) -> Int:
        """Sums that a task keeps: of all its register tiles, or of those that
        are stored together where none outlives its tile."""
        var tiles = self.stored_tiles()
        var columns = self.stored_panels() * PANEL
        if self.is_sliced():
            tiles = self.tiles * self.group_count
            columns = self.columns()
        return tiles * self.tiling.rows * columns

    def columns(self) -> Int:
        """Filters of a group that a task has room for."""
        return self.units() * CPU_TILE.columns()

    def activations(self) -> Int:
        """Float32 values of scratch that a task's activations take: those of
        its tiles, or of one where only the last is gathered."""
        var tiles = 1 if self.access == ACCESS_MATRIX else self.tiles
        return tiles * self.tile_elements

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


def gathered_stride(depth: Int, element: Int) -> Int:
    """Elements between two gathered rows: room for the gather's excess, and an
    odd number of cache lines, so that the rows of a tile do not compete for
    one cache set.

    Args:
        depth: Products of a row.
        element: Bytes of each.
    """
    var unit = ROW_BYTES // element
    return ((ceildiv(depth, unit) + 1) | 1) * unit


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
