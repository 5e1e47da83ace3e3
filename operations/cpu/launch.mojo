"""Runs the CPU kernels over all threads."""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.runtime import parallelism_level

from ..conv.memory import HostBuffer, Reads
from ..conv.config import LANES
from ..conv.fields import PANEL
from ..conv.epilogue import Epilogue
from ..conv.problem import ConvProblem
from ..conv.reference import reference_pixel
from .depthwise import depthwise_row
from .grouped import grouped_row
from .kernel import Task, run_task
from .scheduler import choose_blocking, for_each_task
from .smem import ScratchPlan

comptime MIN_TASK_PRODUCTS = 1 << 17
"""Multiply-adds below which a task is not worth waking a thread for."""


def workers_for(problem: ConvProblem, tasks: Int) -> Int:
    """How many threads a problem is worth.

    Args:
        problem: The convolution.
        tasks: How many tasks it is cut into.

    Returns:
        At least 1, at most the runtime's threads.
    """
    var products = problem.gemm_m() * problem.filters * problem.gemm_k()
    return max(
        1, min(parallelism_level(), tasks, products // MIN_TASK_PRODUCTS)
    )


def launch_gemm[
    filter_type: DType, pointwise: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
) raises:
    """Runs the implicit GEMM.

    Parameters:
        filter_type: The packed filter's type.
        pointwise: As in `run_task`.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution, not depthwise.
    """
    var blocking = choose_blocking(problem, parallelism_level())
    var workers = workers_for(problem, blocking.tasks())
    var plan = ScratchPlan(
        blocking, ceildiv(problem.gemm_k(), blocking.depth), not pointwise
    )
    var memory = HostBuffer[DType.float32](plan.elements() * workers)
    var base = memory.elements

    def run(worker: Int, index: Int) raises {imm}:
        run_task[filter_type, pointwise](
            output,
            x,
            filter,
            epilogue,
            problem,
            blocking,
            Task(problem, blocking, index),
            plan.scratch(base, worker),
        )

    for_each_task(run, blocking.tasks(), workers)
    _ = memory^


@fieldwise_init
struct RowCut(ImplicitlyCopyable, Movable):
    """A cut into tasks of one image row by a block of channels or panels."""

    var image_rows: Int
    var block: Int
    var blocks: Int
    var workers: Int

    def __init__(out self, problem: ConvProblem, extent: Int, unit: Int):
        """Cuts by rows and, if they are few, so that a single row still feeds
        every thread.

        Args:
            problem: The convolution.
            extent: Channels or panels, whichever the kernel counts.
            unit: What a block should be a multiple of.
        """
        self.image_rows = (
            problem.batch * problem.output[0] * problem.output[1]
        )
        self.workers = workers_for(problem, self.image_rows * extent)
        var wanted = ceildiv(self.workers * 4, self.image_rows)
        var blocks = min(ceildiv(extent, unit), wanted)
        self.block = ceildiv(ceildiv(extent, blocks), unit) * unit
        self.blocks = ceildiv(extent, self.block)

    def tasks(self) -> Int:
        """How many tasks there are."""
        return self.image_rows * self.blocks


def launch_depthwise[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
) raises:
    """Runs the depthwise kernel.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter, `[taps][channels]`.
        epilogue: The epilogue.
        problem: The convolution, depthwise.
    """
    var cut = RowCut(problem, problem.channels, LANES)

    def run(_worker: Int, index: Int) raises {imm}:
        var block, image_row = divmod(index, cut.image_rows)
        depthwise_row[filter_type](
            output,
            x,
            filter,
            epilogue,
            problem,
            image_row,
            block * cut.block,
            min(problem.channels, (block + 1) * cut.block),
        )

    for_each_task(run, cut.tasks(), cut.workers)


def launch_grouped[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
) raises:
    """Runs the grouped kernel.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution; `can_implement` says which.
    """
    var panels = problem.filters // PANEL
    var cut = RowCut(problem, panels, 1)

    def run(_worker: Int, index: Int) raises {imm}:
        var block, image_row = divmod(index, cut.image_rows)
        grouped_row[filter_type](
            output,
            x,
            filter,
            epilogue,
            problem,
            image_row,
            block * cut.block,
            min(panels, (block + 1) * cut.block),
        )

    for_each_task(run, cut.tasks(), cut.workers)


def launch_reference[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
) raises:
    """Runs the reference.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution.
    """

    def run(_worker: Int, row: Int) raises {imm}:
        reference_pixel[filter_type](
            output, x, filter, epilogue, problem, row
        )

    for_each_task(run, problem.gemm_m(), parallelism_level())
