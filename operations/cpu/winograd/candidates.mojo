"""The cuts that the Winograd kernel can run a problem with, and the model of how
long each takes.

The unit is the multiplication of an output tile by a filter panel, one product
deep: 16 steps of `PANEL` multiply-adds, one for each position.
"""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import PANEL
from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ...conv.search import Candidates, cheapest
from ..config import CPU_TILE
from ..dot.few_filters import few_filters
from ..dot.widening import Widening
from ..gemm.candidates import (
    MAX_BLOCK_ELEMENTS,
    blocking_cost,
    choose_blocking,
)
from ..gemm.scheduler import gathered_stride
from .scheduler import (
    BLOCK_TILES,
    UNITS_AT_ONCE,
    Cut,
    Rounds,
    TileGrid,
    position_depth,
    round_panels,
    transformed_bytes,
)
from .transforms import MAX_TAPS, POSITIONS

comptime SHARED_ELEMENTS = 1 << 21
"""Transformed inputs that stay in a common L3 cache where tasks share them."""

comptime OWN_ELEMENTS = 1 << 19
"""Transformed inputs of a task whose share of such a cache holds them."""

comptime LARGE_FILTER_COST = 7.0
"""Transforming a panel's filters of 3 x 3 taps, one channel."""

comptime SMALL_FILTER_COST = 5.0
"""Transforming a panel's filters of 2 x 2 taps, one channel."""

comptime INPUT_COST = 0.5
"""Transforming a tile's inputs, one channel."""

comptime OUTPUT_COST = 12.0
"""Transforming a tile's sums of a panel; and what their 16 multiplications cost
whatever their depth."""

comptime READ_FILTER_COST = 2.0
"""Fetching a panel's transformed filters, one channel, from L3."""

comptime READ_INPUT_COST = 0.2
"""Fetching a tile's transformed inputs, one channel, from L3."""

comptime INTEGER_TRANSFORMS = 1.3
"""How much longer than those of floats the transforms of integer filters take,
in units, which are half as long: registers hold twice as many, which are made
wide first."""

comptime INTEGER_OUTPUTS = 2.0
"""The same of sums, of which registers hold as many."""

comptime MAX_FILTER_BYTES = 12 << 20
"""Transformed filters of integers up to which this kernel is known to be
faster."""

comptime STEP_COST = 1500.0
"""Starting the threads a second time."""

comptime MAX_PARTS = 4
"""Parts that filters are cut into at most, for each thread, where tasks
transform inputs; more if a part's filters are more than a round's."""

comptime MARGIN = 1.3
"""How much faster than the implicit GEMM of floats the models must find this
kernel: measured with AVX-512 and with AVX2 on 217 small images, and with
AVX-512 on 80 problems of several groups."""

comptime INTEGER_MARGIN = 1.2
"""The same of the implicit GEMM of integers, which counts as its products."""

comptime TILE_COST = 16.0
"""What a group's transforms of a tile take whatever its channels: few channels
do not pay for it."""


struct Cuts(Candidates):
    """The cuts of a problem: the input or the filter transformed first, tiles
    in blocks, panels in blocks."""

    var problem: ConvProblem
    var input: DType
    """The type of activation and filter."""
    var threads: Int
    var table: List[Cut]

    def __init__(out self, problem: ConvProblem, input: DType, threads: Int):
        """Lists the cuts.

        Args:
            problem: The convolution, with at least one output.
            input: The type of activation and filter.
            threads: How many threads there are.
        """
        self.problem = problem
        self.input = input
        self.threads = threads
        self.table = List[Cut]()
        var tiles = TileGrid(problem).count()
        var units = ceildiv(problem.panels(), CPU_TILE.panels)
        # As many as a round's filters ask for, at least.
        var fit = round_panels(problem, input, threads) // CPU_TILE.panels
        var most_parts = max(MAX_PARTS * threads, ceildiv(units, max(1, fit)))
        var most = BLOCK_TILES
        while most >= CPU_TILE.rows:
            var block = _even_block(tiles, most)
            var last = 0
            for parts in range(1, min(units, most_parts) + 1):
                if ceildiv(units, parts) != last:
                    last = ceildiv(units, parts)
                    self._append(False, block, last)
            # Sums of integers are not added to.
            if not input.is_integral():
                for count in range(1, min(units, UNITS_AT_ONCE) + 1):
                    self._append(True, block, count)
            most = most * 2 // 3

    def _append(mut self, shares_input: Bool, tiles: Int, units: Int):
        """Adds a cut into tasks of so many register tiles' panels."""
        self.table.append(
            Cut(
                self.problem,
                shares_input=shares_input,
                tiles=tiles,
                units=units,
            )
        )

    def count(self) -> Int:
        return len(self.table)

    def refusal(self, index: Int) -> Optional[String]:
        """See `Candidates`: transformed inputs stay in L3, and so do the filters
        of a round."""
        ref cut = self.table[index]
        var refusal = cache_refusal(self.problem, self.input, cut)
        if refusal or cut.shares_input or cut.panels <= CPU_TILE.panels:
            return refusal
        var most = round_panels(self.problem, self.input, self.threads)
        if cut.panels <= most:
            return None
        return String(
            t"a task takes {cut.panels} filter panels; at most {most} are"
            t" transformed in a round"
        )

    def cost(self, index: Int) -> Float64:
        """See `Candidates`."""
        return cut_cost(
            self.problem, self.input, self.threads, self.table[index]
        )


def transformed_inputs(problem: ConvProblem, input: DType, cut: Cut) -> Int:
    """Elements of the transformed inputs: of a task, or of a group where tasks
    share them.

    Args:
        problem: The convolution.
        input: The type of activation and filter.
        cut: The cut.
    """
    var tiles = cut.tiles
    if cut.shares_input:
        tiles = TileGrid(problem).count()
    var depth = position_depth(problem)
    return POSITIONS * tiles * gathered_stride(depth, transformed_bytes(input))


def cache_refusal(
    problem: ConvProblem, input: DType, cut: Cut
) -> Optional[String]:
    """Why the transformed inputs of a cut do not stay in L3, or None: those of
    a register tile are what they are.

    Args:
        problem: The convolution.
        input: The type of activation and filter.
        cut: The cut.
    """
    var inputs = transformed_inputs(problem, input, cut)
    var most = OWN_ELEMENTS
    if cut.shares_input:
        most = SHARED_ELEMENTS
    elif cut.tiles <= CPU_TILE.rows:
        return None
    if inputs <= most:
        return None
    return String(
        t"there are {inputs} transformed inputs; at most {most} stay in L3"
    )


def cut_cost(
    problem: ConvProblem, input: DType, threads: Int, cut: Cut
) -> Float64:
    """The model's time of a cut, in its unit.

    Args:
        problem: The convolution, with at least one output.
        input: The type of activation and filter.
        threads: How many threads there are.
        cut: The cut.
    """
    var count = TileGrid(problem).count()
    var depth = Float64(position_depth(problem))
    var tiles = Float64(min(cut.tiles, count))
    var panels = Float64(cut.panels)
    var output_cost = OUTPUT_COST
    var preparation = depth
    var filter_cost = SMALL_FILTER_COST
    if problem.filter[2] == MAX_TAPS:
        filter_cost = LARGE_FILTER_COST
    if input.is_integral():
        output_cost *= INTEGER_OUTPUTS
        filter_cost *= INTEGER_TRANSFORMS
    var task = tiles * panels * (depth + output_cost)
    if cut.shares_input:
        task += depth * (panels * filter_cost + tiles * READ_INPUT_COST)
        preparation *= Float64(count) * INPUT_COST
    else:
        task += depth * (panels * READ_FILTER_COST + tiles * INPUT_COST)
        if transformed_inputs(problem, input, cut) > MAX_BLOCK_ELEMENTS:
            var reads = ceildiv(cut.panels, cut.panels_at_once)
            task += depth * tiles * READ_INPUT_COST * Float64(reads)
        preparation *= Float64(problem.panels()) * filter_cost
    var rounds = Rounds(problem, input, cut, threads)
    var more = rounds.count() - 1
    var tile_blocks = ceildiv(count, cut.tiles)
    var last = rounds.blocks - more * rounds.round_blocks
    var waves = more * ceildiv(rounds.round_blocks * tile_blocks, threads)
    waves += ceildiv(last * tile_blocks, threads)
    return (
        (STEP_COST if threads > 1 else 0.0) * Float64(2 * more + 1)
        + Float64(problem.groups) * preparation / Float64(threads)
        + task * Float64(waves)
    )


def _even_block(count: Int, most: Int) -> Int:
    """Tiles of a block: whole register tiles, in blocks of about one size.

    Args:
        count: Of all blocks.
        most: Of a block, at least a register tile.
    """
    var rows = CPU_TILE.rows
    var blocks = ceildiv(count, most // rows * rows)
    return ceildiv(ceildiv(count, blocks), rows) * rows


def choose_cut(problem: ConvProblem, input: DType, threads: Int) -> Cut:
    """The cut that the model finds fastest.

    Args:
        problem: The convolution, with at least one output.
        input: The type of activation and filter.
        threads: How many threads there are.
    """
    var candidates = Cuts(problem, input, threads)
    return candidates.table[cheapest(candidates).index]


def is_faster(problem: ConvProblem, types: OperandTypes, threads: Int) -> Bool:
    """Whether the models find this kernel faster than the implicit GEMM.

    Args:
        problem: The convolution.
        types: Of the operands.
        threads: How many threads there are.
    """
    if not problem.has_outputs():
        return False
    if types.input.is_integral():
        return _integers_are_faster(problem, types.input, threads)
    var gemm = blocking_cost(choose_blocking(problem, types, threads), threads)
    var cost = cheapest(Cuts(problem, types.input, threads)).cost
    var tiles = Float64(problem.groups * TileGrid(problem).count())
    cost += tiles * TILE_COST / Float64(threads)
    return cost * MARGIN < gemm / Float64(POSITIONS)


def _integers_are_faster(
    problem: ConvProblem, input: DType, threads: Int
) -> Bool:
    """The same of integers, whose implicit GEMM counts as its products, all
    threads busy."""
    if few_filters[Widening](problem, input) > 0:
        return False
    var filter = (
        POSITIONS * position_depth(problem) * problem.groups * problem.panels()
    ) * PANEL
    if filter * transformed_bytes(input) > MAX_FILTER_BYTES:
        return False
    var steps = Float64(
        problem.groups * problem.gemm_m() * problem.panels() * problem.gemm_k()
    )
    var gemm = steps / Float64(POSITIONS * threads)
    return cheapest(Cuts(problem, input, threads)).cost * INTEGER_MARGIN < gemm
