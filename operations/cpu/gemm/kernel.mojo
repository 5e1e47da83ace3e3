"""The implicit GEMM of the CPU: a task's loops over depth, filters and pixels.

    for each slice of the products:
        for each register tile of pixels:        the tiles' rows stay in L2
            activations in place, or copied if the tile meets an edge
        for some filter panels:                  shallow ones stay in L1
            for each register tile of pixels:
                for each pair of these panels:   the tile's rows stay in L1
                    multiply, and after the last slice: epilogue, store
"""

from std.sys.info import size_of

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.problem import ConvProblem
from ..config import CPU_TILE, reads_in_place
from ..epilogue import OutputTile, TileStore
from .mma import FilterOperand, Run, TileOperand, multiply, tile_rows
from .scheduler import (
    ACCESS_MATRIX,
    ACCESS_STRIPS,
    L1_FILTER_ELEMENTS,
    MAX_BLOCK_TILES,
    Blocking,
    RowTile,
    Task,
)
from .strips import strip_operand
from .tile_io import Columns, gather_rows

comptime MIN_PREFETCH_DEPTH = 256
"""Products of the shallowest slice during which a tile of output arrives: in a
shorter one, asking for it only keeps the activations waiting."""


@fieldwise_init
struct GemmParams[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        Source: How the activation is reached.
    """

    var activation: Self.Source
    var filter: Reads[Self.Source.dtype]
    """Packed."""
    var output: TileStore
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
    var products = problem.gemm_k()
    var tiles = Array[RowTile, MAX_BLOCK_TILES](uninitialized=True)
    for i in range(task.tiles):
        tiles[i] = blocking.tiling.tile(task.tile + i)
    var operands = Array[TileOperand, MAX_BLOCK_TILES](uninitialized=True)
    for begin in range(0, products, blocking.depth):
        var columns = Columns(
            problem, begin, min(begin + blocking.depth, products)
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
        to = to.unsafe_offset(index * blocking.tile_elements)
        strip_operand(result, x, problem, columns, task, tile, to)
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
    result.append(Run(to.as_imm(), columns.begin, columns.end - columns.begin))


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
    """Multiplies a task's tiles by its panels of one group, the `group`th."""
    var strip = params.blocking.cached_panels()
    for first in range(0, task.panels, strip):
        for i in range(task.tiles):
            for panel in range(
                first, min(first + strip, task.panels), CPU_TILE.panels
            ):
                var place = TilePlace(group, panel, i)
                _run_tile(
                    params, task, scratch, columns, tiles, operands[i], place
                )


@always_inline
def _run_tile(
    params: GemmParams,
    task: Task,
    scratch: GemmScratch,
    columns: Columns,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    activations: TileOperand,
    place: TilePlace,
):
    """Multiplies one register tile by the products of `columns`."""
    ref problem = params.problem
    ref blocking = params.blocking
    var products = problem.gemm_k()
    var panels = min(CPU_TILE.panels, task.panels - place.panel)
    var is_last = columns.end == products
    # One tile's memory is enough when no partial sum outlives it.
    var slot = 0
    if blocking.depth < products:
        slot = place.group * blocking.units() + place.panel // CPU_TILE.panels
        slot = slot * blocking.tiles + place.index
    var accumulators = scratch.accumulators.unsafe_offset(
        slot * CPU_TILE.elements()
    )
    var output = _output_tile(problem, task, tiles[place.index], place)
    if is_last and columns.end - columns.begin >= MIN_PREFETCH_DEPTH:
        params.output.prefetch(problem, output)
    elif (
        is_last and params.output.has_residual and place.index + 1 < task.tiles
    ):
        # The multiply is too short to wait for memory: a tile earlier then.
        var next = _output_tile(problem, task, tiles[place.index + 1], place)
        params.output.prefetch(problem, next)
    multiply(
        output.rows,
        panels,
        activations,
        place.group * problem.group_channels(),
        _filter_operand(params, task, columns, place),
        accumulators,
        columns.begin > 0,
    )
    if is_last:
        params.output.store(
            problem, output, accumulators.as_imm(), CPU_TILE.columns()
        )


@always_inline
def _output_tile(
    problem: ConvProblem, task: Task, tile: RowTile, place: TilePlace
) -> OutputTile:
    """The outputs of the register tile at a place, of other pixels perhaps."""
    var panels = min(CPU_TILE.panels, task.panels - place.panel)
    var filter = (task.panel + place.panel) * PANEL
    return OutputTile(
        tile.row,
        tile.rows,
        (task.group + place.group) * problem.gemm_n() + filter,
        min(panels * PANEL, problem.gemm_n() - filter),
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
    var products = problem.gemm_k()
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
