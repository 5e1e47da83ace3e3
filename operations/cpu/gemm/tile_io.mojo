"""Activation tiles: rows of the implicit im2col matrix, gathered in the type that
a kernel multiplies.

A row is one output pixel's `T*R*S*C/groups` inputs in the order of the packed
filter. Only a block of rows ever exists, in a buffer that fits in L2; padding
becomes zeros here, so the multiplication never asks for it.
"""

from std.math import ceildiv
from std.memory import bitcast

from ...conv.access import ActivationSource
from ...conv.blocks import BlockedActivation
from ...conv.fields import PANEL
from ...conv.interleave import ANY_BLOCK
from ...conv.memory import Reads, Writes, bits_type
from ...conv.panels import PanelLayout
from ...conv.problem import SPATIAL, ConvProblem
from ..blocks import copy_pixels
from ..pixel import Pixel, load_activation
from .scheduler import RowTile

comptime MAX_COPY = 2 * PANEL
"""The largest `copy_width`."""


def copy_width(dtype: DType) -> Int:
    """Elements that the gather moves at once: more of integers, which have 8
    bits.

    Args:
        dtype: Of the elements.
    """
    return MAX_COPY if dtype.is_integral() else PANEL


@always_inline
def fill[
    to_type: DType, //
](to: Writes[to_type], count: Int, value: Scalar[to_type]):
    """Fills at least `count` values, in whole `copy_width`s: the excess is
    overwritten by the next run, or lies in the row's slack."""
    comptime width = copy_width(to_type)
    comptime bits = bits_type(to_type)
    var values = SIMD[bits, width](bitcast[bits, 1](value)[0])
    var elements = to.unsafe_bitcast[Scalar[bits]]()
    for i in range(0, count, width):
        elements.unsafe_store(i, values)


@always_inline
def copy_memory[
    dtype: DType, to_type: DType, //
](x: Reads[dtype], begin: Int, length: Int, to: Writes[to_type], count: Int):
    """Converts `x[begin : begin+count]`, in whole `copy_width`s where the tensor
    of `length` elements reaches that far; the excess is as in `fill`."""
    comptime width = copy_width(to_type)
    var whole = count
    if begin + ceildiv(count, width) * width > length:
        whole = count // width * width
    for i in range(0, whole, width):
        to.unsafe_store(
            i, x.unsafe_load[width=width](begin + i).cast[to_type]()
        )
    for i in range(whole, count):
        to[unsafe_offset=i] = x[unsafe_offset=begin + i].cast[to_type]()


@always_inline
def copy_channels[
    Source: ActivationSource, to_type: DType, //
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    pixel: Pixel,
    channel: Int,
    to: Writes[to_type],
    count: Int,
):
    """Copies `count` channels of an input pixel inside the image, from memory
    or through the fused producer; the excess is as in `fill`."""
    comptime if Source.interleaved == ANY_BLOCK:
        # Of one group, and so all channels.
        copy_pixels(
            rebind[BlockedActivation[Source.dtype]](x),
            pixel,
            1,
            count,
            rebind[Writes[Source.dtype]](to),
        )
    elif Source.fused:
        comptime width = copy_width(to_type)
        var whole = count // width * width
        for i in range(0, whole, width):
            to.unsafe_store(
                i,
                load_activation[to_type, width](x, problem, pixel, channel + i),
            )
        for i in range(whole, count):
            to[unsafe_offset=i] = load_activation[to_type, 1](
                x, problem, pixel, channel + i
            )[0]
    else:
        copy_memory(
            x.data(),
            pixel.input_offset(problem) + channel,
            columns.elements,
            to,
            count,
        )


def is_adjacent(problem: ConvProblem) -> Bool:
    """Whether a filter row's taps lie side by side in memory.

    Args:
        problem: The convolution.
    """
    return problem.groups == 1 and (
        problem.dilation[2] == 1 or problem.filter[2] == 1
    )


def may_miss_image(problem: ConvProblem) -> Bool:
    """Whether it pays to ask which taps meet the image: dilated taps reach so
    far into the padding that tiles are beside the image, and a tap is long.

    Args:
        problem: The convolution.
    """
    var reaches = False
    comptime for axis in range(SPATIAL):
        var padding = max(problem.pad_before[axis], problem.pad_after[axis])
        reaches = reaches or (problem.dilation[axis] > 1 and padding > 1)
    return reaches and problem.group_channels() >= PANEL


@always_inline
def meets_image(problem: ConvProblem, tile: RowTile, tap: Int) -> Bool:
    """Whether a tap lies inside the image for any pixel of a tile.

    Args:
        problem: The convolution.
        tile: The pixels.
        tap: `(t * R + r) * S + s`.
    """
    var tr, s = divmod(tap, problem.filter[2])
    var t, r = divmod(tr, problem.filter[1])
    var pixel = Pixel(problem, tile.row)
    for _ in range(tile.rows):
        var at = pixel.input(problem).tap(problem, t, r, s)
        if (
            at.is_inside(problem, 0)
            and at.is_inside(problem, 1)
            and at.is_inside(problem, 2)
        ):
            return True
        pixel.advance(problem)
    return False


@fieldwise_init
struct Columns(ImplicitlyCopyable, Movable):
    """Columns `[begin, end)` of the implicit im2col matrix, cut into segments:
    the inputs of one filter row, `S * C/groups` of them, and the zeros that fill
    up the packed filter's row."""

    var begin: Int
    var end: Int
    var segment: Int
    """Columns of a segment."""
    var products: Int
    """Those that are no zeros."""
    var first_t: Int
    var first_r: Int
    var adjacent: Bool
    var elements: Int
    """Of the activation."""
    var padding: Int32
    """What stands outside the image: the integer that stands for 0."""

    def __init__(
        out self,
        problem: ConvProblem,
        panel: PanelLayout,
        begin: Int,
        end: Int,
        padding: Int32 = 0,
    ):
        """Finds the segment that `begin` lies in.

        Args:
            problem: The convolution.
            panel: The order of the packed filter.
            begin: The first column.
            end: The column behind the last.
            padding: What stands outside the image.
        """
        self.padding = padding
        self.begin = begin
        self.end = end
        self.segment = panel.row_depth
        self.products = panel.products
        self.first_t, self.first_r = divmod(
            begin // self.segment, problem.filter[1]
        )
        self.adjacent = is_adjacent(problem)
        ref extents = problem.input
        var pixels = problem.batch * extents[0] * extents[1] * extents[2]
        self.elements = pixels * problem.channels


@always_inline
def _gather_span[
    to_type: DType, //
](
    x: Some[ActivationSource],
    problem: ConvProblem,
    columns: Columns,
    pixel: Pixel,
    begin: Int,
    end: Int,
    to: Writes[to_type],
):
    """Gathers elements `[begin, end)` of one filter row's `S*C` inputs, which
    lie side by side in memory from `pixel` on, zeroing those left and right of
    the image."""
    var channels = problem.channels
    var padding = columns.padding.cast[to_type]()
    var first = max(0, -pixel.at[2]) * channels
    var last = max(
        0, min(problem.filter[2], problem.input[2] - pixel.at[2]) * channels
    )
    var left = min(max(first, begin), end)
    var right = min(max(last, left), end)
    if left > begin:
        fill(to, left - begin, padding)
    if right > left:
        copy_memory(
            x.data(),
            pixel.input_offset(problem) + left,
            columns.elements,
            to.unsafe_offset(left - begin),
            right - left,
        )
    if end > right:
        fill(to.unsafe_offset(right - begin), end - right, padding)


@always_inline
def _gather_taps[
    to_type: DType, //
](
    x: Some[ActivationSource],
    problem: ConvProblem,
    columns: Columns,
    group: Int,
    origin: Pixel,
    begin: Int,
    end: Int,
    to: Writes[to_type],
):
    """Gathers elements `[begin, end)` of one filter row's inputs tap by tap,
    the first of which reads `origin`."""
    var channels = problem.group_channels()
    for s in range(begin // channels, ceildiv(end, channels)):
        var low = max(begin, s * channels)
        var high = min(end, (s + 1) * channels)
        var pixel = origin.tap(problem, 0, 0, s)
        var here = to.unsafe_offset(low - begin)
        if pixel.is_inside(problem, 2):
            var channel = group * channels + low - s * channels
            copy_channels(x, problem, columns, pixel, channel, here, high - low)
        else:
            fill(here, high - low, columns.padding.cast[to_type]())


@always_inline
def _gather_row[
    Source: ActivationSource, to_type: DType, //
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    group: Int,
    pixel: Pixel,
    to: Writes[to_type],
):
    """Gathers the columns of one output pixel's row."""
    var origin = pixel.input(problem)
    var t = columns.first_t
    var r = columns.first_r
    var here = to
    # Column of the segment's first element, counted from `begin`.
    var start = (t * problem.filter[1] + r) * columns.segment - columns.begin
    var length = columns.end - columns.begin
    while start < length:
        var at = origin.tap(problem, t, r, 0)
        var low = max(0, -start)
        var high = min(columns.segment, length - start)
        var filled = max(low, min(high, columns.products))
        if not (at.is_inside(problem, 0) and at.is_inside(problem, 1)):
            fill(here, high - low, columns.padding.cast[to_type]())
        else:
            comptime if Source.fused or Source.interleaved == ANY_BLOCK:
                _gather_taps(x, problem, columns, group, at, low, filled, here)
            else:
                if columns.adjacent:
                    _gather_span(x, problem, columns, at, low, filled, here)
                else:
                    _gather_taps(
                        x, problem, columns, group, at, low, filled, here
                    )
            fill(here.unsafe_offset(filled - low), high - filled, 0)
        here = here.unsafe_offset(high - low)
        start += columns.segment
        r += 1
        if r == problem.filter[1]:
            r = 0
            t += 1


def gather_rows[
    to_type: DType, //
](
    x: Some[ActivationSource],
    problem: ConvProblem,
    columns: Columns,
    group: Int,
    tile: RowTile,
    to: Writes[to_type],
    row_stride: Int,
):
    """Gathers a block of the implicit im2col matrix.

    Writes up to `copy_width - 1` values behind each row, so rows need that slack.

    Parameters:
        to_type: Of the block.

    Args:
        x: The activation.
        problem: The convolution.
        columns: Which columns.
        group: The group.
        tile: Which rows.
        to: The block.
        row_stride: Elements between two rows of the block.
    """
    var pixel = Pixel(problem, tile.row)
    for i in range(tile.rows):
        _gather_row(
            x, problem, columns, group, pixel, to.unsafe_offset(i * row_stride)
        )
        pixel.advance(problem)
