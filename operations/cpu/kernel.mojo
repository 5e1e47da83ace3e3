"""The implicit GEMM of the CPU: a task's loops over depth, filters and pixels.

    for each slice of the products:
        gather the block's activations           (tile_io)
        for each pair of filter panels:          the panels stay in L2
            for each register tile of pixels:    the tile's rows stay in L1
                multiply, and after the last slice: epilogue, store
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv

from ..conv.memory import Reads, operand
from ..conv.config import CPU_TILE
from ..conv.epilogue import Epilogue
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .epilogue import store_tile
from .mma import multiply
from .scheduler import Blocking
from .smem import Scratch
from .tile_io import gather_rows


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


def run_task[
    filter_type: DType, pointwise: Bool
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
        pointwise: Whether whole tiles are read where the activation lies
            instead of being gathered; `can_implement` says when.

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
        var end = min(begin + blocking.depth, products)
        comptime if not pointwise:
            gather_rows(
                x,
                problem,
                task.group,
                task.row,
                task.rows,
                begin,
                end,
                scratch.activation,
                blocking.row_stride(),
            )
        for unit in range(ceildiv(task.panels, CPU_TILE.panels)):
            for tile in range(ceildiv(task.rows, CPU_TILE.rows)):
                _run_tile[filter_type, pointwise](
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    blocking,
                    task,
                    scratch,
                    unit,
                    tile,
                    begin,
                    end,
                )


@always_inline
def _run_tile[
    filter_type: DType, pointwise: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    blocking: Blocking,
    task: Task,
    scratch: Scratch,
    unit: Int,
    tile: Int,
    begin: Int,
    end: Int,
):
    """Multiplies one register tile by products `[begin, end)`."""
    var products = problem.gemm_k()
    var row = tile * CPU_TILE.rows
    var rows = min(CPU_TILE.rows, task.rows - row)
    var panel = task.panel + unit * CPU_TILE.panels
    var panels = min(CPU_TILE.panels, task.panel + task.panels - panel)
    var activation = scratch.activation.unsafe_offset(
        row * blocking.row_stride()
    ).as_imm()
    var row_stride = blocking.row_stride()
    comptime if pointwise:
        if rows == CPU_TILE.rows:
            activation = (
                operand(x)
                .unsafe_bitcast[Float32]()
                .unsafe_offset(
                    (task.row + row) * problem.channels
                    + task.group * problem.group_channels()
                    + begin
                )
            )
            row_stride = problem.channels
        else:
            activation = scratch.activation.as_imm()
            if unit == 0:
                gather_rows(
                    x,
                    problem,
                    task.group,
                    task.row + row,
                    rows,
                    begin,
                    end,
                    scratch.activation,
                    row_stride,
                )
    # One tile's memory is enough when no partial sum outlives its tile.
    var slot = 0
    if blocking.depth < products:
        slot = unit * ceildiv(task.rows, CPU_TILE.rows) + tile
    var accumulators = scratch.accumulators.unsafe_offset(
        slot * CPU_TILE.elements()
    )
    multiply[filter_type](
        rows,
        panels,
        activation,
        row_stride,
        filter.unsafe_offset(
            ((task.group * problem.panels() + panel) * products + begin) * PANEL
        ),
        products * PANEL,
        end - begin,
        accumulators,
        begin > 0,
    )
    if end == products:
        store_tile(
            output,
            epilogue,
            problem,
            task.row + row,
            rows,
            task.group * problem.gemm_n() + panel * PANEL,
            min(panels * PANEL, problem.gemm_n() - panel * PANEL),
            accumulators.as_imm(),
        )
