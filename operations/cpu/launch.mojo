"""Runs the CPU kernels over all threads."""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.runtime import parallelism_level

from .config import LANES
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
from .reference import reference_pixel
from .direct import run_row
from .few_filters import UnpackedFilter
from .image_row import Span
from .kernel import Task, run_task
from .scheduler import (
    Blocking,
    CpuContext,
    choose_blocking,
    for_each_task,
)
from .smem import Scratch, ScratchPlan

comptime MIN_TASK_PRODUCTS = 1 << 17
"""Multiply-adds below which a task is not worth waking a thread for."""

comptime MAX_TASK_ROWS = 16
"""Image rows of the largest task of a direct kernel: neighbouring rows read
mostly the same, which one core finds in its L2."""

comptime THREAD_TASKS = 8
"""Tasks that each thread gets before a task has more than one image row, so
that threads finish together."""

comptime MIN_TASK_COLUMNS = 32
"""Output columns of the narrowest part of an image row that is a task."""


@fieldwise_init
struct RowCut(ImplicitlyCopyable, Movable):
    """A cut into tasks of some image rows by a block of filters, or of columns.
    """

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
            extent: How many filters, or columns, an image row has.
            unit: What a block should be a multiple of.
            threads: How many threads there are.
        """
        self.image_rows = problem.gemm_m() // problem.output[2]
        self.rows = max(
            1, min(MAX_TASK_ROWS, self.image_rows // (threads * THREAD_TASKS))
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
        """How many tasks there are of each block of filters or columns."""
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
        self.blocking = Blocking.nothing()
        self.cut = RowCut(problem, problem.filters, LANES, threads)
        self.scratch = ScratchPlan.for_rows()
        if kernel == KERNEL_DEPTHWISE:
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_GROUPED:
            self.cut = RowCut(problem, problem.filters, PANEL, threads)
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_FEW_FILTERS:
            self.cut = RowCut(
                problem, problem.output[2], MIN_TASK_COLUMNS, threads
            )
            self.scratch = ScratchPlan.for_few_filters(problem)
            self.tasks = self.cut.tasks()
        elif kernel == KERNEL_REFERENCE:
            self.tasks = problem.gemm_m()
        else:
            self.blocking = choose_blocking(problem, threads, source)
            self.scratch = ScratchPlan.for_blocks(problem, self.blocking)
            self.tasks = self.blocking.tasks()
        var products = problem.gemm_m() * problem.filters * problem.gemm_k()
        self.workers = max(
            1, min(threads, self.tasks, products // MIN_TASK_PRODUCTS)
        )


@always_inline
def _run_rows[
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
    """Runs one task of a direct kernel."""
    var cut = plan.cut
    var block, row_block = divmod(index, cut.row_blocks())
    var begin = block * cut.block
    var end = min(cut.extent, begin + cut.block)
    var part = Span(0, problem.output[2], begin, end)
    if plan.kernel == KERNEL_FEW_FILTERS:
        part = Span(begin, end, 0, problem.filters)
    var first = row_block * cut.rows
    for image_row in range(first, min(cut.image_rows, first + cut.rows)):
        run_row(
            plan.kernel,
            output,
            x,
            filter,
            epilogue,
            problem,
            image_row,
            part,
            scratch,
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
        if (
            plan.kernel == KERNEL_DEPTHWISE
            or plan.kernel == KERNEL_GROUPED
            or plan.kernel == KERNEL_FEW_FILTERS
        ):
            _run_rows(
                output, x, filter, epilogue, problem, plan, index, scratch
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
    ctx: CpuContext,
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
        ctx: The CPU.

    Raises:
        If the CPU's queue refuses the work.
    """
    var plan = LaunchPlan(kernel, problem, source)
    var memory = HostBuffer[DType.float32](plan.scratch.elements(plan.workers))
    var base = memory.elements
    if kernel == KERNEL_FEW_FILTERS:
        UnpackedFilter(problem, base).unpack(problem, filter)

    def run(worker: Int, index: Int) {imm}:
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

    for_each_task(run, plan.tasks, plan.workers, ctx)
    _ = memory^
