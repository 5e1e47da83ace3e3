"""Taps of a block's lines that read nothing but padding."""

from ...conv.problem import ConvProblem
from .mma import MASK_ROWS, Edges
from .scheduler import ACCESS_IMAGE, Block, Blocking


def edges_of(
    problem: ConvProblem,
    blocking: Blocking,
    block: Block,
    line: Int,
    first: Int,
    count: Int,
) -> Edges:
    """The edges of some lines of a block.

    Args:
        problem: The convolution, whose padding is zeros.
        blocking: The cut.
        block: The block.
        line: The first of the block's lines.
        first: The first pixel of each, of the block's.
        count: Pixels of each.
    """
    ref filter = problem.filter
    if (
        blocking.flat
        or blocking.cut.access != ACCESS_IMAGE
        or filter[0] * filter[1] > MASK_ROWS
    ):
        return Edges.none()
    var z = block.image % problem.output[0]
    var slice = z * problem.stride[0] - problem.pad_before[0]
    var slices = UInt64(0)
    for t in range(
        problem.taps_before(0, slice, 0),
        problem.taps_before(0, slice, problem.input[0]),
    ):
        slices |= UInt64(1) << UInt64(t * filter[1])
    var tap_chunks = 0
    if blocking.row_chunks % filter[2] == 0:
        tap_chunks = blocking.row_chunks // filter[2]
        # A tap whose last chunk is part of the next one is no such.
        if blocking.depth // blocking.chunks * tap_chunks != (
            problem.group_channels()
        ):
            tap_chunks = 0
    var begin = block.column + first
    var column = begin * problem.stride[2] - problem.pad_before[2]
    var last = column + (count - 1) * problem.stride[2]
    return Edges(
        (block.line + line) * problem.stride[1] - problem.pad_before[1],
        problem.stride[1],
        problem.dilation[1],
        filter[1],
        problem.input[1],
        slices,
        tap_chunks,
        problem.taps_before(2, column, 0),
        problem.taps_before(2, last, problem.input[2]),
    )
