"""The direct kernels' task: rows of the output image by a block of filters,
span by span, each computed into L1 and stored from there."""

from extensibility import ManagedTensorSlice

from ..conv.epilogue import Epilogue
from ..conv.fields import KERNEL_DEPTHWISE, KERNEL_FEW_FILTERS
from ..conv.memory import Reads, operand
from ..conv.problem import ConvProblem
from .depthwise import depthwise_span
from .epilogue import store_tile
from .few_filters import UnpackedFilter, few_filters_span, span_filters
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
    kernel: Int,
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    image_row: Int,
    part: Span,
    scratch: Scratch,
):
    """Computes a part of one row of the output image.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        kernel: `KERNEL_DEPTHWISE`, `KERNEL_GROUPED` or `KERNEL_FEW_FILTERS`;
            `can_implement` has agreed.
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution.
        image_row: Which row, counted over images and depths.
        part: Which columns and filters, any number of them.
        scratch: The worker's own memory, as the kernel's `ScratchPlan` has it.
    """
    var row = image_row * problem.output[2]
    var line = RowTaps(problem, row)
    var block = (
        span_filters(part.filters()) if kernel
        == KERNEL_FEW_FILTERS else MAX_SPAN_FILTERS
    )
    for filters in range(part.begin, part.end, block):
        var last = min(part.end, filters + block)
        var columns = SPAN_SUMS // (last - filters) // COLUMNS * COLUMNS
        for q in range(part.q, part.q_end, columns):
            var span = Span(q, min(part.q_end, q + columns), filters, last)
            if kernel == KERNEL_DEPTHWISE:
                depthwise_span(
                    operand(x),
                    filter,
                    problem,
                    line,
                    span,
                    scratch.accumulators,
                )
            elif kernel == KERNEL_FEW_FILTERS:
                few_filters_span(
                    operand(x),
                    UnpackedFilter(problem, scratch.shared),
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
