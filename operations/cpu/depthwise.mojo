"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

A tile is `COLUMNS` neighbouring output pixels of one image row by one vector
of channels. Where every tap of a tile lies inside the image's width no tap is
checked. The common filter widths at stride 1 and 2 slide: an input pixel is
loaded once for all the outputs that it reaches.
"""


from ..conv.memory import Reads, Writes
from .config import LANES
from ..conv.problem import ConvProblem
from .image_row import COLUMNS, ColumnTile, InputRow, RowTaps, Span


@always_inline
def _slide[
    x_type: DType,
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
](
    row: InputRow[x_type],
    filter: Reads[filter_type],
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], COLUMNS],
):
    """Adds one filter row of `taps` side by side: each input pixel is loaded
    once, for all the output pixels that it reaches."""
    comptime Vector = SIMD[DType.float32, width]
    var weights = Array[Vector, taps](fill=Vector(0))
    comptime for s in range(taps):
        weights[s] = filter.unsafe_load[width=width](s * row.channels).cast[
            DType.float32
        ]()
    comptime for j in range((COLUMNS - 1) * stride + taps):
        var value = row.load[width, checked](j, channel)
        comptime for s in range(taps):
            comptime if j >= s and (j - s) % stride == 0 and (
                j - s
            ) // stride < COLUMNS:
                comptime q = (j - s) // stride
                acc[q] = value.fma(weights[s], acc[q])


@always_inline
def _step[
    x_type: DType, filter_type: DType, width: Int, checked: Bool
](
    row: InputRow[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], COLUMNS],
):
    """Adds one filter row of any length, stride and dilation, tap by tap."""
    for s in range(problem.filter[2]):
        var weight = filter.unsafe_load[width=width](s * row.channels).cast[
            DType.float32
        ]()
        comptime for i in range(COLUMNS):
            acc[i] = row.load[width, checked](
                s * problem.dilation[2] + i * problem.stride[2], channel
            ).fma(weight, acc[i])


@always_inline
def _tile[
    x_type: DType,
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
](
    x: Reads[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    line: RowTaps,
    q: Int,
    channel: Int,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes `COLUMNS` neighbouring pixels by `width` channels.

    With `taps` 0 the filter's width, stride and dilation are run-time values.
    """
    comptime Vector = SIMD[DType.float32, width]
    var acc = Array[Vector, COLUMNS](fill=Vector(0))
    var origin = line.origin
    origin[2] += q * problem.stride[2]
    for t in range(line.depth.begin, line.depth.end):
        for r in range(line.height.begin, line.height.end):
            var at = origin
            at[0] += t * problem.dilation[0]
            at[1] += r * problem.dilation[1]
            var weights = filter.unsafe_offset(
                (t * problem.filter[1] + r)
                * problem.filter[2]
                * problem.channels
                + channel
            )
            var pixels = InputRow(x, problem, line.pixel.n, at)
            comptime if taps > 0:
                _slide[x_type, filter_type, width, checked, taps, stride](
                    pixels, weights, channel, acc
                )
            else:
                _step[x_type, filter_type, width, checked](
                    pixels, weights, problem, channel, acc
                )
    comptime for i in range(COLUMNS):
        to.unsafe_store(i * column_stride, acc[i])


@no_inline
def _span[
    x_type: DType, filter_type: DType, width: Int, taps: Int, stride: Int
](
    x: Reads[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    line: RowTaps,
    span: Span,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes a span of at least `width` channels; the last vector overlaps
    the one before where they do not divide."""
    var tile = ColumnTile(span)
    while tile.next(problem, line, span):
        var sums = to.unsafe_offset((tile.q - span.q) * column_stride)
        var channel = span.begin
        while channel < span.end:
            channel = min(channel, span.end - width)
            var here = sums.unsafe_offset(channel - span.begin)
            if tile.inside:
                _tile[x_type, filter_type, width, False, taps, stride](
                    x,
                    filter,
                    problem,
                    line,
                    tile.q,
                    channel,
                    here,
                    column_stride,
                )
            else:
                _tile[x_type, filter_type, width, True, taps, stride](
                    x,
                    filter,
                    problem,
                    line,
                    tile.q,
                    channel,
                    here,
                    column_stride,
                )
            channel += width


def depthwise_span[
    x_type: DType, filter_type: DType
](
    x: Reads[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    line: RowTaps,
    span: Span,
    to: Writes[DType.float32],
):
    """Computes the sums of a span.

    Parameters:
        x_type: The activation's type.
        filter_type: The packed filter's type.

    Args:
        x: The activation.
        filter: The packed filter, `[taps][channels]`.
        problem: The convolution, depthwise.
        line: The image row's taps.
        span: Which columns and channels.
        to: `span.filters()` sums of each column; at least `COLUMNS` columns
            may be written.
    """
    if span.filters() >= LANES:
        if problem.dilation[2] == 1:
            comptime for taps in range(3, 8, 2):
                comptime for stride in range(1, 3):
                    if (
                        problem.filter[2] == taps
                        and problem.stride[2] == stride
                    ):
                        _span[x_type, filter_type, LANES, taps, stride](
                            x, filter, problem, line, span, to, span.filters()
                        )
                        return
        _span[x_type, filter_type, LANES, 0, 0](
            x, filter, problem, line, span, to, span.filters()
        )
        return
    var part = span
    comptime for halving in range(1, 5):
        comptime width = LANES >> halving
        comptime if width > 0:
            part.end = part.begin + width
            if part.end <= span.end:
                _span[x_type, filter_type, width, 0, 0](
                    x,
                    filter,
                    problem,
                    line,
                    part,
                    to.unsafe_offset(part.begin - span.begin),
                    span.filters(),
                )
                part.begin = part.end
