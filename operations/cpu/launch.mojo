"""Runs the CPU kernels over all threads."""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.runtime import parallelism_level

from ..conv.memory import HostBuffer, Reads
from ..conv.config import LANES
from ..conv.epilogue import Epilogue
from ..conv.problem import ConvProblem
from ..conv.reference import reference_pixel
from .depthwise import depthwise_row
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
    var image_rows = problem.batch * problem.output[0] * problem.output[1]
    var workers = workers_for(problem, image_rows * problem.channels)
    # A single image row still feeds every thread: by its channels.
    var blocks = 1
    if image_rows < workers * 4:
        blocks = min(
            ceildiv(problem.channels, LANES), ceildiv(workers * 4, image_rows)
        )
    var block = ceildiv(ceildiv(problem.channels, blocks), LANES) * LANES

    def run(_worker: Int, index: Int) raises {imm}:
        var channel_block, image_row = divmod(index, image_rows)
        depthwise_row[filter_type](
            output,
            x,
            filter,
            epilogue,
            problem,
            image_row,
            channel_block * block,
            min(problem.channels, (channel_block + 1) * block),
        )

    for_each_task(
        run, image_rows * ceildiv(problem.channels, block), workers
    )


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
