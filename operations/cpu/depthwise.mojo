"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

A tile is `COLUMNS` neighbouring output pixels of one image row by one vector
of channels. Where every tap of the tile lies inside the image's width no
tap is checked; the few pixels at the left and right edges take only their
own taps.
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.utils import IndexList

from ..conv.memory import Reads
from ..conv.config import LANES
from ..conv.epilogue import Epilogue
from ..conv.problem import SPATIAL, ConvProblem
from .epilogue import store_channels
from .tile_io import Pixel, load_activation

comptime COLUMNS = 8
"""Output pixels of a tile: as many independent sums as hide the latency of a
multiply-add."""


@fieldwise_init
struct TapRange(ImplicitlyCopyable, Movable):
    """Taps `[begin, end)` along an axis that lie inside the image."""

    var begin: Int
    var end: Int

    @always_inline
    def __init__(
        out self, problem: ConvProblem, axis: Int, origin: Int
    ):
        """The taps of an output position.

        Args:
            problem: The convolution.
            axis: The spatial axis.
            origin: The input position of tap 0, perhaps outside the image.
        """
        var dilation = problem.dilation[axis]
        self.begin = ceildiv(max(0, -origin), dilation)
        self.end = max(
            self.begin,
            min(
                problem.filter[axis],
                ceildiv(problem.input[axis] - origin, dilation),
            ),
        )


@always_inline
def _tile[
    filter_type: DType, width: Int, columns: Int
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    pixel: Pixel,
    row: Int,
    channel: Int,
    depth_taps: TapRange,
    height_taps: TapRange,
    width_taps: TapRange,
):
    """Computes `columns` neighbouring pixels by `width` channels, over taps
    that lie inside the image for each of them."""
    comptime Vector = SIMD[DType.float32, width]
    var acc = Array[Vector, columns](fill=Vector(0))
    var origin = pixel.at * problem.stride - problem.pad_before
    for t in range(depth_taps.begin, depth_taps.end):
        for r in range(height_taps.begin, height_taps.end):
            for s in range(width_taps.begin, width_taps.end):
                var tap = (t * problem.filter[1] + r) * problem.filter[2] + s
                var weight = filter.unsafe_load[width=width](
                    tap * problem.channels + channel
                ).cast[DType.float32]()
                var at = (
                    origin + IndexList[SPATIAL](t, r, s) * problem.dilation
                )
                comptime for i in range(columns):
                    acc[i] = load_activation[width](
                        x, problem, pixel.n, at, channel
                    ).fma(weight, acc[i])
                    at[2] += problem.stride[2]
    var here = pixel
    comptime for i in range(columns):
        store_channels[width](
            output, epilogue, problem, here, row + i, channel, acc[i]
        )
        here.at[2] += 1


def _row_channels[
    filter_type: DType, width: Int
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    first: Pixel,
    row: Int,
    channel: Int,
    depth_taps: TapRange,
    height_taps: TapRange,
):
    """Computes `width` channels of one image row."""
    var all = TapRange(0, problem.filter[2])
    var stride = problem.stride[2]
    var columns = problem.output[2]
    # Pixels whose taps all lie inside: origin >= 0 and origin + span <= W.
    var inside = min(columns, ceildiv(problem.pad_before[2], stride))
    var last = problem.input[2] + problem.pad_before[2] - problem.span(2)
    var outside = max(inside, min(columns, last // stride + 1))
    var q = 0
    while q < columns:
        var pixel = first
        pixel.at[2] = q
        if q >= inside and q + COLUMNS <= outside:
            _tile[filter_type, width, COLUMNS](
                output,
                x,
                filter,
                epilogue,
                problem,
                pixel,
                row + q,
                channel,
                depth_taps,
                height_taps,
                all,
            )
            q += COLUMNS
            continue
        var taps = TapRange(
            problem, 2, q * stride - problem.pad_before[2]
        )
        _tile[filter_type, width, 1](
            output,
            x,
            filter,
            epilogue,
            problem,
            pixel,
            row + q,
            channel,
            depth_taps,
            height_taps,
            taps,
        )
        q += 1


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
    var row = image_row * problem.output[2]
    var first = Pixel(problem, row)
    var origin = first.at * problem.stride - problem.pad_before
    var depth_taps = TapRange(problem, 0, origin[0])
    var height_taps = TapRange(problem, 1, origin[1])
    var channel = begin
    comptime for halving in range(5):
        comptime width = LANES >> halving
        comptime if width > 0:
            while channel + width <= end:
                _row_channels[filter_type, width](
                    output,
                    x,
                    filter,
                    epilogue,
                    problem,
                    first,
                    row,
                    channel,
                    depth_taps,
                    height_taps,
                )
                channel += width
