"""The direct kernels' task: a row of the output image by a block of filters,
span by span, each computed into L1 and stored from there."""

from extensibility import ManagedTensorSlice

from ..conv.epilogue import Epilogue
from ..conv.memory import Reads, operand
from ..conv.problem import ConvProblem
from .depthwise import depthwise_span
from .epilogue import store_tile
from .grouped import grouped_span
from .image_row import (
    COLUMNS,
    MAX_SPAN_FILTERS,
    SPAN_SUMS,
    RowTaps,
    Span,
)
from .smem import Scratch


def run_row[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    image_row: Int,
    begin: Int,
    end: Int,
    scratch: Scratch,
):
    """Computes filters `[begin, end)` of one row of the output image.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution, depthwise or what the grouped kernel takes.
        image_row: Which row, counted over images and depths.
        begin: The first filter.
        end: The filter behind the last.
        scratch: The worker's own memory: `SPAN_SUMS` sums.
    """
    var row = image_row * problem.output[2]
    var line = RowTaps(problem, row)
    for filters in range(begin, end, MAX_SPAN_FILTERS):
        var last = min(end, filters + MAX_SPAN_FILTERS)
        var columns = SPAN_SUMS // (last - filters) // COLUMNS * COLUMNS
        for q in range(0, problem.output[2], columns):
            var span = Span(
                q, min(problem.output[2], q + columns), filters, last
            )
            if problem.is_depthwise():
                depthwise_span(
                    operand(x),
                    filter,
                    problem,
                    line,
                    span,
                    scratch.accumulators,
                )
            else:
                grouped_span(
                    operand(x),
                    filter,
                    problem,
                    line,
                    span,
                    scratch.activation,
                    scratch.accumulators,
                )
            store_tile(
                output,
                epilogue,
                problem,
                row + q,
                span.q_end - q,
                filters,
                span.filters(),
                scratch.accumulators.as_imm(),
                span.filters(),
            )
