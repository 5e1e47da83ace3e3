"""The implicit GEMM of the CPU: a task's loops over depth, filters and pixels.

    for each slice of the products:
        for each register tile of pixels:        the tiles' rows stay in L2
            activations in place, or copied if the tile meets an edge
        for some filter panels:                  shallow ones stay in L1
            for each register tile of pixels:
                for each pair of these panels:   the tile's rows stay in L1
                    multiply, and after the last slice: epilogue, store
"""

from extensibility import ManagedTensorSlice

from std.sys.info import size_of

from ..conv.memory import CACHE_LINE, Reads, operand
from .config import CPU_TILE
from ..conv.epilogue import Epilogue
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .epilogue import prefetch_tile, store_tile
from .image import image_operand
from .mma import (
    Ahead,
    Run,
    TileOperand,
    multiply,
    tile_rows,
)
from .scheduler import (
    ACCESS_IMAGE,
    ACCESS_MATRIX,
    L1_FILTER_ELEMENTS,
    MAX_BLOCK_TILES,
    Blocking,
    RowTile,
)
from .smem import Scratch
from .tile_io import Columns, gather_rows


comptime MIN_PREFETCH_DEPTH = 256
"""Products of the shallowest slice during which a tile of output arrives: in a
shorter one, asking for it only keeps the activations waiting."""


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


def run_task[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
):
    """Computes a task.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution.
        blocking: The cut.
        task: The task.
        scratch: The worker's own memory.
    """
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
            _load_tile(
                operands[i],
                x,
                problem,
                blocking,
                task,
                scratch,
                columns,
                i,
                tiles[i],
            )
        for group in range(task.groups):
            _run_group(
                output,
                filter,
                epilogue,
                problem,
                blocking,
                task,
                scratch,
                columns,
                group,
                tiles,
                operands,
            )


@always_inline
def _run_group[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
    columns: Columns,
    group: Int,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    operands: Array[TileOperand, MAX_BLOCK_TILES],
):
    """Multiplies a task's tiles by its panels of one group, the `group`th."""
    var strip = blocking.cached_panels()
    for first in range(0, task.panels, strip):
        for i in range(task.tiles):
            for panel in range(
                first, min(first + strip, task.panels), CPU_TILE.panels
            ):
                _run_tile(
                    output,
                    filter,
                    epilogue,
                    problem,
                    blocking,
                    task,
                    scratch,
                    columns,
                    group,
                    panel,
                    i,
                    tiles,
                    operands[i],
                )


@always_inline
def _run_tile[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
    columns: Columns,
    group: Int,
    unit: Int,
    index: Int,
    tiles: Array[RowTile, MAX_BLOCK_TILES],
    activations: TileOperand,
):
    """Multiplies one register tile by the products of `columns`."""
    var tile = tiles[index]
    var products = problem.gemm_k()
    var panel = task.panel + unit
    var panels = min(CPU_TILE.panels, task.panels - unit)
    var first = (task.group + group) * problem.gemm_n() + panel * PANEL
    var count = min(panels * PANEL, problem.gemm_n() - panel * PANEL)
    var is_last = columns.end == products
    # One tile's memory is enough when no partial sum outlives it.
    var slot = 0
    if blocking.depth < products:
        slot = group * blocking.units() + unit // CPU_TILE.panels
        slot = slot * blocking.tiles + index
    var accumulators = scratch.accumulators.unsafe_offset(
        slot * CPU_TILE.elements()
    )
    if is_last and columns.end - columns.begin >= MIN_PREFETCH_DEPTH:
        prefetch_tile(
            output, epilogue, problem, tile.row, tile.rows, first, count
        )
    elif is_last and epilogue.has_residual and index + 1 < task.tiles:
        # The multiply is too short to wait for memory: a tile earlier then.
        var next = tiles[index + 1]
        prefetch_tile(
            output, epilogue, problem, next.row, next.rows, first, count
        )
    multiply[filter_type](
        tile.rows,
        panels,
        activations,
        group * problem.group_channels(),
        filter.unsafe_offset(
            ((task.group + group) * problem.panels() + panel) * products * PANEL
        ),
        products * PANEL,
        accumulators,
        columns.begin > 0,
        _filter_ahead(
            filter, problem, blocking, task, columns, group, unit, index
        ),
    )
    if is_last:
        store_tile(
            output,
            epilogue,
            problem,
            tile.row,
            tile.rows,
            first,
            count,
            accumulators.as_imm(),
            CPU_TILE.columns(),
        )


@always_inline
def _filter_ahead[
    filter_type: DType
](
    filter: Reads[filter_type],
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    columns: Columns,
    group: Int,
    unit: Int,
    index: Int,
) -> Ahead[filter_type]:
    """A tile's share of the panels that are multiplied after its own, if the
    filter streams from memory and a tile's panels are too large for L1."""
    var nothing = Ahead[filter_type](filter, 0)
    var products = problem.gemm_k()
    var depth = columns.end - columns.begin
    if not blocking.streams or depth * CPU_TILE.columns() <= L1_FILTER_ELEMENTS:
        return nothing
    var panel = task.panel + unit + CPU_TILE.panels
    var step = columns.begin
    if unit + CPU_TILE.panels >= task.panels:
        panel = task.panel
        step = columns.end
        if step == products:
            return nothing
    var base = ((task.group + group) * problem.panels() + panel) * products
    var first = index * depth // task.tiles
    comptime line = CACHE_LINE // size_of[filter_type]()
    return Ahead(
        filter.unsafe_offset((base + step + first) * PANEL),
        task.tiles * line // PANEL,
    )


@always_inline
def _load_tile(
    mut result: TileOperand,
    x: ManagedTensorSlice,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
    columns: Columns,
    index: Int,
    tile: RowTile,
):
    """The tile's activations: where they lie if its rows are whole and inside
    the image, otherwise copied, once for all panels."""
    if blocking.access == ACCESS_IMAGE:
        image_operand(
            result,
            x,
            problem,
            task.group,
            task.groups,
            tile.row,
            tile.rows,
            columns,
            scratch.activation.unsafe_offset(index * blocking.tile_elements),
        )
        return
    var to = scratch.activation
    comptime if x.dtype == DType.float32 and not x._has_input_fusion:
        if blocking.access == ACCESS_MATRIX:
            # A tile of an odd number of rows reads one row too many.
            if tile.rows == tile_rows(tile.rows):
                result.clear(problem.channels)
                result.append(
                    Run(
                        operand(x)
                        .unsafe_bitcast[Float32]()
                        .unsafe_offset(
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
    gather_rows(
        x, problem, task.group, tile.row, tile.rows, columns, to, stride
    )
    result.clear(stride)
    result.append(Run(to.as_imm(), columns.begin, columns.end - columns.begin))
