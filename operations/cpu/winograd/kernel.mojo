"""The Winograd kernel of the CPU: the tasks of both steps.

    for each round, which is one unless the filter is large:
        transform the filters of its panels, or the input, which all tasks read
        for each task, a block of output tiles by filter panels:
            transform its inputs, or a slice of its filters
            for each of the 16 positions:        a matrix product of its own
                tiles by panels, summed over channels
            transform the sums, epilogue, store
"""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes, sum_type
from ...conv.problem import ConvProblem
from ..accumulators import Accumulators, FilterSums, OutputTile
from ..config import CPU_TILE
from ..epilogue import TileStore
from ..pixel import Pixel
from ..scheduler import Tasks
from .mma import multiply_positions
from .scheduler import FILTER_DEPTH, INPUT_TILES, Round, WinogradPlan
from .transforms import (
    MAX_TAPS,
    MIN_TAPS,
    Patch,
    tile_extent,
    transform_integer_panel,
    transform_panel,
    transform_patch,
    transform_sums,
    transformed_type,
)


@fieldwise_init
struct WinogradParams[dtype: DType](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        dtype: Of activation and filter.
    """

    var activation: Reads[Self.dtype]
    var filter: Reads[Self.dtype]
    """Packed."""
    var zero_point: Int32
    """Of the activation."""
    var output: TileStore
    var problem: ConvProblem
    var plan: WinogradPlan
    var shared: Writes[transformed_type(Self.dtype)]
    """The operand that is transformed first."""
    var round: Round
    """The panels of this round."""


@fieldwise_init
struct Block(ImplicitlyCopyable, Movable):
    """A task: output tiles by filter panels of a group."""

    var group: Int
    var tile: Int
    """The first."""
    var tiles: Int
    var panel: Int
    """The first of the group."""
    var panels: Int

    def __init__(
        out self,
        problem: ConvProblem,
        plan: WinogradPlan,
        round: Round,
        index: Int,
    ):
        """The block of a task, neighbouring tasks sharing filter panels.

        Args:
            problem: The convolution.
            plan: The cut.
            round: The round that the task is of.
            index: Of the round's tasks.
        """
        var place, tile_block = divmod(index, plan.tile_blocks)
        var group, panel_block = divmod(
            round.block + place, plan.rounds.group_blocks
        )
        self.group = group
        self.tile = tile_block * plan.cut.tiles
        self.tiles = min(plan.cut.tiles, plan.grid.count() - self.tile)
        self.panel = panel_block * plan.cut.panels
        self.panels = min(plan.cut.panels, problem.panels() - self.panel)


def transform_inputs(
    params: WinogradParams,
    group: Int,
    tile: Int,
    tiles: Int,
    to: Writes[transformed_type(params.dtype)],
):
    """Transforms the inputs of some tiles, the last one twice if their number
    is odd.

    Args:
        params: The launch.
        group: Whose channels.
        tile: The first tile.
        tiles: How many.
        to: Where to, `params.plan.input`.
    """
    comptime dtype = type_of(params).dtype
    ref problem = params.problem
    ref plan = params.plan
    var channels = problem.group_channels()
    var x = params.activation.unsafe_offset(group * channels)
    # A register tile of an odd number of tiles, but one, reads one too many.
    var rows = 1 if plan.grid.count() == 1 else ceildiv(tiles, 2) * 2
    for i in range(rows):
        var line, place = divmod(tile + min(i, tiles - 1), plan.grid.length)
        var image, p = divmod(line, plan.grid.image_lines)
        var row = image * problem.output[1] + plan.grid.extent * p
        var column = plan.grid.extent * place
        var origin = Pixel(problem, row * problem.output[2] + column).input(
            problem
        )
        for t in range(problem.filter[0]):
            var pixel = origin.tap(problem, t, 0, 0)
            var patch = Patch[dtype](x, problem, pixel, params.zero_point)
            if not pixel.is_inside(problem, 0):
                patch.bottom = 0
            var target = to.unsafe_offset(i * plan.input.row + t * channels)
            if patch.is_inside():
                transform_patch[dtype, True](
                    patch, channels, target, plan.input.plane
                )
            else:
                transform_patch[dtype, False](
                    patch, channels, target, plan.input.plane
                )


def transform_filter(
    params: WinogradParams,
    panel: Int,
    begin: Int,
    end: Int,
    to: Writes[transformed_type(params.dtype)],
):
    """Transforms a slice of a filter panel.

    Args:
        params: The launch.
        panel: The panel, counted over all groups.
        begin: The slice's first product of a position.
        end: The first behind it.
        to: Where to, `params.plan.filter`.
    """
    comptime dtype = type_of(params).dtype
    ref problem = params.problem
    var plane = params.plan.filter.plane
    var taps = params.plan.taps
    var channels = problem.group_channels()
    var layout = problem.panel_layout(dtype)
    var filters = params.filter.unsafe_offset(panel * layout.elements())
    var at = begin
    while at < end:
        var t, channel = divmod(at, channels)
        var count = min(end - at, channels - channel)
        var first = to.unsafe_offset((at - begin) * PANEL)
        comptime for known in range(MIN_TAPS, MAX_TAPS + 1):
            if taps == known:
                var step = t * taps * layout.row_depth + channel
                comptime if dtype.is_integral():
                    transform_integer_panel[known](
                        filters.unsafe_bitcast[Int8](),
                        step,
                        layout.row_depth,
                        channels,
                        count,
                        first.unsafe_bitcast[Int16](),
                        plane,
                    )
                else:
                    transform_panel[dtype, known](
                        filters,
                        step,
                        layout.row_depth,
                        channels,
                        count,
                        first.unsafe_bitcast[Float32](),
                        plane,
                    )
        at += count


@fieldwise_init
struct InputTasks[dtype: DType](Tasks):
    """The first step where the input is shared.

    Parameters:
        dtype: Of activation and filter.
    """

    var params: WinogradParams[Self.dtype]

    def run(self, task: Int, scratch: Writes[DType.float32]):
        ref plan = self.params.plan
        var group, block = divmod(
            task, plan.preparation.tasks // self.params.problem.groups
        )
        var tile = block * INPUT_TILES
        transform_inputs(
            self.params,
            group,
            tile,
            min(INPUT_TILES, plan.grid.count() - tile),
            self.params.shared.unsafe_offset(
                group * plan.input.elements() + tile * plan.input.row
            ),
        )


@fieldwise_init
struct FilterTasks[dtype: DType](Tasks):
    """The first step where the filter is shared.

    Parameters:
        dtype: Of activation and filter.
    """

    var params: WinogradParams[Self.dtype]

    def run(self, task: Int, scratch: Writes[DType.float32]):
        ref plan = self.params.plan
        var panel, part = divmod(task, plan.parts)
        var begin = part * FILTER_DEPTH
        transform_filter(
            self.params,
            self.params.round.panel + panel,
            begin,
            min(begin + FILTER_DEPTH, plan.depth),
            self.params.shared.unsafe_offset(
                panel * plan.filter.elements() + begin * PANEL
            ),
        )


@fieldwise_init
struct BlockTasks[dtype: DType](Tasks):
    """The second step.

    Parameters:
        dtype: Of activation and filter.
    """

    var params: WinogradParams[Self.dtype]

    def run(self, task: Int, scratch: Writes[DType.float32]):
        ref plan = self.params.plan
        var block = Block(self.params.problem, plan, self.params.round, task)
        comptime if not Self.dtype.is_integral():
            if plan.cut.shares_input:
                _run_panels(self.params, block, scratch)
                return
        _run_tiles(self.params, block, scratch)


def _run_panels[
    dtype: DType
](params: WinogradParams[dtype], block: Block, scratch: Writes[DType.float32]):
    """Computes a block from the shared input, slice by slice of its filters."""
    comptime transformed = transformed_type(dtype)
    ref problem = params.problem
    ref plan = params.plan
    var first = block.group * problem.panels() + block.panel
    var filter = scratch.unsafe_bitcast[Scalar[transformed]]()
    var sums = scratch.unsafe_offset(plan.own)
    var input = params.shared.unsafe_offset(
        block.group * plan.input.elements() + block.tile * plan.input.row
    )
    for begin in range(0, plan.depth, plan.cut.slice):
        var end = min(begin + plan.cut.slice, plan.depth)
        for panel in range(block.panels):
            transform_filter(
                params,
                first + panel,
                begin,
                end,
                filter.unsafe_offset(panel * plan.filter.elements()),
            )
        multiply_positions(
            plan,
            block.tiles,
            problem.panel_filters(block.panel, block.panels),
            input.unsafe_offset(begin).as_imm(),
            filter.as_imm(),
            end - begin,
            sums,
            begin > 0,
        )
    _store_sums(params, block, block.panel, block.panels, sums)


def _run_tiles[
    dtype: DType
](params: WinogradParams[dtype], block: Block, scratch: Writes[DType.float32]):
    """Computes a block, all of whose panels read the inputs that it transforms.
    """
    comptime transformed = transformed_type(dtype)
    ref problem = params.problem
    ref plan = params.plan
    var input = scratch.unsafe_bitcast[Scalar[transformed]]()
    var sums = scratch.unsafe_offset(plan.own)
    transform_inputs(params, block.group, block.tile, block.tiles, input)
    var end = block.panel + block.panels
    for panel in range(block.panel, end, plan.cut.panels_at_once):
        var panels = min(plan.cut.panels_at_once, end - panel)
        var place = block.group * problem.panels() + panel - params.round.panel
        var filter = params.shared.unsafe_offset(place * plan.filter.elements())
        multiply_positions(
            plan,
            block.tiles,
            problem.panel_filters(panel, panels),
            input.as_imm(),
            filter.as_imm(),
            plan.depth,
            sums,
            False,
        )
        _store_sums(params, block, panel, panels, sums)


@no_inline
def _transform_tiles[
    sums_type: DType, //, taps: Int
](
    plan: WinogradPlan,
    tile: Int,
    tiles: Int,
    columns: Int,
    sums: Reads[sums_type],
    to: Writes[sums_type],
):
    """Transforms the sums of neighbouring tiles of a line.

    Parameters:
        sums_type: Of the sums.
        taps: Of the filter along an axis.

    Args:
        plan: The cut.
        tile: The first tile of the block.
        tiles: How many.
        columns: Filters of each.
        sums: Those of the block.
        to: Where the lines of the tiles' outputs go.
    """
    comptime extent = tile_extent(taps)
    for i in range(tiles):
        for first in range(0, columns, CPU_TILE.columns()):
            transform_sums[taps](
                sums.unsafe_offset(
                    first // CPU_TILE.columns() * plan.sums.elements()
                    + (tile + i) * plan.sums.row
                ),
                plan.sums.plane,
                min(CPU_TILE.columns(), columns - first),
                to.unsafe_offset(extent * i * columns + first),
                extent * tiles * columns,
                columns,
            )


def _store_sums[
    dtype: DType
](
    params: WinogradParams[dtype],
    block: Block,
    panel: Int,
    panels: Int,
    sums: Writes[DType.float32],
):
    """Transforms the sums of some panels and stores the outputs, line by line
    of tiles."""
    comptime Sum = Scalar[sum_type(dtype)]
    ref problem = params.problem
    ref plan = params.plan
    var units = ceildiv(panels, CPU_TILE.panels)
    var pixels = sums.unsafe_offset(units * plan.sums.elements())
    var extent = plan.grid.extent
    var filter = panel * PANEL
    var filters = problem.panel_filters(panel, panels)
    var columns = panels * PANEL
    var done = 0
    while done < block.tiles:
        var line, place = divmod(block.tile + done, plan.grid.length)
        var run = min(block.tiles - done, plan.grid.length - place)
        var row = extent * run * columns
        comptime for known in range(MIN_TAPS, MAX_TAPS + 1):
            if plan.taps == known:
                _transform_tiles[known](
                    plan,
                    done,
                    run,
                    columns,
                    sums.as_imm().unsafe_bitcast[Sum](),
                    pixels.unsafe_bitcast[Sum](),
                )
        var image, p = divmod(line, plan.grid.image_lines)
        for r in range(min(extent, problem.output[1] - extent * p)):
            var first = image * problem.output[1] + extent * p + r
            var q = extent * place
            _store(
                params,
                OutputTile(
                    first * problem.output[2] + q,
                    min(extent * run, problem.output[2] - q),
                    block.group * problem.gemm_n() + filter,
                    filters,
                ),
                block.group * problem.panels() + panel,
                pixels.unsafe_offset(r * row),
                columns,
            )
        done += run


@always_inline
def _store[
    dtype: DType
](
    params: WinogradParams[dtype],
    tile: OutputTile,
    panel: Int,
    sums: Writes[DType.float32],
    columns: Int,
):
    """Stores neighbouring outputs of an image row, of the panels from the
    `panel`th of all groups on."""
    comptime if dtype.is_integral():
        # Inputs were transformed without their zero point.
        var layout = params.problem.panel_layout(dtype)
        params.output.store_integers(
            params.problem,
            tile,
            Accumulators[DType.int32](
                sums,
                columns,
                FilterSums(
                    params.filter.unsafe_offset(
                        panel * layout.elements() + layout.sums_offset()
                    ).unsafe_bitcast[Int32](),
                    layout.elements() // size_of[DType.int32](),
                    zero_point=0,
                ),
            ),
        )
    else:
        params.output.store(params.problem, tile, sums, columns)
