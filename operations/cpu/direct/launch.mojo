"""The direct kernels' launch: tasks are rows of the output image by a block of
filters or columns, computed span by span into L1 and stored from there."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.memory import Reads, Writes
from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ...conv.quantization import EXACT_PRODUCTS
from ..accumulators import OutputTile
from ..epilogue import TileStore
from ..kernel import CpuKernel
from ..register_output import RegisterOutput
from ..scheduler import Schedule, Tasks
from .cut import RowCut, image_rows
from .image_row import COLUMNS, SPAN_SUMS, ImageRow, Span
from .sums import DirectOutput

comptime MAX_TASK_ROWS = 16
"""Image rows of the largest task of a direct kernel: neighbouring rows read
mostly the same, which one core finds in its L2."""

comptime THREAD_TASKS = 8
"""Tasks that each thread gets before a task has more than one image row, so
that threads finish together."""

comptime THREAD_BLOCKS = 4
"""Tasks that each thread gets of a single image row."""

comptime MIN_TASK_COLUMNS = 32
"""Output columns of the narrowest part of an image row that is a task."""


def choose_rows(
    problem: ConvProblem,
    threads: Int,
    *,
    unit: Int,
    cuts_columns: Bool = False,
    pairs: Bool = False,
) -> RowCut:
    """Cuts by rows and, if they are few, so that a single row still feeds every
    thread.

    Args:
        problem: The convolution.
        threads: How many threads there are.
        unit: What a block should be a multiple of.
        cuts_columns: Whether blocks are of columns.
        pairs: Whether two rows are computed together.
    """
    var all = image_rows(problem)
    var rows = max(1, min(MAX_TASK_ROWS, all // (threads * THREAD_TASKS)))
    if pairs:
        rows = min(all, max(2, rows // 2 * 2))
    var extent = problem.output[2] if cuts_columns else problem.filters
    var blocks = min(
        ceildiv(extent, unit),
        ceildiv(threads * THREAD_BLOCKS, ceildiv(all, rows)),
    )
    var block = ceildiv(ceildiv(extent, blocks), unit) * unit
    if cuts_columns:
        block = min(block, ceildiv(extent, COLUMNS) * COLUMNS)
    return RowCut(
        cuts_columns=1 if cuts_columns else 0,
        rows=rows,
        block=block,
    )


@fieldwise_init
struct RowPlan(ImplicitlyCopyable, Movable):
    """A cut into tasks of some image rows by a block of filters or of columns.
    """

    var image_rows: Int
    """Of all images."""
    var rows: Int
    """Of a task."""
    var cuts_columns: Bool
    """Whether blocks are of columns."""
    var extent: Int
    """Filters or columns of an image row."""
    var block: Int
    """Filters or columns of a task."""
    var schedule: Schedule

    def __init__(
        out self,
        problem: ConvProblem,
        cut: RowCut,
        threads: Int,
        *,
        slack: Int = 0,
    ):
        """Schedules a cut.

        Args:
            problem: The convolution.
            cut: The cut.
            threads: How many threads there are.
            slack: Float32 values that may be written behind a span's sums.
        """
        self.image_rows = image_rows(problem)
        self.rows = cut.rows
        self.cuts_columns = cut.cuts_columns == 1
        self.extent = problem.output[2] if self.cuts_columns else (
            problem.filters
        )
        self.block = cut.block
        var tasks = ceildiv(self.image_rows, self.rows) * ceildiv(
            self.extent, self.block
        )
        self.schedule = Schedule(problem, tasks, threads, SPAN_SUMS + slack)

    def part(self, problem: ConvProblem, block: Int) -> Span:
        """The columns and filters of a block.

        Args:
            problem: The convolution.
            block: Which one.
        """
        var begin = block * self.block
        var end = min(self.extent, begin + self.block)
        if self.cuts_columns:
            return Span(begin, end, 0, problem.filters)
        return Span(0, problem.output[2], begin, end)


trait RowKernel(CpuKernel):
    """A direct kernel, as a tuner sees it."""

    comptime filter_unit: Int
    """What blocks of filters are multiples of; 0 where tasks have all filters.
    """

    @staticmethod
    def choice(problem: ConvProblem, threads: Int) -> RowCut:
        """The cut that the kernel chooses.

        Args:
            problem: The convolution, with at least one output.
            threads: How many threads there are.
        """
        ...


trait SpanKernel(Deinitable, ImplicitlyCopyable):
    """The arithmetic of a direct kernel, with its filter."""

    def filters_at_once(self, filters: Int) -> Int:
        """Filters of a span.

        Args:
            filters: Of a task.
        """
        ...

    def compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, to: Writes[DType.float32]):
        """Computes the sums of a span.

        Parameters:
            dtype: Of the activation.

        Args:
            row: The image row.
            span: Which columns, and at most `filters_at_once` filters.
            to: `span.filters()` sums of each column; at least `COLUMNS` columns
                may be written.
        """
        ...

    def finish[
        dtype: DType
    ](
        self,
        row: ImageRow[dtype],
        rows: Int,
        span: Span,
        output: DirectOutput[dtype],
    ) -> Int:
        """Computes a span of some image rows and stores its outputs, if the
        kernel can.

        Parameters:
            dtype: Of activation and output.

        Args:
            row: The first image row.
            rows: How many rows of its plane may be computed, at least 1.
            span: Which columns and filters.
            output: The output of the first row.

        Returns:
            Of how many rows it has.
        """
        return 0


@always_inline
def _run_rows[
    dtype: DType
](
    kernel: Some[SpanKernel],
    problem: ConvProblem,
    activation: Reads[dtype],
    zero: Float32,
    output: TileStore,
    direct: Optional[RegisterOutput[dtype]],
    index: Int,
    rows: Int,
    part: Span,
    sums: Writes[DType.float32],
) -> Int:
    """Computes a part of a row of the output image, of any size, and of as many
    below it, up to `rows` together, as the kernel takes with it.

    Returns:
        How many rows.
    """
    var row = ImageRow(activation, problem, index, zero)
    var first = index * problem.output[2]
    if direct:
        var finished = kernel.finish(
            row,
            min(rows, problem.output[1] - row.line),
            part,
            DirectOutput(direct.value().at(first)),
        )
        if finished > 0:
            return finished
    var block = kernel.filters_at_once(part.filters())
    for filter in range(part.begin, part.end, block):
        var filters = min(part.end - filter, block)
        var columns = SPAN_SUMS // filters // COLUMNS * COLUMNS
        for q in range(part.q, part.q_end, columns):
            var q_end = min(part.q_end, q + columns)
            kernel.compute(row, Span(q, q_end, filter, filter + filters), sums)
            output.store(
                problem,
                OutputTile(first + q, q_end - q, filter, filters),
                sums,
                filters,
            )
    return 1


struct RowTasks[element_type: DType, Kernel: SpanKernel](Tasks):
    """The tasks of a plan.

    Parameters:
        element_type: Of the activation.
        Kernel: The arithmetic.
    """

    var kernel: Self.Kernel
    """The arithmetic, with its filter."""
    var plan: RowPlan
    """The cut."""
    var problem: ConvProblem
    var activation: Reads[Self.element_type]
    """`[N, D, H, W, C]`."""
    var zero: Float32
    """What stands for 0 in it, where it is integers."""
    var output: TileStore
    """The epilogue and the output."""
    var direct: Optional[RegisterOutput[Self.element_type]]
    """The output, if sums may go there from registers."""

    def __init__(
        out self,
        kernel: Self.Kernel,
        plan: RowPlan,
        problem: ConvProblem,
        activation: Reads[Self.element_type],
        zero: Float32,
        output: TileStore,
        direct: Optional[RegisterOutput[Self.element_type]] = None,
    ):
        """The tasks of a launch.

        Args:
            kernel: See the fields, like the others.
            plan: The same.
            problem: The same.
            activation: The same.
            zero: The same.
            output: The same.
            direct: The same.
        """
        self.kernel = kernel
        self.plan = plan
        self.problem = problem
        self.activation = activation
        self.zero = zero
        self.output = output
        self.direct = direct

    def run(self, task: Int, scratch: Writes[DType.float32]):
        var row_blocks = ceildiv(self.plan.image_rows, self.plan.rows)
        var block, row_block = divmod(task, row_blocks)
        var part = self.plan.part(self.problem, block)
        var first = row_block * self.plan.rows
        var end = min(self.plan.image_rows, first + self.plan.rows)
        while first < end:
            first += _run_rows(
                self.kernel,
                self.problem,
                self.activation,
                self.zero,
                self.output,
                self.direct,
                first,
                end - first,
                part,
                scratch,
            )


def exactness_refusal(
    problem: ConvProblem, types: OperandTypes
) -> Optional[String]:
    """Why float32 does not hold every sum of integers, or None.

    Args:
        problem: The convolution.
        types: Of the operands.
    """
    var products = problem.gemm_k()
    if not types.input.is_integral() or products <= EXACT_PRODUCTS:
        return None
    return String(
        t"float32 holds sums of {EXACT_PRODUCTS} products of 8 bits whatever"
        t" they are, but here an output has {products}"
    )
