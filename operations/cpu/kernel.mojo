"""The implicit GEMM of the CPU: a task's loops over depth, filters and pixels.

    for each slice of the products:
        for each pair of filter panels:          the panels stay in L2
            for each register tile of pixels:    the tile's rows stay in L1
                activations in place, or gathered if the tile meets an edge
                multiply, and after the last slice: epilogue, store
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv

from ..conv.memory import Reads, Writes, operand
from ..conv.config import CPU_TILE
from ..conv.epilogue import Epilogue
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .epilogue import prefetch_tile, store_tile
from .mma import Run, TileOperand, multiply, tile_rows
from .scheduler import Blocking
from .smem import Scratch
from .tile_io import Columns, Pixel, gather_rows, is_inside, runs_in_place


@fieldwise_init
struct Task(ImplicitlyCopyable, Movable):
    """A block of outputs: rows of the implicit GEMM by panels of a group."""

    var group: Int
    var row: Int
    var rows: Int
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
        var group, panel_block = divmod(rest, blocking.panel_blocks)
        self.group = group
        self.row = row_block * blocking.rows
        self.rows = min(blocking.rows, problem.gemm_m() - self.row)
        self.panel = panel_block * blocking.panels
        self.panels = min(blocking.panels, problem.panels() - self.panel)


@fieldwise_init
struct RowTile(ImplicitlyCopyable, Movable):
    """Rows of a register tile, counted from the task's first row."""

    var row: Int
    var rows: Int

    @always_inline
    def next(mut self, problem: ConvProblem, blocking: Blocking, task: Task):
        """Moves to the tile behind this one, which ends with the task and, if
        tiles keep to image rows, with its image row.

        Args:
            problem: The convolution.
            blocking: The cut.
            task: The task.
        """
        self.row += self.rows
        self.rows = min(CPU_TILE.rows, task.rows - self.row)
        if blocking.row_aligned:
            var q = (task.row + self.row) % problem.output[2]
            self.rows = min(self.rows, problem.output[2] - q)


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
    for begin in range(0, products, blocking.depth):
        var columns = Columns(
            problem, begin, min(begin + blocking.depth, products)
        )
        for unit in range(ceildiv(task.panels, CPU_TILE.panels)):
            # One tile's memory is enough when no partial sum outlives it.
            var slot = 0
            if blocking.depth < products:
                slot = unit * blocking.row_tiles
            var tile = RowTile(0, 0)
            tile.next(problem, blocking, task)
            while tile.rows > 0:
                _run_tile(
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    blocking,
                    task,
                    scratch,
                    columns,
                    unit,
                    tile,
                    scratch.accumulators.unsafe_offset(
                        slot * CPU_TILE.elements()
                    ),
                )
                if blocking.depth < products:
                    slot += 1
                tile.next(problem, blocking, task)


@always_inline
def _run_tile[
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
    columns: Columns,
    unit: Int,
    tile: RowTile,
    accumulators: Writes[DType.float32],
):
    """Multiplies one register tile by the products of `columns`."""
    var products = problem.gemm_k()
    var panel = task.panel + unit * CPU_TILE.panels
    var panels = min(CPU_TILE.panels, task.panel + task.panels - panel)
    var activations = _tile_operand(
        x, problem, blocking, task, scratch, columns, unit, tile
    )
    var row = task.row + tile.row
    var first = task.group * problem.gemm_n() + panel * PANEL
    var count = min(panels * PANEL, problem.gemm_n() - panel * PANEL)
    if columns.end == products:
        prefetch_tile(output, epilogue, problem, row, tile.rows, first, count)
    multiply[filter_type](
        tile.rows,
        panels,
        activations,
        filter.unsafe_offset(
            (task.group * problem.panels() + panel) * products * PANEL
        ),
        products * PANEL,
        accumulators,
        columns.begin > 0,
    )
    if columns.end == products:
        store_tile(
            output,
            epilogue,
            problem,
            row,
            tile.rows,
            first,
            count,
            accumulators.as_imm(),
            CPU_TILE.columns(),
        )


@always_inline
def _tile_operand(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
    columns: Columns,
    unit: Int,
    tile: RowTile,
) -> TileOperand:
    """The tile's activations: where they lie if its rows are whole and inside
    the image, otherwise gathered, once for all panels."""
    var row = task.row + tile.row
    comptime if x.dtype == DType.float32 and not x._has_input_fusion:
        # A tile of an odd number of rows reads one row too many.
        if tile.rows == tile_rows(tile.rows):
            if blocking.pointwise:
                var whole = TileOperand(problem.channels)
                whole.append(
                    Run(
                        operand(x)
                        .unsafe_bitcast[Float32]()
                        .unsafe_offset(
                            row * problem.channels
                            + task.group * problem.group_channels()
                            + columns.begin
                        ),
                        columns.begin,
                        columns.end - columns.begin,
                    )
                )
                return whole^
            if blocking.row_aligned:
                var pixel = Pixel(problem, row)
                if is_inside(problem, pixel, tile.rows):
                    return runs_in_place(
                        operand(x).unsafe_bitcast[Float32](),
                        problem,
                        task.group,
                        pixel,
                        columns,
                    )
    var stride = blocking.row_stride()
    var to = scratch.activation.unsafe_offset(tile.row * stride)
    if blocking.pointwise:
        # Only the last tile of a block is ever gathered.
        to = scratch.activation
    if unit == 0:
        gather_rows(x, problem, task.group, row, tile.rows, columns, to, stride)
    var gathered = TileOperand(stride)
    gathered.append(
        Run(to.as_imm(), columns.begin, columns.end - columns.begin)
    )
    return gathered^
