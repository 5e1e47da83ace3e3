"""Rows of the input image as the activations of a register tile.

A tile of neighbouring pixels of one row of the output image reads, for each
filter row, a strip of one row of the input image. Where the strip lies inside
the image it is read in place; otherwise it is copied with its padding, which
moves `S` times fewer elements than rows of the implicit im2col matrix have.
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.utils import IndexList

from .config import CPU_TILE
from ..conv.memory import Reads, Writes, operand
from ..conv.problem import SPATIAL, ConvProblem
from .mma import MAX_RUNS, MIN_RUN, Run, TileOperand, tile_rows
from .tile_io import (
    COPY,
    Columns,
    Pixel,
    copy_fused,
    copy_memory,
    is_adjacent,
    pixel_offset,
    zero,
)


def longest_slice(problem: ConvProblem) -> Int:
    """Products of the longest slice whose runs a `TileOperand` holds.

    Args:
        problem: The convolution.

    Returns:
        How many; 0 if runs are too short to be worth it.
    """
    var run = problem.group_channels()
    if is_adjacent(problem):
        run *= problem.filter[2]
    if run < MIN_RUN and problem.taps() > 1:
        return 0
    return (MAX_RUNS - 2) * max(run, MIN_RUN)


def strip_elements(
    problem: ConvProblem, rows: Int, depth: Int, groups: Int
) -> Int:
    """Float32 values that a tile's strips take, whatever its place.

    Args:
        problem: The convolution.
        rows: Output pixels of the tile.
        depth: Products of a slice.
        groups: Groups that the strips serve.

    Returns:
        How many, with the slack that copying needs.
    """
    var segment = problem.filter[2] * problem.group_channels()
    var segments = depth // segment
    if depth % segment != 0:
        segments = (depth + segment - 2) // segment + 1
    segments = min(segments, problem.filter[0] * problem.filter[1])
    var columns = (rows - 1) * problem.stride[2] + problem.span(2)
    var elements = segments * columns * problem.group_channels() * groups
    return ceildiv(elements, COPY) * COPY + COPY


def copies_pay(
    problem: ConvProblem, rows: Int, tiles: Int, in_memory: Bool
) -> Bool:
    """Whether copying strips moves fewer elements than gathering rows would,
    as it does unless strides or dilations leave most of a strip unread.

    Args:
        problem: The convolution.
        rows: Output pixels of a tile.
        tiles: Tiles of a row of the output image.
        in_memory: Whether the tiles inside the image are read in place.

    Returns:
        Whether it does.
    """
    var copied = tiles
    if in_memory:
        var reach = rows * problem.stride[2]
        copied = min(
            tiles,
            ceildiv(problem.pad_before[2], reach)
            + ceildiv(problem.pad_after[2], reach),
        )
    var columns = (rows - 1) * problem.stride[2] + problem.span(2)
    return copied * columns <= tiles * rows * problem.filter[2]


@always_inline
def _is_inside(problem: ConvProblem, pixel: Pixel, rows: Int) -> Bool:
    """Whether every tap of a tile lies inside the image's width."""
    var first = pixel.at[2] * problem.stride[2] - problem.pad_before[2]
    var last = first + (rows - 1) * problem.stride[2] + problem.span(2)
    return first >= 0 and last <= problem.input[2]


@always_inline
def _copy_strip(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    channel: Int,
    channels: Int,
    n: Int,
    at: IndexList[SPATIAL],
    count: Int,
    columns: Columns,
    to: Writes[DType.float32],
):
    """Copies `channels` of `count` neighbouring input pixels, zeros for those
    left and right of the image."""
    var left = min(count, max(0, -at[2]))
    var right = max(left, min(count, problem.input[2] - at[2]))
    zero(to, left * channels)
    comptime if not x._has_input_fusion:
        if channels == problem.channels:
            copy_memory(
                operand(x),
                (pixel_offset(problem, n, at) + left) * channels,
                columns.elements,
                to.unsafe_offset(left * channels),
                (right - left) * channels,
            )
        else:
            var first = (
                pixel_offset(problem, n, at) * problem.channels + channel
            )
            for i in range(left, right):
                copy_memory(
                    operand(x),
                    first + i * problem.channels,
                    columns.elements,
                    to.unsafe_offset(i * channels),
                    channels,
                )
    else:
        for i in range(left, right):
            var pixel = at
            pixel[2] += i
            copy_fused(
                x,
                problem,
                n,
                pixel,
                channel,
                to.unsafe_offset(i * channels),
                channels,
            )
    zero(to.unsafe_offset(right * channels), (count - right) * channels)


@always_inline
def _append_runs(
    mut result: TileOperand,
    problem: ConvProblem,
    strip: Reads[DType.float32],
    pitch: Int,
    step: Int,
    low: Int,
    high: Int,
):
    """Adds the runs of elements `[low, high)` of a filter row, whose first
    tap reads `strip` and whose pixels are `pitch` elements apart."""
    var channels = problem.group_channels()
    if pitch == channels and problem.dilation[2] == 1:
        result.append(Run(strip.unsafe_offset(low), step + low, high - low))
        return
    for s in range(low // channels, (high - 1) // channels + 1):
        var first = max(low, s * channels)
        result.append(
            Run(
                strip.unsafe_offset(
                    s * problem.dilation[2] * pitch + first - s * channels
                ),
                step + first,
                min(high, (s + 1) * channels) - first,
            )
        )


@always_inline
def image_operand(
    mut result: TileOperand,
    x: ManagedTensorSlice,
    problem: ConvProblem,
    group: Int,
    groups: Int,
    row: Int,
    rows: Int,
    columns: Columns,
    memory: Writes[DType.float32],
):
    """The activations of a tile of one row of the output image; filter rows
    above or below the image are left out, being zeros.

    Those of the next group lie `group_channels` elements behind.

    Args:
        result: Where to write them.
        x: The activation.
        problem: The convolution.
        group: The first group.
        groups: How many groups.
        row: The tile's first row of the implicit GEMM.
        rows: Its rows.
        columns: Which columns of the implicit im2col matrix.
        memory: Room for `strip_elements`.
    """
    var channels = groups * problem.group_channels()
    var channel = group * problem.group_channels()
    var pixel = Pixel(problem, row)
    var origin = pixel.at * problem.stride - problem.pad_before
    # A tile of an odd number of rows reads one row too many.
    var padded = tile_rows(rows)
    comptime in_memory = x.dtype == DType.float32 and not x._has_input_fusion
    var in_place = (
        in_memory and padded == rows and _is_inside(problem, pixel, rows)
    )
    var pitch = problem.channels if in_place else channels
    result.clear(problem.stride[2] * pitch)
    var to = memory
    var t = columns.first_t
    var r = columns.first_r
    var start = (t * problem.filter[1] + r) * columns.segment
    while start < columns.end:
        var at = origin
        at[0] += t * problem.dilation[0]
        at[1] += r * problem.dilation[1]
        if (
            at[0] >= 0
            and at[0] < problem.input[0]
            and at[1] >= 0
            and at[1] < problem.input[1]
        ):
            var low = max(columns.begin - start, 0)
            var high = min(columns.end - start, columns.segment)
            comptime if in_memory:
                if in_place:
                    _append_runs(
                        result,
                        problem,
                        operand(x)
                        .unsafe_bitcast[Float32]()
                        .unsafe_offset(
                            pixel_offset(problem, pixel.n, at)
                            * problem.channels
                            + channel
                        ),
                        pitch,
                        start,
                        low,
                        high,
                    )
            if not in_place:
                var count = (padded - 1) * problem.stride[2] + problem.span(2)
                _copy_strip(
                    x,
                    problem,
                    channel,
                    channels,
                    pixel.n,
                    at,
                    count,
                    columns,
                    to,
                )
                _append_runs(
                    result, problem, to.as_imm(), pitch, start, low, high
                )
                to = to.unsafe_offset(count * channels)
        start += columns.segment
        r += 1
        if r == problem.filter[1]:
            r = 0
            t += 1
