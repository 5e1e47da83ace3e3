"""Runs the CPU kernels over all threads."""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.runtime import parallelism_level

from ..conv.config import LANES
from ..conv.epilogue import Epilogue
from ..conv.fields import (
    KERNEL_DEPTHWISE,
    KERNEL_FEW_FILTERS,
    KERNEL_GROUPED,
    KERNEL_REFERENCE,
    PANEL,
)
from ..conv.memory import HostBuffer, Reads
from ..conv.problem import ConvProblem
from ..conv.reference import reference_pixel
from .direct import run_row
from .few_filters import UnpackedFilter
from .kernel import Task, run_task
from .scheduler import Blocking, choose_blocking, for_each_task
from .smem import Scratch, ScratchPlan

comptime TASK_ROWS = 16
comptime TASKS_A_THREAD = 8
comptime MIN_TASK_PRODUCTS = 1 << 17
"""Multiply-adds below which a task is not worth waking a thread for."""


@fieldwise_init
struct RowCut(ImplicitlyCopyable, Movable):
    """A cut into tasks of some image rows by a block of filters."""

    var image_rows: Int
    var rows: Int
    var extent: Int
    var block: Int

    def __init__(
        out self, problem: ConvProblem, extent: Int, unit: Int, threads: Int
    ):
        """Cuts by rows and, if they are few, so that a single row still feeds
        every thread.

        Args:
            problem: The convolution.
            extent: How many filters.
            unit: What a block should be a multiple of.
            threads: How many threads there are.
        """
        self.image_rows = problem.gemm_m() // problem.output[2]
        self.rows = min(
            TASK_ROWS, ceildiv(self.image_rows, threads * TASKS_A_THREAD)
        )
        self.extent = extent
        var blocks = min(
            ceildiv(extent, unit), ceildiv(threads * 4, self.image_rows)
        )
        self.block = ceildiv(ceildiv(extent, blocks), unit) * unit

    def tasks(self) -> Int:
        """How many tasks there are."""
        return self.row_blocks() * ceildiv(self.extent, self.block)

    def row_blocks(self) -> Int:
        """How many tasks there are of each block of filters."""
        return ceildiv(self.image_rows, self.rows)


@fieldwise_init
struct LaunchPlan(ImplicitlyCopyable, Movable):
    """A kernel, its cut into tasks, and the memory of a worker."""

    var kernel: Int
    var blocking: Blocking
    var cut: RowCut
    var scratch: ScratchPlan
    var tasks: Int
    var workers: Int

    @no_inline
    def __init__(out self, kernel: Int, problem: ConvProblem, source: Int):
        """Plans a launch on the runtime's threads.

        Args:
            kernel: A `KERNEL_*` code; `can_implement` has agreed.
            problem: The convolution, with at least one output.
            source: A `SOURCE_*` code.
        """
        var threads = parallelism_level()
        self.kernel = kernel
        self.blocking = choose_blocking(problem, threads, source)
        self.cut = RowCut(problem, problem.filters, LANES, threads)
        self.scratch = ScratchPlan.for_rows()
        if kernel == KERNEL_DEPTHWISE:
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_GROUPED:
            self.cut = RowCut(problem, problem.filters, PANEL, threads)
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_FEW_FILTERS:
            self.cut = RowCut(
                problem, problem.filters, problem.filters, threads
            )
            self.scratch = ScratchPlan.for_few_filters(problem)
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_REFERENCE:
            self.tasks = problem.gemm_m()
        else:
            self.scratch = ScratchPlan.for_blocks(problem, self.blocking)
            self.tasks = self.blocking.tasks()
        var products = problem.gemm_m() * problem.filters * problem.gemm_k()
        self.workers = max(
            1, min(threads, self.tasks, products // MIN_TASK_PRODUCTS)
        )


@always_inline
def _run[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    plan: LaunchPlan,
    index: Int,
    scratch: Scratch,
):
    """Runs one task of a plan."""
    comptime if not x._has_input_fusion:
        if plan.kernel == KERNEL_REFERENCE:
            reference_pixel(
                output, x, filter, epilogue, problem, index, scratch
            )
            return
        var block, image_row = divmod(index, plan.cut.row_blocks())
        var begin = block * plan.cut.block
        var end = min(plan.cut.extent, begin + plan.cut.block)
        if (
            plan.kernel == KERNEL_DEPTHWISE
            or plan.kernel == KERNEL_GROUPED
            or plan.kernel == KERNEL_FEW_FILTERS
        ):
            for row in range(
                image_row * plan.cut.rows,
                min(plan.cut.image_rows, (image_row + 1) * plan.cut.rows),
            ):
                run_row(
                    plan.kernel,
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    row,
                    begin,
                    end,
                    scratch,
                )
            return
    run_task(
        output,
        x,
        filter,
        epilogue,
        problem,
        plan.blocking,
        Task(problem, plan.blocking, index),
        scratch,
    )


def launch[
    filter_type: DType
](
    kernel: Int,
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    source: Int,
) raises:
    """Runs a kernel.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        kernel: A `KERNEL_*` code; `can_implement` has agreed.
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution, with at least one output.
        source: A `SOURCE_*` code, as `x` is.
    """
    var plan = LaunchPlan(kernel, problem, source)
    var memory = HostBuffer[DType.float32](plan.scratch.elements(plan.workers))
    var base = memory.elements
    if kernel == KERNEL_FEW_FILTERS:
        UnpackedFilter(problem, base).unpack(problem, filter)

    def run(worker: Int, index: Int) raises {imm}:
        _run(
            output,
            x,
            filter,
            epilogue,
            problem,
            plan,
            index,
            plan.scratch.scratch(base, worker),
        )

    for_each_task(run, plan.tasks, plan.workers)
    _ = memory^
