"""Rows of the input image as the activations of a register tile.

A tile of neighbouring pixels of one row of the output image reads, for each
filter row, a strip of one row of the input image. Where the strip lies inside
the image it is read in place; otherwise it is copied with its padding, which
moves `S` times fewer elements than rows of the implicit im2col matrix have.
"""

from std.math import ceildiv

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..config import reads_in_place
from ..pixel import Pixel
from .mma import MAX_RUNS, MIN_RUN, Run, TileOperand, tile_rows
from .scheduler import RowTile, Task
from .tile_io import (
    Columns,
    copy_channels,
    copy_memory,
    is_adjacent,
    fill,
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
    problem: ConvProblem, panel: PanelLayout, rows: Int, depth: Int, groups: Int
) -> Int:
    """Float32 values that a tile's strips take, whatever its place.

    Args:
        problem: The convolution.
        panel: The order of the packed filter's elements.
        rows: Output pixels of the tile.
        depth: Products of a slice.
        groups: Groups that the strips serve.

    Returns:
        How many, with the slack that copying needs.
    """
    # Slices are cut where the filter lies, whose rows may be filled up.
    var segment = panel.row_depth
    var segments = depth // segment
    if depth % segment != 0:
        segments = (depth + segment - 2) // segment + 1
    segments = min(segments, problem.filter[0] * problem.filter[1])
    var columns = (rows - 1) * problem.stride[2] + problem.span(2)
    var elements = segments * columns * problem.group_channels() * groups
    return ceildiv(elements, PANEL) * PANEL + PANEL


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


@fieldwise_init
struct Strip(ImplicitlyCopyable, Movable):
    """Some channels of neighbouring pixels of a row of the input image."""

    var pixel: Pixel
    """The first, perhaps left of the image."""
    var count: Int
    """Pixels."""
    var channel: Int
    """The first."""
    var channels: Int


@always_inline
def _copy_strip[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    strip: Strip,
    to: Writes[DType.float32],
):
    """Copies a strip, zeros for the pixels left and right of the image."""
    var w = strip.pixel.at[2]
    var channels = strip.channels
    var left = min(strip.count, max(0, -w))
    var right = max(left, min(strip.count, problem.input[2] - w))
    fill(to, left * channels, 0)
    var whole_pixels = not Source.fused and channels == problem.channels
    comptime if not Source.fused:
        if whole_pixels:
            copy_memory(
                x.data(),
                strip.pixel.input_offset(problem) + left * channels,
                columns.elements,
                to.unsafe_offset(left * channels),
                (right - left) * channels,
            )
    if not whole_pixels:
        var pixel = strip.pixel
        for i in range(left, right):
            pixel.at[2] = w + i
            copy_channels(
                x,
                problem,
                columns,
                pixel,
                strip.channel,
                to.unsafe_offset(i * channels),
                channels,
            )
    fill(
        to.unsafe_offset(right * channels),
        (strip.count - right) * channels,
        0,
    )


@always_inline
def _append_runs(
    mut result: TileOperand,
    problem: ConvProblem,
    strip: Reads[DType.float32],
    w: Int,
    reach: Int,
    pitch: Int,
    step: Int,
    low: Int,
    high: Int,
):
    """Adds the runs of elements `[low, high)` of a filter row, whose first
    tap reads `strip`, pixels from `w` to `w + reach`, which are `pitch`
    elements apart. Dilated taps beside the image are left out."""
    var channels = problem.group_channels()
    if pitch == channels and problem.dilation[2] == 1:
        result.append(Run(strip.unsafe_offset(low), step + low, high - low))
        return
    for s in range(low // channels, (high - 1) // channels + 1):
        var at = w + s * problem.dilation[2]
        if at + reach < 0 or at >= problem.input[2]:
            continue
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
def strip_operand[
    Source: ActivationSource
](
    mut result: TileOperand,
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    task: Task,
    tile: RowTile,
    memory: Writes[DType.float32],
):
    """The activations of a tile of one row of the output image; filter rows
    above or below the image are left out, being zeros.

    Those of the next group lie `group_channels` elements behind.

    Parameters:
        Source: How the activation is reached.

    Args:
        result: Where to write them.
        x: The activation.
        problem: The convolution.
        columns: Which columns of the implicit im2col matrix.
        task: Whose groups.
        tile: The tile's rows of the implicit GEMM.
        memory: Room for `strip_elements`.
    """
    var channels = task.groups * problem.group_channels()
    var channel = task.group * problem.group_channels()
    var origin = Pixel(problem, tile.row).input(problem)
    # A tile of an odd number of rows reads one row too many.
    var padded = tile_rows(tile.rows)
    var count = (padded - 1) * problem.stride[2] + problem.span(2)
    comptime may_be_in_place = reads_in_place(Source.dtype, Source.fused)
    # All taps of the tile lie inside the image's width.
    var in_place = (
        may_be_in_place
        and padded == tile.rows
        and origin.at[2] >= 0
        and origin.at[2] + count <= problem.input[2]
    )
    var pitch = problem.channels if in_place else channels
    result.clear(problem.stride[2] * pitch)
    var to = memory
    var t = columns.first_t
    var r = columns.first_r
    var start = (t * problem.filter[1] + r) * columns.segment
    while start < columns.end:
        var pixel = origin.tap(problem, t, r, 0)
        var low = max(columns.begin - start, 0)
        var high = min(columns.end - start, columns.products)
        if (
            low < high
            and pixel.is_inside(problem, 0)
            and pixel.is_inside(problem, 1)
        ):
            var first = to.as_imm()
            comptime if may_be_in_place:
                if in_place:
                    first = (
                        x.data()
                        .unsafe_bitcast[Float32]()
                        .unsafe_offset(pixel.input_offset(problem) + channel)
                    )
            if not in_place:
                var strip = Strip(pixel, count, channel, channels)
                _copy_strip(x, problem, columns, strip, to)
                to = to.unsafe_offset(count * channels)
            _append_runs(
                result,
                problem,
                first,
                pixel.at[2],
                (tile.rows - 1) * problem.stride[2],
                pitch,
                start,
                low,
                high,
            )
        start += columns.segment
        r += 1
        if r == problem.filter[1]:
            r = 0
            t += 1
