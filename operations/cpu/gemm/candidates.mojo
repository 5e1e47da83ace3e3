"""The cuts that the implicit GEMM can run a problem with, and the model of how
long each takes."""

from std.collections import Optional
from std.math import ceildiv, gcd
from std.sys.info import size_of

from ...conv.fields import PANEL
from ...conv.operands import OperandTypes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ...conv.search import Candidates, cheapest
from ..config import CPU_TILE, reads_in_place, wide_tile_rows
from .scheduler import (
    ACCESS_GATHER,
    ACCESS_MATRIX,
    ACCESS_STRIPS,
    MAX_BLOCK_TILES,
    Blocking,
    Tiling,
    gathered_stride,
)
from .strips import copies_pay, longest_slice, strip_elements
from .tile_io import is_adjacent, may_miss_image

comptime BYTES_PER_STEP = 8
"""Bytes of activation or packed filter that reach L2 in the time of one vector
multiply-add: a model, good enough to weigh reading them twice against an idle
thread."""

comptime GATHERED_PER_STEP = 4
"""Elements gathered in the time of one vector multiply-add."""

comptime MAX_BLOCK_ELEMENTS = 1 << 17
"""Activations of the largest task's slice: half of a common L2 cache."""

comptime STREAMED_ELEMENTS = 1 << 20
"""Packed filter beyond which panels arrive from memory, or nearly so."""

comptime MIN_STRIP_ROWS = 5
"""Pixels of a register tile, in the mean, whose accumulators still hide the
latency of a multiply-add."""

comptime SHORT_TILE_COST = 0.1
"""How much longer a product of a tile of few rows takes than one of a whole
tile's."""

comptime NARROW_TILE_COST = 1.04
"""How much longer a product takes where a tile reads the matrix and has fewer panels
than a tile of fewer pixels would have."""

comptime COPY_COST = 0.1
"""Gathering an element, in products of it with a panel."""

comptime SEGMENT_COST = 15.0
"""Gathering the elements of a row that lie side by side, in the same unit."""

comptime L1_WAY_BYTES = 4096
"""Bytes that lie in different sets of L1: 64 sets of a cache line each, as x86
and most Arm cores have at least."""

comptime L1_WAYS = 8
"""Lines of one set of L1."""

comptime TASK_TILES = 8
"""Register tiles of pixels of the largest task that is searched."""

comptime SHORT_TASK_PIXELS = 112
"""Pixels of the largest task that is searched where products are few: what a task
costs beside them is seen there."""

comptime SHORT_TASK_ELEMENTS = 1 << 14
"""Activations of such a task."""

comptime THREAD_CUTS = 4
"""Parts that filters are cut into at most, for each thread."""


def rows_compete(problem: ConvProblem, rows: Int) -> Bool:
    """Whether the rows of a register tile, read where they lie, compete for
    sets of L1: each line would be evicted before all of it is read. Gathered
    rows do not (`row_stride`).

    Args:
        problem: The convolution.
        rows: Pixels of the tile.
    """
    var bytes = problem.stride[2] * problem.channels * size_of[DType.float32]()
    var sets_apart = L1_WAY_BYTES // gcd(bytes, L1_WAY_BYTES)
    return ceildiv(rows, sets_apart) > L1_WAYS


def _matrix_rows(problem: ConvProblem) -> List[Int]:
    """Pixels of a register tile where the activation is the matrix: where there
    are filters for a wide tile, few too. Such tiles write longer pieces of each
    pixel's outputs, and read less often what they multiply."""
    var sizes = List[Int]()
    if not rows_compete(problem, CPU_TILE.rows):
        sizes.append(CPU_TILE.rows)
    var wide = wide_tile_rows()
    if (
        wide < CPU_TILE.rows
        and problem.panels() > CPU_TILE.panels
        and not rows_compete(problem, wide)
    ):
        sizes.append(wide)
    return sizes^


def _most_tiles(rows: Int, depth: Int) -> Int:
    """Register tiles of pixels of the largest task that is searched: wide ones
    have fewer pixels, and a task as many as otherwise.

    Args:
        rows: Pixels of a tile.
        depth: Products of a slice.
    """
    var tiles = TASK_TILES
    if rows == wide_tile_rows():
        tiles = TASK_TILES * CPU_TILE.rows // rows
    if SHORT_TASK_PIXELS * depth <= SHORT_TASK_ELEMENTS:
        # Tiles of AVX-512 have as many pixels as that anyway.
        comptime if TASK_TILES * CPU_TILE.rows < SHORT_TASK_PIXELS:
            tiles = SHORT_TASK_PIXELS // rows
    return min(MAX_BLOCK_TILES, tiles)


def _lines_share(problem: ConvProblem) -> Float64:
    """Filter rows of all output pixels that read a row of the image, in those
    that there are.

    Args:
        problem: The convolution, with at least one output.
    """
    var share = 1.0
    comptime for axis in [0, 1]:
        var taps = 0
        for at in range(problem.output[axis]):
            var first = at * problem.stride[axis] - problem.pad_before[axis]
            taps += problem.taps_before(axis, first, problem.input[axis])
            taps -= problem.taps_before(axis, first, 0)
        var all = problem.output[axis] * problem.filter[axis]
        share *= Float64(taps) / Float64(all)
    return share


def strips_pay(problem: ConvProblem, tiling: Tiling) -> Bool:
    """Whether tiles that keep to image rows take no longer than tiles of
    gathered rows, by a model: they compute excess pixels of each line and have
    fewer rows, but nothing is gathered and filter rows in the padding are left
    out.

    Args:
        problem: The convolution of one group, with at least one output.
        tiling: Of a line of the output image.
    """
    var lines = _lines_share(problem)
    # Gathered rows leave out some of these taps too.
    if may_miss_image(problem):
        lines = (lines + 1) / 2
    var rows = Float64(tiling.length) / Float64(tiling.per_line)
    var short = 1 - rows / Float64(CPU_TILE.rows)
    var strips = lines * (1 + SHORT_TILE_COST * short)
    strips *= Float64(tiling.computed()) / Float64(tiling.length)
    var segment = problem.group_channels()
    if is_adjacent(problem):
        segment *= problem.filter[2]
    var gather = COPY_COST + SEGMENT_COST / Float64(segment)
    return strips <= 1 + gather / Float64(problem.panels())


def choose_access(problem: ConvProblem, in_place: Bool) -> Int:
    """How the tiles of a problem read the activation.

    Args:
        problem: The convolution, not depthwise.
        in_place: Whether they can read it where it lies (`reads_in_place`).

    Returns:
        An `ACCESS_*` code.
    """
    if in_place and problem.groups == 1 and problem.is_pointwise():
        if len(_matrix_rows(problem)) == 0:
            return ACCESS_GATHER
        return ACCESS_MATRIX
    if problem.groups == 1 and rows_compete(problem, CPU_TILE.rows):
        return ACCESS_GATHER
    var width = problem.output[2]
    var tiling = Tiling(1, width)
    # Gathered rows of several groups would be gathered group by group.
    if problem.groups == 1:
        if tiling.computed() < tiling.per_line * MIN_STRIP_ROWS:
            return ACCESS_GATHER
        if not strips_pay(problem, tiling):
            return ACCESS_GATHER
    if longest_slice(problem) < PANEL:
        return ACCESS_GATHER
    if not copies_pay(problem, tiling.rows, tiling.per_line, in_place):
        return ACCESS_GATHER
    return ACCESS_STRIPS


def _slice_depth(problem: ConvProblem, access: Int, products: Int) -> Int:
    """Products of a slice: slices of about one length, in whole `PANEL`s."""
    var longest = CPU_TILE.max_depth
    if access == ACCESS_STRIPS:
        longest = min(longest, longest_slice(problem) // PANEL * PANEL)
    var slices = ceildiv(products, longest)
    return ceildiv(ceildiv(products, slices), PANEL) * PANEL


@fieldwise_init
struct FilterCut(Equatable, ImplicitlyCopyable, Movable):
    """A cut of the filters: groups first, then the panels of each."""

    var group_count: Int
    """Groups of a task."""
    var unit_count: Int
    """Register tiles of a task, side by side over a group's panels."""

    def __init__(out self, problem: ConvProblem, parts: Int):
        """Cuts into about so many parts.

        Args:
            problem: The convolution.
            parts: How many.
        """
        var units = ceildiv(problem.panels(), CPU_TILE.panels)
        self.group_count = ceildiv(problem.groups, parts)
        self.unit_count = ceildiv(units, ceildiv(parts, problem.groups))


struct Blockings(Candidates):
    """Every cut of a problem: pixels by tiles, filters by parts."""

    var problem: ConvProblem
    var threads: Int
    var table: List[Blocking]
    var finest: Optional[FilterCut]
    """The cut whose sums may leave L2: that of the most parts, unless fewer
    parts make the same."""

    def __init__(
        out self, problem: ConvProblem, types: OperandTypes, threads: Int
    ):
        """Lists the cuts.

        Args:
            problem: The convolution, not depthwise.
            types: Of the operands.
            threads: How many threads there are.
        """
        self.problem = problem
        self.threads = threads
        self.table = List[Blocking]()
        var in_place = reads_in_place(types.input, types.fused_input)
        var access = choose_access(problem, in_place)
        var panel = problem.panel_layout(types.input)
        var tilings = List[Tiling]()
        if access == ACCESS_MATRIX:
            for rows in _matrix_rows(problem):
                tilings.append(Tiling(1, problem.gemm_m(), most_rows=rows))
        elif access == ACCESS_STRIPS:
            var width = problem.output[2]
            tilings.append(Tiling(problem.gemm_m() // width, width))
        else:
            tilings.append(Tiling(1, problem.gemm_m()))
        var units = ceildiv(problem.panels(), CPU_TILE.panels)
        # Only strips of the image serve several groups at once.
        var fewest = 1 if access == ACCESS_STRIPS else problem.groups
        var most = max(
            fewest, min(problem.groups * units, THREAD_CUTS * threads)
        )
        self.finest = None
        var cuts = List[FilterCut]()
        for parts in range(fewest, most + 1):
            var cut = FilterCut(problem, parts)
            if len(cuts) == 0 or cut != cuts[len(cuts) - 1]:
                cuts.append(cut)
                if parts == most:
                    self.finest = cut
        var depth = _slice_depth(problem, access, panel.depth())
        for tiling in tilings:
            var most_tiles = min(
                _most_tiles(tiling.rows, depth), tiling.tiles()
            )
            for tiles in range(most_tiles, 0, -1):
                for cut in cuts:
                    self.table.append(
                        blocking_of(
                            problem, access, tiling, tiles, cut, panel, depth
                        )
                    )

    def count(self) -> Int:
        return len(self.table)

    def refusal(self, index: Int) -> Optional[String]:
        """See `Candidates`: the slices and the sums of a task stay in L2."""
        ref blocking = self.table[index]
        if self.finest:
            var finest = self.finest.value()
            if finest == FilterCut(blocking.group_count, blocking.units()):
                return _slice_refusal(blocking)
        return cache_refusal(blocking)

    def cost(self, index: Int) -> Float64:
        """See `Candidates`: in vector multiply-adds."""
        return blocking_cost(self.table[index], self.threads)


def _slice_refusal(blocking: Blocking) -> Optional[String]:
    """Why the slice of a task does not stay in L2, or None."""
    var read = blocking.tiling.rows * blocking.depth * blocking.group_count
    var block = blocking.tiles * max(read, blocking.tile_elements)
    if blocking.tiles == 1 or block <= MAX_BLOCK_ELEMENTS:
        return None
    return String(
        t"a task's slice has {block} activations; at most"
        t" {MAX_BLOCK_ELEMENTS} stay in L2"
    )


def cache_refusal(blocking: Blocking) -> Optional[String]:
    """Why the slice, or the sums, of a task do not stay in L2, or None.

    Args:
        blocking: The cut.
    """
    var refusal = _slice_refusal(blocking)
    if refusal:
        return refusal
    var sums = blocking.sums()
    if sums <= CPU_TILE.max_accumulators:
        return None
    return String(
        t"a task has {sums} sums; at most {CPU_TILE.max_accumulators} stay in"
        t" L2"
    )


def blocking_cost(blocking: Blocking, threads: Int) -> Float64:
    """The model's time of a cut, in vector multiply-adds.

    Args:
        blocking: The cut.
        threads: How many threads there are.
    """
    var products = blocking.products
    var rows = blocking.tiles * blocking.tiling.rows
    var columns = blocking.panels * PANEL
    var multiply = Float64(rows * blocking.panels * products)
    if blocking.access == ACCESS_MATRIX and blocking.is_narrow():
        multiply *= NARROW_TILE_COST
    var read = (rows + columns) * products * 4 // BYTES_PER_STEP
    if blocking.access == ACCESS_GATHER:
        read += rows * products // GATHERED_PER_STEP
    var rounds = ceildiv(blocking.tasks(), threads)
    return (multiply + Float64(read)) * Float64(blocking.group_count * rounds)


def blocking_of(
    problem: ConvProblem,
    access: Int,
    tiling: Tiling,
    tiles: Int,
    cut: FilterCut,
    panel: PanelLayout,
    depth: Int,
) -> Blocking:
    """A cut.

    Args:
        problem: The convolution, not depthwise.
        access: An `ACCESS_*` code.
        tiling: Of the output pixels.
        tiles: Register tiles of a task's pixels.
        cut: Of the filters.
        panel: The order of the packed filter's elements.
        depth: Products of a slice, a multiple of `PANEL`.
    """
    var panels = problem.panels()
    var units = ceildiv(panels, CPU_TILE.panels)
    var tile_elements = tiling.rows * gathered_stride(
        depth, size_of[DType.float32]()
    )
    if access == ACCESS_STRIPS:
        tile_elements = strip_elements(
            problem, panel, tiling.rows, depth, cut.group_count
        )
    return Blocking(
        access=access,
        tiling=tiling,
        tiles=tiles,
        panels=min(cut.unit_count * CPU_TILE.panels, panels),
        group_count=cut.group_count,
        depth=depth,
        products=panel.depth(),
        row_blocks=ceildiv(tiling.tiles(), tiles),
        panel_blocks=ceildiv(units, cut.unit_count),
        group_blocks=ceildiv(problem.groups, cut.group_count),
        tile_elements=tile_elements,
        streams=problem.packed_groups() * problem.panels() * panel.elements()
        > STREAMED_ELEMENTS,
    )


def choose_blocking(
    problem: ConvProblem, types: OperandTypes, threads: Int
) -> Blocking:
    """The cut that a model of multiply-adds, gathers and filter traffic finds
    fastest on this many threads.

    Args:
        problem: The convolution, not depthwise, with at least one output.
        types: Of the operands.
        threads: How many threads there are.
    """
    var candidates = Blockings(problem, types, threads)
    var found = cheapest(candidates)
    # Where all refuse, the smallest task is the last one listed.
    var index = found.index if found.index >= 0 else candidates.count() - 1
    return candidates.table[index]
