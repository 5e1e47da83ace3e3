"""The implicit GEMM of the CPU: a task's loops over depth, filters and pixels.

    for each slice of the products:
        for each register tile of pixels:        the tiles' rows stay in L2
            activations in place, or copied if the tile meets an edge
        for some filter panels:                  shallow ones stay in L1
            for some register tiles of pixels:
                for each of these tiles:
                    for each unit of these panels:   the rows stay in L1
                        multiply
                after the last slice: epilogue, store
"""

from std.collections import Optional
from std.sys.info import size_of

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..config import reads_in_place
from ..accumulators import OutputTile
from ..epilogue import TileStore
from ..register_output import RegisterOutput
from .mma import (
    MAX_RUNS,
    MIN_RUN,
    FilterOperand,
    Run,
    StoredRows,
    TileOperand,
    multiply,
    tile_rows,
)
from .scheduler import (
    ACCESS_MATRIX,
    ACCESS_STRIPS,
    L1_FILTER_ELEMENTS,
    LONG_DEPTH,
    MAX_BLOCK_TILES,
    Blocking,
    RowTile,
    Task,
    TileCursor,
)
from .strips import LineInPlace, StripMemory, strip_operand
from .tile_io import Columns, gather_rows, may_miss_image, meets_image


@fieldwise_init
struct GemmParams[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        Source: How the activation is reached.
    """

    var activation: Self.Source
    var filter: Reads[Self.Source.dtype]
    """Packed."""
    var panel: PanelLayout
    """The order of its panels' elements."""
    var output: TileStore
    var stored: Optional[RegisterOutput[DType.float32]]
    """The output, if register tiles may store it themselves."""
    var problem: ConvProblem
    var blocking: Blocking


@fieldwise_init
struct GemmScratch(ImplicitlyCopyable, Movable):
    """A worker's memory: its activation block and its partial sums."""

    var activation: Writes[DType.float32]
    var accumulators: Writes[DType.float32]


@fieldwise_init
struct GroupFilters(ImplicitlyCopyable, Movable):
    """The filters of one of a task's groups."""

    var index: Int
    """Which of the task's groups, from 0 to `task.groups - 1`."""
    var first_panel: Int
    """The task's first, of the packed filter's panels."""
    var first_filter: Int
    """The task's first, of the convolution's filters."""
    var count: Int
    """From the first to the group's last."""

    def __init__(out self, problem: ConvProblem, task: Task, index: Int):
        """The filters of a group.

        Args:
            problem: The convolution.
            task: The task.
            index: Which of its groups.
        """
        var group = task.group + index
        var skipped = task.panel * PANEL
        var filters = problem.group_filters()
        self.index = index
        self.first_panel = group * problem.panels() + task.panel
        self.first_filter = group * filters + skipped
        self.count = filters - skipped

    @always_inline
    def of_panels(self, panel: Int, end: Int) -> Int:
        """Filters of the task's panels `[panel, end)`; the group's last one may
        not be full.

        Args:
            panel: The first.
            end: The one behind the last.
        """
        return min(end * PANEL, self.count) - panel * PANEL


@fieldwise_init
struct TileActivations(ImplicitlyCopyable, Movable):
    """Where a register tile finds its activations."""

    var operand: Int
    """Of the task's operands."""
    var offset: Int
    """Elements by which they lie further on."""


def run_task(params: GemmParams, task: Task, scratch: GemmScratch):
    """Computes a task.

    Args:
        params: The launch.
        task: The task.
        scratch: The worker's own memory.
    """
    ref problem = params.problem
    ref blocking = params.blocking
    var products = blocking.products
    var tiles = Array[RowTile, MAX_BLOCK_TILES](uninitialized=True)
    var cursor = TileCursor(blocking.tiling, task.tile)
    for i in range(task.tiles):
        tiles[i] = cursor.next()
    var operands = Array[TileOperand, MAX_BLOCK_TILES](uninitialized=True)
    var places = Array[TileActivations, MAX_BLOCK_TILES](uninitialized=True)
    for begin in range(0, products, blocking.depth):
        var columns = Columns(
            problem,
            params.panel,
            begin,
            min(begin + blocking.depth, products),
        )
        var line = LineInPlace.none()
        for i in range(task.tiles):
            if line.holds(tiles[i]):
                places[i] = TileActivations(line.index, line.offset(tiles[i]))
                continue
            places[i] = TileActivations(i, 0)
            _load_tile(
                operands[i], line, params, task, scratch, columns, tiles[i], i
            )
        for group in range(task.groups):
            _run_group(
                params,
                task,
                scratch,
                columns,
                tiles,
                operands,
                places,
                GroupFilters(problem, task, group),
            )


@always_inline
def _load_tile(
    mut result: TileOperand,
    mut line: LineInPlace,
    params: GemmParams,
    task: Task,
    scratch: GemmScratch,
    columns: Columns,
    tile: RowTile,
    index: Int,
):
    """The tile's activations: where they lie if its rows are whole and inside
    the image, otherwise copied, once for all panels."""
    comptime Source = type_of(params).Source
    ref problem = params.problem
    ref blocking = params.blocking
    var x = params.activation
    var to = scratch.activation
    if blocking.access == ACCESS_STRIPS:
        var memory = StripMemory(
            to, blocking.tile_elements, blocking.tiling.per_line, index
        )
        strip_operand(result, line, x, problem, columns, task, tile, memory)
        return
    comptime if reads_in_place(Source.dtype, Source.fused):
        # A tile of an odd number of rows reads one row too many.
        if blocking.access == ACCESS_MATRIX and tile.rows == tile_rows(
            tile.rows
        ):
            var matrix = x.data().unsafe_bitcast[Float32]()
            var pixels = problem.gemm_m()
            line = LineInPlace(index, tile.row, pixels, problem.channels)
            result.clear(problem.channels)
            result.append(
                Run(
                    matrix.unsafe_offset(
                        tile.row * problem.channels + columns.begin
                    ),
                    columns.begin,
                    columns.end - columns.begin,
                )
            )
            return
    if blocking.access != ACCESS_MATRIX:
        to = to.unsafe_offset(index * blocking.tile_elements)
    var stride = blocking.gathered_stride()
    gather_rows(x, problem, columns, task.group, tile, to, stride)
    result.clear(stride)
    _append_gathered(result, problem, columns, tile, to.as_imm())


@always_inline
def _append_gathered(
    mut result: TileOperand,
    problem: ConvProblem,
    columns: Columns,
    tile: RowTile,
    rows: Reads[DType.float32],
):
    """Adds the runs of gathered rows, without zeros: what fills up filter rows,
    and taps that lie in the padding for every row of the tile, with large
    dilations most of them."""
    # Pieces that are multiplied or left out: taps, or whole filter rows.
    var by_tap = may_miss_image(problem)
    var pieces = (
        problem.taps() if by_tap else problem.taps() // problem.filter[2]
    )
    var whole = columns.products == columns.segment and not by_tap
    if whole or pieces > MAX_RUNS // 2 or columns.products < MIN_RUN:
        result.append(Run(rows, columns.begin, columns.end - columns.begin))
        return
    var per_row = problem.filter[2] if by_tap else 1
    var length = columns.products // per_row
    var begin = columns.begin
    var end = columns.begin
    for piece in range(pieces + 1):
        var row, place = divmod(piece, per_row)
        var first = row * columns.segment + place * length
        var low = min(max(first, columns.begin), columns.end)
        var high = min(max(first + length, columns.begin), columns.end)
        var kept = piece < pieces and high > low
        if kept and by_tap:
            kept = meets_image(problem, tile, piece)
        if kept and low == end:
            end = high
            continue
        if end > begin:
            result.append(
                Run(
                    rows.unsafe_offset(begin - columns.begin),
                    begin,
                    end - begin,
                )
            )
        begin = low if kept else high
        end = high


@fieldwise_init
struct Sums(ImplicitlyCopyable, Movable):
    """Where the sums of some tiles and panels lie."""

    var memory: Writes[DType.float32]
    var stride: Int
    """Elements between two pixels."""

    @always_inline
    def __init__(
        out self,
        params: GemmParams,
        scratch: GemmScratch,
        group: Int,
        panel: Int,
        tile: Int,
    ):
        """Of a task's tiles from `tile` on, for its panels from `panel` on.

        Args:
            params: The launch.
            scratch: The worker's own memory.
            group: Of the task's groups.
            panel: Of a group's panels.
            tile: Of the task's tiles.
        """
        ref blocking = params.blocking
        self.memory = scratch.accumulators
        self.stride = blocking.stored_panels() * PANEL
        # All that is kept until the last slice has a place of its own.
        if blocking.is_sliced():
            self.stride = blocking.columns()
            var slot = group * blocking.tiles + tile
            self.memory = self.memory.unsafe_offset(
                slot * blocking.tiling.rows * self.stride + panel * PANEL
            )


@always_inline
def _run_group(
    params: GemmParams,
    task: Task,
    scratch: GemmScratch,
    columns: Columns,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    operands: Array[TileOperand, MAX_BLOCK_TILES],
    places: Array[TileActivations, MAX_BLOCK_TILES],
    group: GroupFilters,
):
    """Multiplies a task's tiles by its panels of one group, and stores what is
    complete."""
    ref problem = params.problem
    var is_last = columns.end == params.blocking.products
    var is_short = columns.end - columns.begin < LONG_DEPTH
    var width = params.blocking.tile_panels()
    var panels = params.blocking.stored_panels()
    var stores = is_last and Bool(params.stored)
    var stored = params.blocking.stored_tiles()
    # No sums in memory, and no filter that is fetched tile by tile.
    var in_line = stores and not (
        params.blocking.is_sliced() or params.blocking.streams
    )
    if in_line:
        stored = task.tiles
    for panel in range(0, task.panels, panels):
        var end = min(panel + panels, task.panels)
        for first in range(0, task.tiles, stored):
            var sums = Sums(params, scratch, group.index, panel, first)
            var rows = 0
            var behind = min(first + stored, task.tiles)
            var i = first
            while i < behind:
                var to = sums.memory.unsafe_offset(rows * sums.stride)
                ref operand = operands[places[i].operand]
                var together = 1
                if in_line:
                    together = _tiles_in_line(
                        tiles, places, i, behind, operand.row_stride
                    )
                # The others' outputs are asked for while they are multiplied. A
                # short multiply does not wait for memory: a tile earlier then.
                var asked = i + together if is_short else i
                for at in range(panel, end, width):
                    var last = min(at + width, end)
                    if is_last and asked < task.tiles:
                        params.output.prefetch(
                            problem, _output_tile(tiles[asked], group, at, last)
                        )
                    var filters = group.of_panels(at, last)
                    var own = StoredRows.none()
                    if stores:
                        own = StoredRows(
                            params.stored.value().at(
                                tiles[i].row, group.first_filter + at * PANEL
                            ),
                            tiles[i].rows,
                            filters,
                        )
                    multiply(
                        tiles[i].rows,
                        filters,
                        operand,
                        places[i].offset + group.index * operand.group_stride,
                        _filter_operand(params, task, columns, group, at, i),
                        to.unsafe_offset((at - panel) * PANEL),
                        sums.stride,
                        columns.begin > 0,
                        own,
                        together,
                    )
                rows += together * tiles[i].rows
                i += together
            if is_last and not stores:
                var tile = RowTile(tiles[first].row, rows)
                params.output.store(
                    problem,
                    _output_tile(tile, group, panel, end),
                    sums.memory,
                    sums.stride,
                )


@always_inline
def _tiles_in_line(
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    places: Array[TileActivations, MAX_BLOCK_TILES],
    first: Int,
    behind: Int,
    row_stride: Int,
) -> Int:
    """How many tiles from `first` on are alike, and follow each other in the
    activation and in the output."""
    var rows = tiles[first].rows
    if rows != tile_rows(rows):
        return 1
    for i in range(first + 1, behind):
        var distance = (i - first) * rows
        if (
            tiles[i].rows != rows
            or tiles[i].row != tiles[first].row + distance
            or places[i].operand != places[first].operand
            or places[i].offset != places[first].offset + distance * row_stride
        ):
            return i - first
    return behind - first


@always_inline
def _output_tile(
    tile: RowTile, group: GroupFilters, panel: Int, end: Int
) -> OutputTile:
    """The outputs of some pixels, for panels `[panel, end)` of a task's group.
    """
    return OutputTile(
        tile.row,
        tile.rows,
        group.first_filter + panel * PANEL,
        group.of_panels(panel, end),
    )


@always_inline
def _filter_operand(
    params: GemmParams,
    task: Task,
    columns: Columns,
    group: GroupFilters,
    at: Int,
    index: Int,
) -> FilterOperand[type_of(params).Source.dtype]:
    """The panels of a task's group from `at` on, for the tile at `index`; and to
    fetch meanwhile, if the filter streams from memory and a tile's panels are
    too large for L1, its share of those that are multiplied after them."""
    comptime filter_type = type_of(params).Source.dtype
    comptime line = CACHE_LINE // size_of[filter_type]()
    var filter = params.filter
    var products = params.blocking.products
    var panel = group.first_panel + at
    var operand = FilterOperand[filter_type](
        panels=filter.unsafe_offset(panel * products * PANEL),
        panel_stride=products * PANEL,
        ahead=filter,
        interval=0,
    )
    if not params.blocking.streams:
        return operand
    var depth = columns.end - columns.begin
    var width = params.blocking.tile_panels()
    if depth * width * PANEL <= L1_FILTER_ELEMENTS:
        return operand
    panel += width
    var step = columns.begin
    if at + width >= task.panels:
        panel = group.first_panel
        step = columns.end
        if step == products:
            return operand
    var first = step + index * depth // task.tiles
    operand.ahead = filter.unsafe_offset((panel * products + first) * PANEL)
    operand.interval = task.tiles * line // PANEL
    return operand
