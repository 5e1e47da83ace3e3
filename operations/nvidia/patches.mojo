"""Patches: convolutions whose filter is as long as its stride, so that no pixel
is read twice. The rows of a patch are contiguous, and can be taken for pixels
of more channels; patches side by side are then pixels of an image as high as
the filter. Every operand's memory stays as it is.
"""

from ..conv.fields import COPY_BYTES, KERNEL_AUTO
from ..conv.known import UNKNOWN, KnownProblem
from ..conv.memory import element_bytes
from ..conv.operands import OperandTypes
from ..conv.problem import ConvProblem

comptime ROWS = 1
comptime COLUMNS = 2
"""Of `ConvProblem`'s axes."""


def merged_patches(
    problem: ConvProblem, types: OperandTypes, requested: Int
) -> ConvProblem:
    """The same convolution with a patch's rows as pixels, where TMA takes
    these, but not the pixels themselves: of `[N, P*R, Q*S, C]` and filters
    `[K, R, S, C]` it makes `[N*P, R, Q, S*C]` and `[K, R, 1, S*C]`.

    Args:
        problem: The convolution, valid.
        types: Of the operands.
        requested: A `KERNEL_*` code.

    Returns:
        The convolution, or `problem` itself where it has no such patches, a
        kernel is asked for, or work fused in front or behind knows its
        coordinates.
    """
    var bytes = element_bytes(types.input)
    if (
        requested != KERNEL_AUTO
        or types.fused_input
        or types.fused_output
        or types.interleaved > 0
        or problem.groups > 1
        or problem.filter[0] > 1
        or problem.input[0] > 1
        or problem.channels * bytes % COPY_BYTES == 0
        or problem.filter[COLUMNS] * problem.channels * bytes % COPY_BYTES != 0
        or not _tiles_axis(problem, ROWS)
        or not _tiles_axis(problem, COLUMNS)
    ):
        return problem
    var merged = problem
    merged.batch *= problem.output[ROWS]
    merged.input[ROWS] = problem.filter[ROWS]
    merged.output[ROWS] = 1
    merged.stride[ROWS] = 1
    merged.channels *= problem.filter[COLUMNS]
    merged.input[COLUMNS] = problem.output[COLUMNS]
    merged.filter[COLUMNS] = 1
    merged.stride[COLUMNS] = 1
    return merged


def may_merge_patches(known: KnownProblem, types: OperandTypes) -> Bool:
    """Whether `merged_patches` may find pixels that TMA takes.

    Args:
        known: What is known of the problem.
        types: Of the operands.
    """
    if types.fused_input or types.fused_output or types.interleaved > 0:
        return False
    if known.taps <= UNKNOWN or known.stride <= UNKNOWN:
        return False
    var bytes = known.taps * known.channels * element_bytes(types.input)
    return (
        known.taps == known.stride
        and known.may_have_one_group()
        and bytes % COPY_BYTES == 0
    )


def _tiles_axis(problem: ConvProblem, axis: Int) -> Bool:
    """Whether patches cover an axis, side by side."""
    return (
        problem.filter[axis] == problem.stride[axis]
        and (problem.dilation[axis] == 1 or problem.filter[axis] == 1)
        and problem.pad_before[axis] == 0
        and problem.pad_after[axis] == 0
        and problem.input[axis] == problem.output[axis] * problem.stride[axis]
    )
