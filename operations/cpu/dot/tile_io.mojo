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
def copy_rectangles[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    blocking: Blocking,
    columns: Columns,
    block: Block,
    to: Writes[Source.dtype],
    spread: Int,
    meets_zeros: Bool,
):
    """Copies the channels of a block's groups of the input pixels that the block
    reads, and the padding outside the image, as `[groups][T][lines][columns][C /
    groups]`: neighbouring groups share cache lines.

    Parameters:
        Source: How the activation is reached.

    Args:
        x: The activation.
        problem: The convolution.
        blocking: The cut.
        columns: All columns of the implicit im2col matrix.
        block: The block.
        to: Room for `blocking.block_elements` of each group.
        spread: Times as many elements lie between two groups.
        meets_zeros: Whether the filter has zeros that are multiplied.
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
    var groups = _Groups(
        block.group, block.groups, spread * blocking.block_elements
    )
    # What a smaller block leaves of the room is multiplied by them, too.
    if meets_zeros and (block.lines, block.columns) != (
        blocking.cut.lines,
        blocking.cut.columns,
    ):
        groups.fill(to, blocking.block_elements - copy_width(Source.dtype), 0)
    var row = to
    for t in range(problem.filter[0]):
        var here = pixel
        here.at[0] += t * problem.dilation[0]
        for _ in range(lines):
            _copy_line(x, problem, columns, here, groups, count, row)
            here.at[1] += 1
            row = row.unsafe_offset(pitch)
        row = row.unsafe_offset((blocking.input_lines - lines) * pitch)
    if columns.products != columns.segment:
        # Chunks reach beyond the last pixel.
        groups.fill(row, chunk_products(Source.dtype), 0)


def meets_zeros(columns: Columns, joined: Bool) -> Bool:
    """Whether a copied rectangle is multiplied by zeros of the filter: such as
    fill up a filter row or belong to another group.

    Args:
        columns: All columns of the implicit im2col matrix.
        joined: Whether groups are multiplied as one.
    """
    return joined or columns.products != columns.segment


def rectangle_is_finite[
    dtype: DType
](elements: Reads[dtype], problem: ConvProblem, blocking: Blocking) -> Bool:
    """Whether a copied rectangle has neither an infinity nor a NaN: times zero
    they would be NaN.

    Parameters:
        dtype: Of the elements, 16 bits wide.

    Args:
        elements: What `copy_rectangles` wrote of a group.
        problem: The convolution.
        blocking: The cut.
    """
    var pixels = (
        problem.filter[0] * blocking.input_lines * blocking.input_columns
    )
    return _is_finite[dtype](elements, pixels * problem.group_channels())


@fieldwise_init
struct _Groups(ImplicitlyCopyable, Movable):
    """Groups whose channels are copied together."""

    var first: Int
    var count: Int
    var stride: Int
    """Elements between what is copied of two groups."""

    @always_inline
    def fill[
        dtype: DType, //
    ](self, to: Writes[dtype], count: Int, value: Scalar[dtype]):
        """Fills the same place of each group.

        Args:
            to: Where, of the first group.
            count: Elements.
            value: What with.
        """
        for group in range(self.count):
            fill(to.unsafe_offset(group * self.stride), count, value)


@always_inline
def _copy_line[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    first: Pixel,
    groups: _Groups,
    count: Int,
    to: Writes[Source.dtype],
):
    """Copies the channels of some groups of `count` neighbouring pixels of a row
    of the input image, the first one perhaps left of it."""
    comptime width = copy_width(Source.dtype)
    var channels = problem.group_channels()
    var padding = columns.padding.cast[Source.dtype]()
    if not (first.is_inside(problem, 0) and first.is_inside(problem, 1)):
        groups.fill(to, count * channels, padding)
        return
    var left = min(count, max(0, -first.at[2]))
    var right = max(left, min(count, problem.input[2] - first.at[2]))
    groups.fill(to, left * channels, padding)
    var inside = first
    inside.at[2] += left
    var target = to.unsafe_offset(left * channels)
    var copied = False
    comptime if not Source.fused and Source.interleaved != ANY_BLOCK:
        if channels == problem.channels or channels % width == 0:
            _copy_memory(
                x.data(),
                inside.input_offset(problem),
                problem,
                columns.elements,
                groups,
                right - left,
                target,
            )
            copied = True
    if not copied:
        for group in range(groups.count):
            _copy_pixels(
                x,
                problem,
                columns,
                inside,
                (groups.first + group) * channels,
                right - left,
                target.unsafe_offset(group * groups.stride),
            )
    groups.fill(
        to.unsafe_offset(right * channels), (count - right) * channels, padding
    )


@always_inline
def _copy_memory[
    dtype: DType
](
    x: Reads[dtype],
    offset: Int,
    problem: ConvProblem,
    elements: Int,
    groups: _Groups,
    count: Int,
    to: Writes[dtype],
):
    """Copies pixels inside the image, all channels or whole vectors of a group's.
    """
    comptime width = copy_width(dtype)
    var channels = problem.group_channels()
    if channels == problem.channels:
        copy_memory(x, offset, elements, to, count * channels)
        return
    var source = x.unsafe_offset(offset + groups.first * channels)
    var target = to
    for _ in range(count):
        for group in range(groups.count):
            var from_group = source.unsafe_offset(group * channels)
            var to_group = target.unsafe_offset(group * groups.stride)
            for c in range(0, channels, width):
                to_group.unsafe_store(c, from_group.unsafe_load[width=width](c))
        source = source.unsafe_offset(problem.channels)
        target = target.unsafe_offset(channels)


@always_inline
def _copy_pixels[
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
    """Copies a group's channels of pixels inside the image, pixel by pixel."""
    var channels = problem.group_channels()
    comptime if Source.interleaved == ANY_BLOCK:
        copy_pixels(
            rebind[BlockedActivation[Source.dtype]](x),
            first,
            count,
            channels,
            to,
        )
        return
    var pixel = first
    for i in range(count):
        pixel.at[2] = first.at[2] + i
        copy_channels(
            x,
            problem,
            columns,
            pixel,
            channel,
            to.unsafe_offset(i * channels),
            channels,
        )


def flip_signs[dtype: DType](elements: Writes[dtype], count: Int):
    """Makes of int8 unsigned numbers 128 above.

    Parameters:
        dtype: Theirs, int8.

    Args:
        elements: The numbers.
        count: How many.
    """
    comptime width = copy_width(dtype)
    var whole = count // width * width
    for i in range(0, whole, width):
        elements.unsafe_store(
            i, elements.unsafe_load[width=width](i) ^ Scalar[dtype](-128)
        )
    for i in range(whole, count):
        elements[unsafe_offset=i] ^= Scalar[dtype](-128)


@no_inline
def rows_are_finite[
    dtype: DType
](rows: Reads[dtype], count: Int, stride: Int, depth: Int) -> Bool:
    """Whether gathered rows have neither an infinity nor a NaN.

    Parameters:
        dtype: Of the elements, 16 bits wide.

    Args:
        rows: The rows.
        count: How many.
        stride: Elements between two.
        depth: Elements of each, whole chunks.
    """
    for i in range(count):
        var row = rows.unsafe_offset(i * stride)
        if not _is_finite[dtype](row, depth):
            return False
    return True


@always_inline
def _is_finite[dtype: DType](elements: Reads[dtype], count: Int) -> Bool:
    """Whether so many elements have neither an infinity nor a NaN; looks at whole
    `_TESTED`s, and so at up to as many elements behind."""
    # All bits of the exponent.
    comptime exponent = UInt16(0x7F80 if dtype == DType.bfloat16 else 0x7C00)
    var most = SIMD[DType.uint16, _TESTED](0)
    var bits = elements.unsafe_bitcast[UInt16]()
    for i in range(0, count, _TESTED):
        most = max(most, bits.unsafe_load[width=_TESTED](i) & exponent)
    return most.reduce_max() < exponent
