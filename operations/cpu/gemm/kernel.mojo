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
from std.math import ceildiv
from std.sys.info import size_of

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..config import CPU_TILE, reads_in_place
from ..accumulators import OutputTile
from ..epilogue import TileStore
from ..output import PlainOutput
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
from .strips import StripMemory, strip_operand
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
    var plain: Optional[PlainOutput[DType.float32]]
    """The output, if register tiles may store it themselves."""
    var problem: ConvProblem
    var blocking: Blocking


@fieldwise_init
struct GemmScratch(ImplicitlyCopyable, Movable):
    """A worker's memory: its activation block and its partial sums."""

    var activation: Writes[DType.float32]
    var accumulators: Writes[DType.float32]


@fieldwise_init
struct TilePlace(ImplicitlyCopyable, Movable):
    """Which of its task's register tiles one is."""

    var group: Int
    """From 0 to `task.groups - 1`."""
    var panel: Int
    """Its first, from 0 to `task.panels - 1`."""
    var index: Int
    """Of its pixels, from 0 to `task.tiles - 1`."""


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
    for begin in range(0, products, blocking.depth):
        var columns = Columns(
            problem,
            params.panel,
            begin,
            min(begin + blocking.depth, products),
        )
        for i in range(task.tiles):
            _load_tile(operands[i], params, task, scratch, columns, tiles[i], i)
        for group in range(task.groups):
            _run_group(params, task, scratch, columns, tiles, operands, group)


@always_inline
def _load_tile(
    mut result: TileOperand,
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
        strip_operand(result, x, problem, columns, task, tile, memory)
        return
    comptime if reads_in_place(Source.dtype, Source.fused):
        # A tile of an odd number of rows reads one row too many.
        if blocking.access == ACCESS_MATRIX and tile.rows == tile_rows(
            tile.rows
        ):
            var matrix = x.data().unsafe_bitcast[Float32]()
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
            self.stride = blocking.units() * CPU_TILE.columns()
            var slot = group * blocking.tiles + tile
            self.memory = self.memory.unsafe_offset(
                slot * CPU_TILE.rows * self.stride + panel * PANEL
            )


@always_inline
def _run_group(
    params: GemmParams,
    task: Task,
    scratch: GemmScratch,
    columns: Columns,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    operands: Array[TileOperand, MAX_BLOCK_TILES],
    group: Int,
):
    """Multiplies a task's tiles by its panels of one group, the `group`th, and
    stores what is complete."""
    ref problem = params.problem
    var is_last = columns.end == params.blocking.products
    var panels = params.blocking.stored_panels()
    var stored = params.blocking.stored_tiles()
    var outputs = _plain_outputs(params, task, group) if is_last else None
    for panel in range(0, task.panels, panels):
        var end = min(panel + panels, task.panels)
        var plain = Bool(outputs) and _are_full(problem, task, end)
        for first in range(0, task.tiles, stored):
            var sums = Sums(params, scratch, group, panel, first)
            var rows = 0
            for i in range(first, min(first + stored, task.tiles)):
                if is_last:
                    _prefetch_output(
                        params, task, columns, tiles, group, panel, end, i
                    )
                var to = sums.memory.unsafe_offset(rows * sums.stride)
                for at in range(panel, end, CPU_TILE.panels):
                    var own = StoredRows.none()
                    if plain:
                        own = StoredRows(
                            outputs.value().at(tiles[i].row, at * PANEL),
                            tiles[i].rows,
                        )
                    multiply(
                        tiles[i].rows,
                        min(CPU_TILE.panels, end - at),
                        operands[i],
                        group * operands[i].group_stride,
                        _filter_operand(
                            params, task, columns, TilePlace(group, at, i)
                        ),
                        to.unsafe_offset((at - panel) * PANEL),
                        sums.stride,
                        columns.begin > 0,
                        own,
                    )
                rows += tiles[i].rows
            if is_last and not plain:
                var tile = RowTile(tiles[first].row, rows)
                params.output.store(
                    problem,
                    _output_tile(problem, task, tile, group, panel, end),
                    sums.memory,
                    sums.stride,
                )


@always_inline
def _plain_outputs(
    params: GemmParams, task: Task, group: Int
) -> Optional[PlainOutput[DType.float32]]:
    """The outputs of a task's group, from the image's first pixel on, if register
    tiles may store them."""
    if not params.plain:
        return None
    ref problem = params.problem
    return params.plain.value().at(
        0, (task.group + group) * problem.gemm_n() + task.panel * PANEL
    )


@always_inline
def _are_full(problem: ConvProblem, task: Task, end: Int) -> Bool:
    """Whether all of a task's panels in front of one are full."""
    return (task.panel + end) * PANEL <= problem.gemm_n()


@always_inline
def _prefetch_output(
    params: GemmParams,
    task: Task,
    columns: Columns,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    group: Int,
    panel: Int,
    end: Int,
    index: Int,
):
    """Asks for the outputs of the tile at `index`, before its last slice."""
    ref problem = params.problem
    # A short multiply does not wait for memory: a tile earlier then.
    var next = index
    if columns.end - columns.begin < LONG_DEPTH:
        next += 1
        if next == task.tiles:
            return
    params.output.prefetch(
        problem, _output_tile(problem, task, tiles[next], group, panel, end)
    )


@always_inline
def _output_tile(
    problem: ConvProblem,
    task: Task,
    tile: RowTile,
    group: Int,
    panel: Int,
    end: Int,
) -> OutputTile:
    """The outputs of some pixels, for panels `[panel, end)` of a task."""
    var filter = (task.panel + panel) * PANEL
    return OutputTile(
        tile.row,
        tile.rows,
        (task.group + group) * problem.gemm_n() + filter,
        min((end - panel) * PANEL, problem.gemm_n() - filter),
    )


@always_inline
def _filter_operand(
    params: GemmParams, task: Task, columns: Columns, place: TilePlace
) -> FilterOperand[type_of(params).Source.dtype]:
    """The panels of the register tile at a place; and to fetch meanwhile, if
    the filter streams from memory and a tile's panels are too large for L1, its
    share of those that are multiplied after them."""
    comptime filter_type = type_of(params).Source.dtype
    comptime line = CACHE_LINE // size_of[filter_type]()
    ref problem = params.problem
    var filter = params.filter
    var products = params.blocking.products
    var group = (task.group + place.group) * problem.panels()
    var panel = task.panel + place.panel
    var operand = FilterOperand[filter_type](
        panels=filter.unsafe_offset((group + panel) * products * PANEL),
        panel_stride=products * PANEL,
        ahead=filter,
        interval=0,
    )
    var depth = columns.end - columns.begin
    if (
        not params.blocking.streams
        or depth * CPU_TILE.columns() <= L1_FILTER_ELEMENTS
    ):
        return operand
    panel += CPU_TILE.panels
    var step = columns.begin
    if place.panel + CPU_TILE.panels >= task.panels:
        panel = task.panel
        step = columns.end
        if step == products:
            return operand
    var first = step + place.index * depth // task.tiles
    operand.ahead = filter.unsafe_offset(
        ((group + panel) * products + first) * PANEL
    )
    operand.interval = task.tiles * line // PANEL
    return operand
