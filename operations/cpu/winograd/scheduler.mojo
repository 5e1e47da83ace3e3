"""How the Winograd kernel cuts a problem into tasks.

One operand, input or filter, is transformed first, by all threads, into memory
that they share. The tasks then take blocks of output tiles by filter panels, and
transform their part of the other operand. A large filter is transformed in rounds,
some panels at a time, which the tasks of the round take.
"""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL, ROW_BYTES
from ...conv.problem import ConvProblem
from ...conv.quantization import MAX_PRODUCTS
from ..config import CPU_TILE
from ..gemm.mma import tile_rows
from ..gemm.scheduler import gathered_stride
from ..scheduler import Schedule
from .transforms import INTEGER_SCALE_BITS, POSITIONS, tile_extent

comptime BLOCK_TILES = 192
"""Output tiles of the largest task."""

comptime SLICE_DEPTH = 128
"""Products of a position between two spills of the sums, where a task
transforms filters: a slice of theirs stays in L2."""

comptime UNITS_AT_ONCE = 4
"""Register tiles side by side over filter panels that are multiplied by inputs
which stay in L1."""

comptime INPUT_TILES = 2
"""Output tiles whose inputs a task of the preparation transforms."""

comptime FILTER_DEPTH = 64
"""Products of a filter panel's slice that a task of the preparation transforms.
"""

comptime ROUND_BYTES = 9 << 18
"""Transformed filters of a round, for each thread and for two threads at least:
little memory beside the operands, in L3 while all tasks read it, and with two
threads 8 panels of 512 channels."""

comptime MAX_INTEGER_PRODUCTS = MAX_PRODUCTS >> INTEGER_SCALE_BITS
"""Products of 8-bit integers whose scaled sum int32 holds whatever they are."""


@fieldwise_init
struct TileGrid(ImplicitlyCopyable, Movable):
    """The outputs in square tiles, the last ones perhaps partly outside: lines
    of tiles, one after the other."""

    var extent: Int
    """Outputs of a tile along h and along w."""
    var image_lines: Int
    """Of an image, or of one plane of it along d."""
    var lines: Int
    """Of all images."""
    var length: Int
    """Tiles of a line."""

    def __init__(out self, problem: ConvProblem):
        """Covers the outputs.

        Args:
            problem: The convolution, with as many taps along h as along w.
        """
        self.extent = tile_extent(problem.filter[2])
        self.image_lines = ceildiv(problem.output[1], self.extent)
        self.lines = problem.batch * problem.output[0] * self.image_lines
        self.length = ceildiv(problem.output[2], self.extent)

    def count(self) -> Int:
        """How many tiles there are."""
        return self.lines * self.length


struct Planes(ImplicitlyCopyable, Movable):
    """A transformed operand in memory: for each position a matrix, whose rows
    are tiles or channels."""

    var row: Int
    """Elements between two rows."""
    var plane: Int
    """Elements between two positions: an odd number of cache lines, so that
    positions do not compete for one cache set."""

    def __init__(out self, rows: Int, row: Int, element: Int):
        """Room for some rows.

        Args:
            rows: How many.
            row: Elements of each, whole cache lines.
            element: Bytes of each.
        """
        comptime line = ROW_BYTES
        self.row = row
        self.plane = (rows * row * element // line | 1) * (line // element)

    def elements(self) -> Int:
        """Of all positions."""
        return POSITIONS * self.plane


@fieldwise_init
struct Cut(ImplicitlyCopyable, Movable):
    """A cut into tasks."""

    var shares_input: Bool
    """Whether the input is transformed first, and not the filter."""
    var tiles: Int
    """Output tiles of a task."""
    var panels: Int
    """Filter panels of a task."""
    var panels_at_once: Int
    """Panels whose sums are kept at a time; all of a task's where the input is
    shared."""
    var slice: Int
    """Products of a position between two spills of the sums; all of them unless
    the input is shared."""

    def __init__(
        out self,
        problem: ConvProblem,
        *,
        shares_input: Bool,
        tiles: Int,
        units: Int,
    ):
        """A cut whose sums and slices are as large as usual.

        Args:
            problem: The convolution.
            shares_input: See the fields.
            tiles: The same.
            units: Register tiles side by side over a task's panels.
        """
        var depth = position_depth(problem)
        self.shares_input = shares_input
        self.tiles = tiles
        self.panels = min(problem.panels(), units * CPU_TILE.panels)
        self.panels_at_once = min(UNITS_AT_ONCE * CPU_TILE.panels, self.panels)
        self.slice = min(depth, SLICE_DEPTH) if shares_input else depth


@fieldwise_init
struct Round(ImplicitlyCopyable, Movable):
    """Blocks of filter panels that are transformed together, and multiplied."""

    var block: Int
    """The first, counted over all groups."""
    var blocks: Int
    var panel: Int
    """The first panel, counted over all groups."""
    var panels: Int


@fieldwise_init
struct Rounds(ImplicitlyCopyable, Movable):
    """A cut of all groups' blocks of filter panels into rounds."""

    var blocks: Int
    """Of all rounds."""
    var round_blocks: Int
    """Of the largest round."""
    var group_blocks: Int
    """Of a group."""
    var block_panels: Int
    """Panels of the largest block."""
    var group_panels: Int
    """Panels of a group."""

    def __init__(
        out self, problem: ConvProblem, input: DType, cut: Cut, threads: Int
    ):
        """Cuts into rounds of about one size; into one, where the input is
        shared.

        Args:
            problem: The convolution.
            input: The type of activation and filter.
            cut: The cut.
            threads: How many threads there are.
        """
        self.block_panels = cut.panels
        self.group_panels = problem.panels()
        self.group_blocks = ceildiv(self.group_panels, cut.panels)
        self.blocks = problem.groups * self.group_blocks
        self.round_blocks = self.blocks
        if not cut.shares_input:
            var fit = round_panels(problem, input, threads)
            var most = max(1, fit // cut.panels)
            var count = ceildiv(self.blocks, most)
            self.round_blocks = ceildiv(self.blocks, count)

    def count(self) -> Int:
        """How many rounds there are."""
        return ceildiv(self.blocks, self.round_blocks)

    def most_panels(self) -> Int:
        """Panels of the largest round, at most."""
        return self.round_blocks * self.block_panels

    def round(self, index: Int) -> Round:
        """A round.

        Args:
            index: From 0 to `count() - 1`.
        """
        var block = index * self.round_blocks
        var end = min(block + self.round_blocks, self.blocks)
        var panel = self._panel(block)
        return Round(block, end - block, panel, self._panel(end) - panel)

    def _panel(self, block: Int) -> Int:
        """The first panel of a block, counted over all groups."""
        var group, place = divmod(block, self.group_blocks)
        return group * self.group_panels + place * self.block_panels


def round_panels(problem: ConvProblem, input: DType, threads: Int) -> Int:
    """Panels whose transformed filters are no more than a round's.

    Args:
        problem: The convolution.
        input: The type of activation and filter.
        threads: How many threads there are.
    """
    var element = transformed_bytes(input)
    var panel = Planes(position_depth(problem), PANEL, element)
    return max(2, threads) * ROUND_BYTES // (panel.elements() * element)


@fieldwise_init
struct WinogradPlan(ImplicitlyCopyable, Movable, Writable):
    """A cut into tasks, and their schedules."""

    var taps: Int
    """Of the filter along h and along w."""
    var grid: TileGrid
    var cut: Cut
    var depth: Int
    """Products of a position: channels of a group by taps along d."""
    var tile_blocks: Int
    var rounds: Rounds
    var parts: Int
    """Tasks that transform a panel's filters."""
    var input: Planes
    """The transformed input: of all tiles of a group, or of a task's."""
    var filter: Planes
    """The transformed filter: of a panel, or of a slice of it."""
    var sums: Planes
    """Of a register tile's panels."""
    var own: Int
    """Float32 values of the operand that a task transforms, in its memory."""
    var preparation: Schedule
    """Of all rounds."""
    var multiplication: Schedule
    """Of all rounds."""
    var threads: Int

    def __init__(
        out self, problem: ConvProblem, input: DType, cut: Cut, threads: Int
    ):
        """Cuts a problem.

        Args:
            problem: The convolution, with at least one output.
            input: The type of activation and filter.
            cut: The cut.
            threads: How many threads there are.
        """
        var element = transformed_bytes(input)
        self.threads = threads
        self.cut = cut
        self.taps = problem.filter[2]
        self.grid = TileGrid(problem)
        var tiles = self.grid.count()
        var panels = problem.panels()
        self.depth = position_depth(problem)
        if not cut.shares_input:
            tiles = cut.tiles
        self.input = Planes(
            tile_rows(tiles), gathered_stride(self.depth, element), element
        )
        self.filter = Planes(cut.slice, PANEL, element)
        self.sums = Planes(
            tile_rows(cut.tiles), CPU_TILE.columns(), size_of[DType.float32]()
        )
        self.tile_blocks = ceildiv(self.grid.count(), cut.tiles)
        self.rounds = Rounds(problem, input, cut, threads)
        self.parts = ceildiv(self.depth, FILTER_DEPTH)
        var first = problem.groups * panels * self.parts
        var own = self.input.elements()
        if cut.shares_input:
            first = problem.groups * ceildiv(tiles, INPUT_TILES)
            own = cut.panels * self.filter.elements()
        var outputs = (
            self.grid.extent**2 * tile_rows(cut.tiles) * CPU_TILE.columns()
        )
        self.own = ceildiv(own * element, ROW_BYTES) * PANEL
        self.preparation = Schedule(problem, first, threads, 0)
        self.multiplication = Schedule(
            problem,
            self.rounds.blocks * self.tile_blocks,
            threads,
            self.own
            + ceildiv(cut.panels_at_once, CPU_TILE.panels)
            * (self.sums.elements() + outputs),
        )

    def shared(self, problem: ConvProblem) -> Int:
        """Elements of the operand that is transformed first: of a filter those
        of a round.

        Args:
            problem: The convolution.
        """
        if self.cut.shares_input:
            return problem.groups * self.input.elements()
        var panels = problem.groups * problem.panels()
        return min(panels, self.rounds.most_panels()) * self.filter.elements()

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        var first = StaticString("filter")
        if self.cut.shares_input:
            first = "input"
        var rounds = self.rounds.count()
        var often = String(t" in {rounds} rounds") if rounds > 1 else String()
        writer.write(
            t"F({self.grid.extent}x{self.grid.extent},"
            t" {self.taps}x{self.taps}), the {first} transformed first{often};"
            t" register tile {CPU_TILE.rows} tiles x"
            t" {CPU_TILE.columns()} filters; {self.multiplication.tasks} tasks"
            t" of {min(self.cut.tiles, self.grid.count())} tiles x"
            t" {self.cut.panels * PANEL} filters, {self.cut.slice} products"
            t" deep; {self.threads} threads"
        )


def transformed_bytes(input: DType) -> Int:
    """Bytes of a transformed input or filter value.

    Args:
        input: The type of activation and filter.
    """
    return size_of[DType.int16]() if input.is_integral() else size_of[
        DType.float32
    ]()


def position_depth(problem: ConvProblem) -> Int:
    """Products of a position: channels of a group by taps along d.

    Args:
        problem: The convolution.
    """
    return problem.filter[0] * problem.group_channels()
