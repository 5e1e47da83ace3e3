"""Taps of a block's lines that read nothing but padding."""

from std.math import ceildiv

from ...conv.problem import ConvProblem
from .scheduler import ACCESS_LINES, Block, Blocking
from .tap_edges import FEW_ALIKE, MASK_ROWS, Edges


def edges_of(
    problem: ConvProblem,
    blocking: Blocking,
    block: Block,
    line: Int,
    first: Int,
    padding: UInt32,
) -> Edges:
    """The edges of some lines of a block.

    Args:
        problem: The convolution.
        blocking: The cut.
        block: The block.
        line: The first of the block's lines.
        first: The first pixel of each, of the block's.
        padding: A word of padding, as it is multiplied.
    """
    ref filter = problem.filter
    if blocking.flat or filter[0] * filter[1] > MASK_ROWS:
        return Edges.none()
    var image = block.image
    var row = block.line + line
    if blocking.cut.access == ACCESS_LINES:
        image, row = divmod(block.image, problem.output[1])
    var z = image % problem.output[0]
    var slice = z * problem.stride[0] - problem.pad_before[0]
    var slices = UInt64(0)
    for t in range(
        problem.taps_before(0, slice, 0),
        problem.taps_before(0, slice, problem.input[0]),
    ):
        slices |= UInt64(1) << UInt64(t * filter[1])
    var column = block.column + first
    var tap_chunks = _tap_chunks(problem, blocking)
    var most = FEW_ALIKE * problem.stride[2]
    return Edges(
        row * problem.stride[1] - problem.pad_before[1],
        problem.stride[1],
        problem.dilation[1],
        filter[1],
        problem.input[1],
        slices,
        tap_chunks,
        column * problem.stride[2] - problem.pad_before[2],
        problem.stride[2],
        problem.dilation[2],
        filter[2],
        problem.input[2],
        padding,
        tap_chunks > 0
        and max(problem.pad_before[2], problem.pad_after[2]) > most,
    )


def _tap_chunks(problem: ConvProblem, blocking: Blocking) -> Int:
    """Chunks of a tap; 0 if a tap's last chunk is part of the next one."""
    var taps = problem.filter[2]
    var chunks = blocking.row_chunks // taps
    var products = blocking.depth // blocking.chunks * chunks
    return chunks if products == problem.group_channels() else 0


def inside_share(problem: ConvProblem, blocking: Blocking) -> Float64:
    """The share of an image's products that is left when those of taps beside it
    are left out.

    Args:
        problem: The convolution.
        blocking: A cut into lines that are not flat.
    """
    var lines = 0
    for r in range(problem.filter[1]):
        var before, behind = _outside(problem, 1, r)
        lines += max(0, problem.output[1] - before - behind)
    var share = Float64(lines) / Float64(problem.output[1] * problem.filter[1])
    if _tap_chunks(problem, blocking) == 0:
        return share
    var width = problem.output[2]
    var pixels = 0
    for s in range(problem.filter[2]):
        var before, behind = _outside(problem, 2, s)
        if before > FEW_ALIKE or behind > FEW_ALIKE:
            pixels += max(0, width - before - behind)
        else:
            pixels += width
    return share * Float64(pixels) / Float64(width * problem.filter[2])


def _outside(problem: ConvProblem, axis: Int, tap: Int) -> Tuple[Int, Int]:
    """Outputs along an axis for which a tap lies in front of the image, and
    behind it."""
    var stride = problem.stride[axis]
    var first = tap * problem.dilation[axis] - problem.pad_before[axis]
    var last = first + (problem.output[axis] - 1) * stride
    var before = ceildiv(max(0, -first), stride)
    var behind = ceildiv(max(0, last - problem.input[axis] + 1), stride)
    return (before, behind)
