"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

A tile is `COLUMNS` neighbouring output pixels of one image row by one vector
of channels. Where every tap of a tile lies inside the image's width no tap is
checked. The common filter widths at stride 1 and 2 slide: an input pixel is
loaded once for all the outputs that it reaches.
"""

from extensibility import ManagedTensorSlice
from std.utils import IndexList

from ..conv.memory import Reads
from ..conv.config import LANES
from ..conv.epilogue import Epilogue
from ..conv.problem import SPATIAL, ConvProblem
from .epilogue import store_channels
from .image_row import COLUMNS, ColumnTile, RowTaps, load_column



@always_inline
def _slide[
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
](
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], COLUMNS],
):
    """Adds one filter row of `taps` side by side: each input pixel is loaded
    once, for all the output pixels that it reaches."""
    comptime Vector = SIMD[DType.float32, width]
    var weights = Array[Vector, taps](fill=Vector(0))
    comptime for s in range(taps):
        weights[s] = filter.unsafe_load[width=width](
            s * problem.channels
        ).cast[DType.float32]()
    var here = at
    comptime for j in range((COLUMNS - 1) * stride + taps):
        var value = load_column[width, checked](x, problem, n, here, channel)
        here[2] += 1
        comptime for s in range(taps):
            comptime if j >= s and (j - s) % stride == 0 and (
                j - s
            ) // stride < COLUMNS:
                comptime q = (j - s) // stride
                acc[q] = value.fma(weights[s], acc[q])


@always_inline
def _step[
    filter_type: DType, width: Int, checked: Bool
](
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], COLUMNS],
):
    """Adds one filter row of any length, stride and dilation, tap by tap."""
    for s in range(problem.filter[2]):
        var weight = filter.unsafe_load[width=width](
            s * problem.channels
        ).cast[DType.float32]()
        var here = at
        here[2] += s * problem.dilation[2]
        comptime for i in range(COLUMNS):
            acc[i] = load_column[width, checked](
                x, problem, n, here, channel
            ).fma(weight, acc[i])
            here[2] += problem.stride[2]


@always_inline
def _tile[
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    line: RowTaps,
    row: Int,
    q: Int,
    channel: Int,
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
            comptime if taps > 0:
                _slide[filter_type, width, checked, taps, stride](
                    x, weights, problem, line.pixel.n, at, channel, acc
                )
            else:
                _step[filter_type, width, checked](
                    x, weights, problem, line.pixel.n, at, channel, acc
                )
    var here = line.pixel
    here.at[2] = q
    comptime for i in range(COLUMNS):
        comptime if checked:
            if q + i >= problem.output[2]:
                return
        store_channels[width](
            output, epilogue, problem, here, row + q + i, channel, acc[i]
        )
        here.at[2] += 1


@no_inline
def _row[
    filter_type: DType, width: Int, taps: Int, stride: Int
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    image_row: Int,
    begin: Int,
    end: Int,
):
    """Computes channels `[begin, end)` of an image row, at least `width` of
    them, the last vector overlapping the one before where they do not divide.
    """
    var row = image_row * problem.output[2]
    var line = RowTaps(problem, row)
    var tile = ColumnTile(problem, line)
    while tile.next(problem, line):
        var channel = begin
        while channel < end:
            channel = min(channel, end - width)
            if tile.inside:
                _tile[filter_type, width, False, taps, stride](
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    line,
                    row,
                    tile.q,
                    channel,
                )
            else:
                _tile[filter_type, width, True, taps, stride](
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    line,
                    row,
                    tile.q,
                    channel,
                )
            channel += width


def depthwise_row[
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
):
    """Computes channels `[begin, end)` of one row of the output image.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter, `[taps][channels]`.
        epilogue: The epilogue.
        problem: The convolution, depthwise.
        image_row: Which row, counted over images and depths.
        begin: The first channel.
        end: The channel behind the last.
    """
    if end - begin >= LANES:
        if problem.dilation[2] == 1:
            comptime for taps in range(3, 8, 2):
                comptime for stride in range(1, 3):
                    if (
                        problem.filter[2] == taps
                        and problem.stride[2] == stride
                    ):
                        _row[filter_type, LANES, taps, stride](
                            output,
                            x,
                            filter,
                            epilogue,
                            problem,
                            image_row,
                            begin,
                            end,
                        )
                        return
        _row[filter_type, LANES, 0, 0](
            output, x, filter, epilogue, problem, image_row, begin, end
        )
        return
    var channel = begin
    comptime for halving in range(1, 5):
        comptime width = LANES >> halving
        comptime if width > 0:
            while channel + width <= end:
                _row[filter_type, width, 0, 0](
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    image_row,
                    channel,
                    channel + width,
                )
                channel += width
