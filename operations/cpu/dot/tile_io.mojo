"""A block's activations: a rectangle of the image with its padding, rows of the
implicit im2col matrix, or what lies in memory."""

from ...conv.access import ActivationSource
from ...conv.blocks import BlockedActivation
from ...conv.interleave import ANY_BLOCK
from ...conv.memory import Reads, Writes
from ...conv.panels import chunk_products
from ...conv.problem import ConvProblem
from ..gemm.tile_io import (
    Columns,
    copy_channels,
    copy_memory,
    copy_width,
    fill,
)
from ..blocks import copy_pixels
from ..pixel import Pixel
from .scheduler import ACCESS_IMAGE, Block, Blocking

comptime _TESTED = 32
"""Elements that are looked at together."""


@always_inline
def write_offsets(
    problem: ConvProblem,
    blocking: Blocking,
    to: Writes[DType.int32],
    spread: Int,
):
    """Writes where the chunks of a pixel lie, behind its first input pixel, in
    elements.

    Args:
        problem: The convolution.
        blocking: The cut.
        to: Where to, `blocking.chunks` numbers.
        spread: Elements of memory that an activation takes.
    """
    var unit = blocking.depth // blocking.chunks
    if blocking.cut.access != ACCESS_IMAGE:
        write_straight_offsets(blocking, to, spread)
        return
    var channels = problem.group_channels()
    var rows = problem.filter[0] * problem.filter[1]
    var row_chunks = blocking.chunks // rows
    for row in range(rows):
        var t, r = divmod(row, problem.filter[1])
        var line = t * blocking.input_lines + r * problem.dilation[1]
        var start = line * blocking.input_columns * channels
        for j in range(row_chunks):
            var at = j * unit
            if problem.dilation[2] != 1:
                var s, channel = divmod(at, channels)
                at = s * problem.dilation[2] * channels + channel
            to[unsafe_offset=row * row_chunks + j] = Int32(
                spread * (start + at)
            )


@always_inline
def write_straight_offsets(
    blocking: Blocking, to: Writes[DType.int32], spread: Int = 1
):
    """Writes where the chunks of a row of the implicit im2col matrix lie.

    Args:
        blocking: The cut.
        to: Where to, `blocking.chunks` numbers.
        spread: Elements of memory that an activation takes.
    """
    var unit = blocking.depth // blocking.chunks
    for j in range(blocking.chunks):
        to[unsafe_offset=j] = Int32(spread * j * unit)


@no_inline
def copy_rectangle[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    blocking: Blocking,
    columns: Columns,
    block: Block,
    to: Writes[Source.dtype],
) -> Bool:
    """Copies a group's channels of the input pixels that a block reads, and the
    padding outside the image, as `[T][lines][columns][C / groups]`.

    Parameters:
        Source: How the activation is reached.

    Args:
        x: The activation.
        problem: The convolution.
        blocking: The cut.
        columns: All columns of the implicit im2col matrix.
        block: The block.
        to: Room for `blocking.block_elements`.

    Returns:
        Whether all of it may be multiplied with the zeros that fill up a filter
        row: where such zeros are, infinities and NaN of other pixels would stand
        beside them.
    """
    var n, z = divmod(block.image, problem.output[0])
    var lines = (block.lines - 1) * problem.stride[1] + problem.span(1)
    var count = (block.columns - 1) * problem.stride[2] + problem.span(2)
    var channels = problem.group_channels()
    var pitch = blocking.input_columns * channels
    var pixel = Pixel(
        n,
        {
            z * problem.stride[0] - problem.pad_before[0],
            block.line * problem.stride[1] - problem.pad_before[1],
            block.column * problem.stride[2] - problem.pad_before[2],
        },
    )
    var first = block.group * channels
    var filled = columns.products != columns.segment
    # What a smaller block leaves of the room is read with those zeros, too.
    if filled and (block.lines, block.columns) != (
        blocking.cut.lines,
        blocking.cut.columns,
    ):
        fill(to, blocking.block_elements - copy_width(Source.dtype), 0)
    var row = to
    for t in range(problem.filter[0]):
        var here = pixel
        here.at[0] += t * problem.dilation[0]
        for _ in range(lines):
            _copy_line(x, problem, columns, here, first, count, row)
            here.at[1] += 1
            row = row.unsafe_offset(pitch)
        row = row.unsafe_offset((blocking.input_lines - lines) * pitch)
    if not filled:
        return True
    # Chunks reach beyond the last pixel.
    var unit = chunk_products(Source.dtype)
    fill(row, unit, 0)
    comptime if Source.dtype.is_integral():
        return True
    else:
        return _is_finite[Source.dtype](to.as_imm(), Int(row) - Int(to))


@always_inline
def _copy_line[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    first: Pixel,
    channel: Int,
    count: Int,
    to: Writes[Source.dtype],
):
    """Copies some channels of `count` neighbouring pixels of a row of the input
    image, the first one perhaps left of it."""
    comptime width = copy_width(Source.dtype)
    var channels = problem.group_channels()
    var padding = columns.padding.cast[Source.dtype]()
    if not (first.is_inside(problem, 0) and first.is_inside(problem, 1)):
        fill(to, count * channels, padding)
        return
    var w = first.at[2]
    var left = min(count, max(0, -w))
    var right = max(left, min(count, problem.input[2] - w))
    fill(to, left * channels, padding)
    comptime if Source.interleaved == ANY_BLOCK:
        var inside = first
        inside.at[2] = w + left
        copy_pixels(
            rebind[BlockedActivation[Source.dtype]](x),
            inside,
            right - left,
            channels,
            to.unsafe_offset(left * channels),
        )
        fill(
            to.unsafe_offset(right * channels),
            (count - right) * channels,
            padding,
        )
        return
    var whole = not Source.fused and channels == problem.channels
    if whole:
        comptime if not Source.fused:
            copy_memory(
                x.data(),
                first.input_offset(problem) + left * channels,
                columns.elements,
                to.unsafe_offset(left * channels),
                (right - left) * channels,
            )
    elif not Source.fused and channels % width == 0:
        comptime if not Source.fused:
            var source = x.data().unsafe_offset(
                first.input_offset(problem) + left * problem.channels + channel
            )
            var target = to.unsafe_offset(left * channels)
            for _ in range(left, right):
                for c in range(0, channels, width):
                    target.unsafe_store(c, source.unsafe_load[width=width](c))
                source = source.unsafe_offset(problem.channels)
                target = target.unsafe_offset(channels)
    else:
        var pixel = first
        for i in range(left, right):
            pixel.at[2] = w + i
            copy_channels(
                x,
                problem,
                columns,
                pixel,
                channel,
                to.unsafe_offset(i * channels),
                channels,
            )
    fill(
        to.unsafe_offset(right * channels), (count - right) * channels, padding
    )


def flip_signs[dtype: DType](elements: Writes[dtype], count: Int):
    """Makes of int8 unsigned numbers 128 above, in whole vectors.

    Parameters:
        dtype: Theirs, int8.

    Args:
        elements: The numbers, and room for a vector's rest behind them.
        count: How many.
    """
    comptime width = copy_width(dtype)
    for i in range(0, count, width):
        elements.unsafe_store(
            i, elements.unsafe_load[width=width](i) ^ Scalar[dtype](-128)
        )


@always_inline
def _is_finite[dtype: DType](elements: Reads[dtype], bytes: Int) -> Bool:
    """Whether there is neither an infinity nor a NaN; looks at whole
    `_TESTED`s, and so at up to as many elements behind."""
    # All bits of the exponent.
    comptime exponent = UInt16(0x7F80 if dtype == DType.bfloat16 else 0x7C00)
    var most = SIMD[DType.uint16, _TESTED](0)
    var bits = elements.unsafe_bitcast[UInt16]()
    for i in range(0, bytes // 2, _TESTED):
        most = max(most, bits.unsafe_load[width=_TESTED](i) & exponent)
    return most.reduce_max() < exponent
