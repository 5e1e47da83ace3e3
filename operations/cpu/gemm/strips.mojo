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
    """Some groups' channels of neighbouring pixels of a row of the input image.
    """

    var pixel: Pixel
    """The first, perhaps left of the image."""
    var count: Int
    """Pixels."""
    var channel: Int
    """The first."""
    var channels: Int
    """Of a group."""
    var groups: Int

    @always_inline
    def elements(self) -> Int:
        """Of a group."""
        return self.count * self.channels


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
    """Copies a strip group by group, so that a filter row's taps lie side by
    side; zeros for the pixels left and right of the image."""
    var w = strip.pixel.at[2]
    var channels = strip.channels
    var left = min(strip.count, max(0, -w))
    var right = max(left, min(strip.count, problem.input[2] - w))
    for group in range(strip.groups):
        var here = to.unsafe_offset(group * strip.elements())
        fill(here, left * channels, 0)
        _copy_pixels(
            x,
            problem,
            columns,
            strip,
            group,
            left,
            right,
            here.unsafe_offset(left * channels),
        )
        fill(
            here.unsafe_offset(right * channels),
            (strip.count - right) * channels,
            0,
        )


@always_inline
def _copy_pixels[
    Source: ActivationSource
](
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    strip: Strip,
    group: Int,
    begin: Int,
    end: Int,
    to: Writes[DType.float32],
):
    """Copies a group's channels of a strip's pixels `[begin, end)`, which lie
    inside the image."""
    var channels = strip.channels
    var first = strip.channel + group * channels
    comptime if not Source.fused:
        var at = strip.pixel.input_offset(problem) + begin * problem.channels
        if channels == problem.channels:
            var count = (end - begin) * channels
            copy_memory(x.data(), at, columns.elements, to, count)
            return
        if channels % PANEL == 0:
            var from_ = x.data().unsafe_offset(at + first)
            for i in range(end - begin):
                for c in range(0, channels, PANEL):
                    to.unsafe_store(
                        i * channels + c,
                        from_.unsafe_load[width=PANEL](
                            i * problem.channels + c
                        ).cast[DType.float32](),
                    )
            return
    var pixel = strip.pixel
    for i in range(begin, end):
        pixel.at[2] = strip.pixel.at[2] + i
        copy_channels(
            x,
            problem,
            columns,
            pixel,
            first,
            to.unsafe_offset((i - begin) * channels),
            channels,
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


@fieldwise_init
struct StripMemory(ImplicitlyCopyable, Movable):
    """Where the strips of a task's tiles are copied to: a line of the image
    once for all tiles that read the same part of it."""

    var first: Writes[DType.float32]
    """The first tile's strips."""
    var tile_elements: Int
    """Elements between two tiles' strips: room for `strip_elements`."""
    var per_line: Int
    """Tiles of a row of the output image."""
    var index: Int
    """Which of the task's tiles."""


@fieldwise_init
struct _CopiedStrips(ImplicitlyCopyable, Movable):
    """The copied strips of a tile, and of those above it in the task, which
    copied some of the same lines."""

    var memory: StripMemory
    var above: Int
    """Tiles above it that may have."""
    var step: Int
    """Filter rows from one that reads a line to the one of the tile above that
    does; 0 if none does."""
    var last: Int
    """The last segment that is read."""
    var first: Int
    """The first one."""
    var elements: Int
    """Of a strip."""

    @always_inline
    def __init__(
        out self,
        problem: ConvProblem,
        columns: Columns,
        memory: StripMemory,
        p: Int,
        elements: Int,
    ):
        """Finds what tiles share.

        Args:
            problem: The convolution.
            columns: Which columns of the implicit im2col matrix.
            memory: Where strips go.
            p: The tile's row of the output image.
            elements: Of a strip.
        """
        self.memory = memory
        self.elements = elements
        self.above = min(memory.index // memory.per_line, p)
        var step, rest = divmod(problem.stride[1], problem.dilation[1])
        self.step = step if rest == 0 else 0
        self.first = columns.begin // columns.segment
        self.last = (columns.end - 1) // columns.segment

    @always_inline
    def up(self, segment: Int, row: Int, rows: Int) -> Int:
        """How many rows of tiles further up the one stands that copied a strip;
        0 if it is this tile's to copy.

        Args:
            segment: Which of the tile's strips.
            row: Its filter row.
            rows: All filter rows.
        """
        if self.step == 0:
            return 0
        var below = min(rows - 1 - row, self.last - segment)
        return min(below // self.step, self.above)

    @always_inline
    def strip(self, segment: Int, up: Int) -> Writes[DType.float32]:
        """Where a strip lies.

        Args:
            segment: Which of the tile's strips.
            up: See `up`.
        """
        var tile = self.memory.index - up * self.memory.per_line
        var place = segment + up * self.step - self.first
        return self.memory.first.unsafe_offset(
            tile * self.memory.tile_elements + place * self.elements
        )


@fieldwise_init
struct LineInPlace(ImplicitlyCopyable, Movable):
    """A tile that is read in place, and the pixels behind it that are: on its
    line of the output image, if it reads strips. They read the same runs further
    on."""

    var index: Int
    """Which of the task's tiles."""
    var row: Int
    """Its first row of the implicit GEMM."""
    var end: Int
    """The row behind the last such pixel."""
    var step: Int
    """Elements between the activations of two pixels."""

    @staticmethod
    def none() -> Self:
        """No tile."""
        return Self(0, 0, 0, 0)

    @always_inline
    def holds(self, tile: RowTile) -> Bool:
        """Whether a later tile of the task reads the same runs further on.

        Args:
            tile: Its rows of the implicit GEMM.
        """
        return tile.row + tile_rows(tile.rows) <= self.end

    @always_inline
    def offset(self, tile: RowTile) -> Int:
        """How many elements further on it does.

        Args:
            tile: Its rows of the implicit GEMM.
        """
        return (tile.row - self.row) * self.step


@always_inline
def strip_operand[
    Source: ActivationSource
](
    mut result: TileOperand,
    mut line: LineInPlace,
    x: Source,
    problem: ConvProblem,
    columns: Columns,
    task: Task,
    tile: RowTile,
    memory: StripMemory,
):
    """The activations of a tile of one row of the output image; filter rows
    above or below the image are left out, being zeros.

    Parameters:
        Source: How the activation is reached.

    Args:
        result: Where to write them.
        line: Set if the tile is read in place.
        x: The activation.
        problem: The convolution.
        columns: Which columns of the implicit im2col matrix.
        task: Whose groups.
        tile: The tile's rows of the implicit GEMM.
        memory: Where strips go.
    """
    var channels = problem.group_channels()
    var channel = task.group * channels
    var place = Pixel(problem, tile.row)
    var origin = place.input(problem)
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
    if in_place:
        var inside = problem.input[2] - origin.at[2] - problem.span(2)
        var pixels = min(
            inside // problem.stride[2] + 1, problem.output[2] - place.at[2]
        )
        line = LineInPlace(
            memory.index,
            tile.row,
            tile.row + pixels,
            problem.stride[2] * problem.channels,
        )
    result.clear(
        problem.stride[2] * pitch, channels if in_place else count * channels
    )
    var elements = count * pitch * task.groups
    # In place there is nothing to divide.
    var copied = _CopiedStrips(memory, 0, 0, 0, 0, elements)
    if not in_place:
        copied = _CopiedStrips(problem, columns, memory, place.at[1], elements)
    var rows = problem.filter[1]
    var t = columns.first_t
    var r = columns.first_r
    var segment = t * rows + r
    var start = segment * columns.segment
    while start < columns.end:
        var pixel = origin.tap(problem, t, r, 0)
        var low = max(columns.begin - start, 0)
        var high = min(columns.end - start, columns.products)
        if (
            low < high
            and pixel.is_inside(problem, 0)
            and pixel.is_inside(problem, 1)
        ):
            var first = memory.first.as_imm()
            comptime if may_be_in_place:
                if in_place:
                    first = (
                        x.data()
                        .unsafe_bitcast[Float32]()
                        .unsafe_offset(pixel.input_offset(problem) + channel)
                    )
            if not in_place:
                var up = copied.up(segment, r, rows)
                var to = copied.strip(segment, up)
                first = to.as_imm()
                if up == 0:
                    _copy_strip(
                        x,
                        problem,
                        columns,
                        Strip(pixel, count, channel, channels, task.groups),
                        to,
                    )
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
        segment += 1
        start += columns.segment
        r += 1
        if r == rows:
            r = 0
            t += 1
