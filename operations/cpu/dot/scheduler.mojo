"""How the dot-product GEMM is cut into tasks, and where a task's activations
lie."""

from std.math import ceildiv

from ...conv.fields import PANEL
from ...conv.problem import ConvProblem
from .mma import CHUNK_WORDS, DotUnit

comptime ACCESS_GATHER = 0
"""Rows of the implicit im2col matrix are copied: always possible."""

comptime ACCESS_IMAGE = 1
"""A rectangle of the image is copied with its padding, and every tap reads it:
taps of a filter row lie side by side, or are whole chunks."""

comptime ACCESS_MATRIX = 2
"""The activation is the implicit GEMM's matrix as it lies in memory."""

comptime ACCESS_LINES = 3
"""Rows of the implicit im2col matrix are copied, of one line of the image: taps
that lie beside it are left out."""


@fieldwise_init
struct Cut(Equatable, ImplicitlyCopyable, Movable):
    """A cut of the outputs into blocks, those of a task."""

    var access: Int
    """An `ACCESS_*` code."""
    var lines: Int
    """Rows of the output image of a block; 1 where pixels are just counted."""
    var columns: Int
    """Pixels of each."""
    var panels: Int
    """Filter panels."""


@fieldwise_init
struct Blocking(ImplicitlyCopyable, Movable, Writable):
    """A cut, and what follows from it."""

    var cut: Cut
    var groups: Int
    """Groups of a task, one after the other: as many as share a cache line of
    outputs, which two threads would take from each other."""
    var images: Int
    """Output images, `N * Z`; 1 where pixels are just counted."""
    var height: Int
    """Lines of an image."""
    var width: Int
    """Pixels of a line."""
    var pitch: Int
    """Positions between two lines of a block."""
    var flat: Bool
    """Whether register tiles go on from line to line, across the positions that
    are no outputs."""
    var input_lines: Int
    """Rows of the input image of a block's rectangle."""
    var input_columns: Int
    """Pixels of each."""
    var row_stride: Int
    """Elements between the activations of two neighbouring pixels."""
    var line_stride: Int
    """Elements between those of two lines."""
    var block_elements: Int
    """What a block's copy takes."""
    var chunks: Int
    """Chunks of products of an output."""
    var depth: Int
    """Products of an output, with the zeros that fill up filter rows."""
    var row_chunks: Int
    """Chunks of a filter row."""
    var last_words: Int
    """Words of a filter row's last chunk that hold products."""

    def are_outputs(self, lines: Int) -> Bool:
        """Whether all positions that the register tiles of a block go through are
        outputs.

        Args:
            lines: Of the block.
        """
        return lines == 1 or not self.flat or self.pitch == self.width

    def words(self) -> Int:
        """Words that hold products of an output."""
        var skipped = CHUNK_WORDS - self.last_words
        var rows = self.chunks // self.row_chunks
        return self.chunks * CHUNK_WORDS - rows * skipped

    def copied_elements(self) -> Int:
        """What a task's copy takes: rectangles of its groups are copied together.
        """
        if self.cut.access == ACCESS_IMAGE:
            return self.groups * self.block_elements
        return self.block_elements

    def rows_offset(self) -> Int:
        """Where rows of blocks that are not finite are copied to: over the block,
        unless another group's is there."""
        return self.copied_elements() if self.groups > 1 else 0

    def line_blocks(self) -> Int:
        """Blocks of an image, one below the other."""
        return ceildiv(self.height, self.cut.lines)

    def column_blocks(self) -> Int:
        """Blocks of an image, side by side."""
        return ceildiv(self.width, self.cut.columns)

    def blocks(self) -> Int:
        """Blocks of pixels."""
        return self.images * self.line_blocks() * self.column_blocks()

    def panel_blocks(self, problem: ConvProblem) -> Int:
        """Parts that a group's panels are cut into.

        Args:
            problem: The convolution.
        """
        return ceildiv(problem.panels(), self.cut.panels)

    def tasks(self, problem: ConvProblem) -> Int:
        """How many tasks there are.

        Args:
            problem: The convolution.
        """
        return (
            self.blocks()
            * self.panel_blocks(problem)
            * ceildiv(problem.groups, self.groups)
        )

    def positions(self, lines: Int, columns: Int) -> Int:
        """Positions that a block goes through, those between lines included.

        Args:
            lines: Of the block.
            columns: Of the block.
        """
        if self.flat:
            return (lines - 1) * self.pitch + columns
        return lines * columns

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line.

        Args:
            writer: Where to.
        """
        if self.cut.access == ACCESS_MATRIX:
            writer.write("activations are read where they lie; ")
        elif self.cut.access == ACCESS_IMAGE:
            writer.write(
                t"rectangles of {self.input_lines} x {self.input_columns}"
                t" pixels are copied with their padding; "
            )
        else:
            writer.write("rows of the im2col matrix are copied; ")
            if self.cut.access == ACCESS_LINES:
                writer.write("taps beside the image are left out; ")
        writer.write(
            t"{self.blocks()} blocks of {self.cut.lines} x {self.cut.columns}"
            t" pixels x {self.cut.panels * PANEL} filters, {self.depth}"
            t" products deep"
        )


@fieldwise_init
struct Strips(ImplicitlyCopyable, Movable):
    """A block's positions as register tiles: strips of lines, each in tiles of one
    size. A short one at the end would multiply less in a load. Where tiles go on
    from line to line, all of them are one."""

    var lines: Int
    """Of the block."""
    var positions: Int
    """Of a line."""
    var rows: Int
    """Positions of a register tile; the last ones of a line may have fewer."""
    var stored: Int
    """Positions of a line whose sums are stored together, in whole register
    tiles."""
    var stored_lines: Int
    """Lines whose sums are."""
    var panels: Int
    """Filter panels of a tile, where the block has as many."""

    @staticmethod
    def of[
        U: DotUnit
    ](
        blocking: Blocking, lines: Int, columns: Int, at_once: Int = U.tiles
    ) -> Strips:
        """The tiles of a block.

        Parameters:
            U: The instructions.

        Args:
            blocking: The cut.
            lines: Of the block.
            columns: Of the block.
            at_once: Register tiles whose sums are stored together.
        """
        var count = 1 if blocking.flat else lines
        var positions = blocking.positions(lines, columns) // count
        var tiles = ceildiv(positions, U.rows)
        var rows = U.rows
        # What multiplies one tile at a time cuts a line into equal ones.
        comptime if U.tiles == 1:
            rows = ceildiv(positions, tiles)
        var stored = rows * ceildiv(tiles, ceildiv(tiles, at_once))
        var stored_lines = max(1, at_once * U.rows // positions)
        comptime if U.tiles == 1:
            stored_lines = 1
        var panels = U.single_panels if rows <= U.single_rows else U.panels
        return Strips(count, positions, rows, stored, stored_lines, panels)

    def tiles(self) -> Int:
        """Register tiles of a line."""
        return ceildiv(self.positions, self.rows)

    def stores(self) -> Int:
        """How often sums of the block are stored, for the panels of a tile."""
        return ceildiv(self.lines, self.stored_lines) * ceildiv(
            self.positions, self.stored
        )


@fieldwise_init
struct Block(ImplicitlyCopyable, Movable):
    """A task's outputs: a rectangle of an output image by panels of a group."""

    var image: Int
    var line: Int
    """The first."""
    var lines: Int
    var column: Int
    """The first."""
    var columns: Int
    var group: Int
    """The first."""
    var groups: Int
    """Of the task."""
    var panel: Int
    """The first."""
    var panels: Int

    def __init__(
        out self,
        problem: ConvProblem,
        blocking: Blocking,
        index: Int,
        images_inside: Bool = False,
    ):
        """The block of a task, neighbouring tasks sharing filter panels.

        Args:
            problem: The convolution.
            blocking: The cut.
            index: From 0 to `blocking.tasks(problem) - 1`.
            images_inside: Whether neighbouring tasks are the same lines of
                neighbouring images, and not the other way round.
        """
        ref cut = blocking.cut
        var parts, block = divmod(index, blocking.blocks())
        var group, part = divmod(parts, blocking.panel_blocks(problem))
        var rest, column = divmod(block, blocking.column_blocks())
        var image, line = divmod(rest, blocking.line_blocks())
        if images_inside:
            line, image = divmod(rest, blocking.images)
        self.image = image
        self.line = line * cut.lines
        self.lines = min(cut.lines, blocking.height - self.line)
        self.column = column * cut.columns
        self.columns = min(cut.columns, blocking.width - self.column)
        self.group = group * blocking.groups
        self.groups = min(blocking.groups, problem.groups - self.group)
        self.panel = part * cut.panels
        self.panels = min(cut.panels, problem.panels() - self.panel)
