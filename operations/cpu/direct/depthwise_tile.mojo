"""The register tile of depthwise filters: pixels of one or two image rows by a
vector of channels.

The common filter widths at stride 1 and 2 slide: an input pixel is loaded once for
all the outputs that it reaches, of both rows. Only tiles that reach outside the
image's width ask of each pixel whether it is there.
"""

from std.collections import Array

from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from .channels import ORDER_SPLIT, Lanes, load_lanes
from .image_row import COLUMNS, ImageRow, InputRow, Span
from .sums import SumTarget

comptime COMMON_TAPS = [3, 5, 7]
"""Filter widths that have tiles of their own, without dilation."""

comptime SPLIT_COLUMNS = 7
"""Columns of a tile of split lanes, which divide those of most images."""

comptime PAIR_COLUMNS = 4
"""Columns of a tile of two rows, and of a narrow one."""


@fieldwise_init
struct TileForm(ImplicitlyCopyable, Movable):
    """What a depthwise tile computes at once, known to the compiler."""

    var lanes: Lanes
    """Channels."""
    var taps: Int
    """Of a filter row, without dilation; 0 where width, stride and dilation are
    run-time values."""
    var stride: Int
    """Along w, where `taps` are known."""
    var rows: Int
    """Output rows: 1, or 2 that are read at stride 1 without dilation."""

    def columns(self) -> Int:
        """Output columns, where the span has as many."""
        if self.rows == 2:
            return PAIR_COLUMNS
        return SPLIT_COLUMNS if self.lanes.order == ORDER_SPLIT else COLUMNS

    def edge_columns(self) -> Int:
        """Output columns of a tile that reaches outside the image's width. At
        stride 2 such are few, and a wide tile asks of twice as many pixels."""
        return 1 if self.stride == 2 else self.columns()

    def narrow_columns(self) -> Int:
        """Output columns, where the span has fewer than `columns`."""
        return PAIR_COLUMNS if self.taps > 0 else 1


def reached(pixel: Int, tap: Int, stride: Int, columns: Int) -> Int:
    """The column of a tile whose filter meets an input pixel with a tap, or -1 if
    none does.

    Args:
        pixel: Counted from what the first column's tap 0 reads.
        tap: Of the filter row, without dilation.
        stride: Pixels between two columns.
        columns: Of the tile.
    """
    var column, rest = divmod(pixel - tap, stride)
    return column if rest == 0 and 0 <= column < columns else -1


@always_inline
def _slide[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    checked: Bool,
    columns: Int,
    first_row: Int,
    end_row: Int,
](
    line: InputRow[x_type],
    filter: Reads[filter_type],
    filter_row: Int,
    mut acc: Array[SIMD[DType.float32, form.lanes.width], form.rows * columns],
):
    """Adds an input line to the sums of the output rows `[first_row, end_row)`:
    each input pixel is loaded once, for all the outputs that it reaches.

    Args:
        line: The line.
        filter: The filter row that the tile's first row multiplies it by.
        filter_row: Elements between two filter rows.
        acc: The sums.
    """
    comptime Vector = SIMD[DType.float32, form.lanes.width]
    comptime taps = form.taps
    comptime rows = end_row - first_row
    var weights = Array[Vector, rows * taps](fill=Vector(0))
    comptime for i in range(rows):
        comptime for s in range(taps):
            weights[i * taps + s] = load_lanes[form.lanes](
                filter, s * line.channels - (first_row + i) * filter_row
            )
    comptime for j in range((columns - 1) * form.stride + taps):
        var value = line.load_lanes[form.lanes, checked](j, 0)
        comptime for i in range(rows):
            comptime for s in range(taps):
                comptime column = reached(j, s, form.stride, columns)
                comptime if column >= 0:
                    comptime at = (first_row + i) * columns + column
                    acc[at] = value.fma(weights[i * taps + s], acc[at])


@always_inline
def _step[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    checked: Bool,
    columns: Int,
](
    line: InputRow[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    mut acc: Array[SIMD[DType.float32, form.lanes.width], form.rows * columns],
):
    """Adds one filter row of any length, stride and dilation, tap by tap."""
    for s in range(problem.filter[2]):
        var weight = load_lanes[form.lanes](filter, s * line.channels)
        comptime for i in range(columns):
            acc[i] = line.load_lanes[form.lanes, checked](
                s * problem.dilation[2] + i * problem.stride[2], 0
            ).fma(weight, acc[i])


struct TileInput[x_type: DType, filter_type: DType](
    ImplicitlyCopyable, Movable
):
    """What the tiles of an image row, or of two, read: lines of the input from
    the first one inside the image, and the filter rows that meet them.

    Parameters:
        x_type: Of the activation.
        filter_type: Of the filter.
    """

    var row: InputRow[Self.x_type]
    """The first line, from what the first column's tap 0 reads on."""
    var weights: Reads[Self.filter_type]
    """The filter row that the first output row multiplies it by."""
    var filter_row: Int
    """Elements between two filter rows."""
    var row_stride: Int
    """Elements between two lines."""
    var column_stride: Int
    """Elements between what two columns read."""
    var slices: Int
    """Slices of the filter that lie inside the image."""
    var slice_stride: Int
    """Elements between what two slices read."""
    var filter_slice: Int
    """Elements between two slices of the filter."""
    var upper: Int
    """Lines that the first output row alone reads."""
    var both: Int
    """Lines behind them that two output rows read, the lower one by the filter
    row before."""
    var lower: Int
    """Lines behind them that the lower output row alone reads."""

    def __init__(
        out self,
        row: ImageRow[Self.x_type],
        filter: Reads[Self.filter_type],
        rows: Int,
    ):
        """Finds the lines.

        Args:
            row: The first output row.
            filter: `[taps][channels]`.
            rows: Output rows: 1, or 2 that read at stride 1 without dilation.
        """
        ref problem = row.problem
        var begin = row.height.begin
        var end = row.height.end
        self.upper = end - begin
        self.both = 0
        self.lower = 0
        if rows == 2:
            var below = row.height_below()
            # As lines, counted by the first output row's taps.
            below.begin += 1
            below.end += 1
            self.upper = max(0, min(end, below.begin) - begin)
            self.both = max(0, min(end, below.end) - max(begin, below.begin))
            self.lower = max(0, below.end - max(end, below.begin))
            if self.upper + self.both == 0:
                begin = max(end, below.begin)
        self.row = row.input(0, row.depth.begin, begin)
        self.row_stride = row.row_stride
        self.column_stride = problem.stride[2] * problem.channels
        self.slices = row.slices()
        self.slice_stride = row.slice_stride
        self.filter_row = problem.filter[2] * problem.channels
        self.filter_slice = problem.filter[1] * self.filter_row
        self.weights = filter.unsafe_offset(
            row.depth.begin * self.filter_slice + begin * self.filter_row
        )


@always_inline
def _tile[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    checked: Bool,
    columns: Int,
](
    input: TileInput[x_type, filter_type],
    problem: ConvProblem,
    q: Int,
    channel: Int,
    target: Some[SumTarget],
):
    """Computes `columns` neighbouring pixels of `form.rows` rows by the lanes'
    channels."""
    comptime Vector = SIMD[DType.float32, form.lanes.width]
    var acc = Array[Vector, form.rows * columns](fill=Vector(0))
    var line = input.row
    line.w += q * problem.stride[2]
    line.start = line.start.unsafe_offset(q * input.column_stride + channel)
    var weights = input.weights.unsafe_offset(channel)
    for _ in range(input.slices):
        var here = line
        var by = weights
        for _ in range(input.upper):
            comptime if form.taps > 0:
                _slide[x_type, filter_type, form, checked, columns, 0, 1](
                    here, by, input.filter_row, acc
                )
            else:
                _step[x_type, filter_type, form, checked, columns](
                    here, by, problem, acc
                )
            here.start = here.start.unsafe_offset(input.row_stride)
            by = by.unsafe_offset(input.filter_row)
        comptime if form.rows == 2:
            for _ in range(input.both):
                _slide[x_type, filter_type, form, checked, columns, 0, 2](
                    here, by, input.filter_row, acc
                )
                here.start = here.start.unsafe_offset(input.row_stride)
                by = by.unsafe_offset(input.filter_row)
            for _ in range(input.lower):
                _slide[x_type, filter_type, form, checked, columns, 1, 2](
                    here, by, input.filter_row, acc
                )
                here.start = here.start.unsafe_offset(input.row_stride)
                by = by.unsafe_offset(input.filter_row)
        line.start = line.start.unsafe_offset(input.slice_stride)
        weights = weights.unsafe_offset(input.filter_slice)
    var bias = target.bias[form.lanes](channel)
    comptime for i in range(form.rows):
        comptime for j in range(columns):
            target.store[form.lanes](
                i * problem.output[2] + q + j,
                channel,
                acc[i * columns + j],
                bias,
            )


@always_inline
def _tiles[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    checked: Bool,
    columns: Int,
](
    input: TileInput[x_type, filter_type],
    problem: ConvProblem,
    q: Int,
    span: Span,
    target: Some[SumTarget],
):
    """Computes `columns` pixels by the channels of a span, the last vector of
    which overlaps the one before where they do not divide."""
    comptime width = form.lanes.width
    for at in range(span.begin, span.end, width):
        var channel = min(at, span.end - width)
        comptime if form.lanes.order == ORDER_SPLIT:
            _tile_alone[x_type, filter_type, form, checked, columns](
                input, problem, q, channel, target
            )
        else:
            _tile[x_type, filter_type, form, checked, columns](
                input, problem, q, channel, target
            )


@no_inline
def _tile_alone[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    checked: Bool,
    columns: Int,
    Target: SumTarget,
](
    input: TileInput[x_type, filter_type],
    problem: ConvProblem,
    q: Int,
    channel: Int,
    target: Target,
):
    """`_tile` in a function of its own: what the loop around it keeps takes none
    of its registers."""
    _tile[x_type, filter_type, form, checked, columns](
        input, problem, q, channel, target
    )


@no_inline
def _sweep[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    columns: Int,
    Target: SumTarget,
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    target: Target,
):
    """Computes a span of at least `columns` columns and a vector of channels;
    the last tile may overlap the one before."""
    comptime edge = min(columns, form.edge_columns())
    var input = TileInput(row, filter, form.rows)
    var inside = row.inside(span)
    comptime if edge < columns:
        if inside.count() < columns:
            inside.end = inside.begin
        for q in range(span.q, inside.begin):
            _tiles[x_type, filter_type, form, True, 1](
                input, row.problem, q, span, target
            )
        for at in range(inside.begin, inside.end, columns):
            _tiles[x_type, filter_type, form, False, columns](
                input,
                row.problem,
                min(at, inside.end - columns),
                span,
                target,
            )
        for q in range(inside.end, span.q_end):
            _tiles[x_type, filter_type, form, True, 1](
                input, row.problem, q, span, target
            )
        return
    for at in range(span.q, span.q_end, columns):
        var q = min(at, span.q_end - columns)
        if inside.begin <= q and q + columns <= inside.end:
            _tiles[x_type, filter_type, form, False, columns](
                input, row.problem, q, span, target
            )
        else:
            _tiles[x_type, filter_type, form, True, columns](
                input, row.problem, q, span, target
            )


def compute_span[
    x_type: DType,
    filter_type: DType,
    form: TileForm,
    Target: SumTarget,
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    target: Target,
):
    """Computes a span.

    Parameters:
        x_type: Of the activation.
        filter_type: Of the filter.
        form: What a tile computes.
        Target: Where sums go.

    Args:
        row: The image row; with two rows to a tile the first one.
        filter: `[taps][channels]`.
        span: Which columns, and at least `form.lanes.width` channels.
        target: Where sums go.
    """
    comptime narrow = form.narrow_columns()
    var count = span.q_end - span.q
    if count >= form.columns():
        _sweep[x_type, filter_type, form, form.columns()](
            row, filter, span, target
        )
        return
    comptime if 1 < narrow < form.columns():
        if count >= narrow:
            _sweep[x_type, filter_type, form, narrow](row, filter, span, target)
            return
    _sweep[x_type, filter_type, form, 1](row, filter, span, target)
