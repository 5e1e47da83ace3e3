"""Grouped convolution on the CPU: lanes are the filters of a panel, registers
are pixels.

Groups narrower than a panel share one: `16 / width` groups of `width` channels
and filters each. A step multiplies, in every lane, the lane's filter by one
channel of the lane's group, which a shuffle of the loaded channels puts there. Wider groups run on the implicit GEMM.
"""

from std.utils import IndexList

from .config import LANES
from ..conv.fields import PANEL
from ..conv.memory import Reads, Writes
from ..conv.problem import ConvProblem
from .image_row import (
    COLUMNS,
    ColumnTile,
    InputRow,
    RowTaps,
    Span,
)


comptime PART = max(LANES, 8)
"""Filters of a panel that are multiplied at once: a register's lanes, and at
least the widest group."""


def lane_channels[width: Int](channel: Int) -> IndexList[PART]:
    """The channel, among `PART` loaded ones, that each lane multiplies.

    Parameters:
        width: Channels and filters of a group.

    Args:
        channel: The channel within every group.

    Returns:
        `lane // width * width + channel` for each lane.
    """
    var mask = IndexList[PART](fill=0)
    for lane in range(PART):
        mask[lane] = lane // width * width + channel
    return mask


comptime Sums = Array[SIMD[DType.float32, PART], COLUMNS]


@always_inline
def _shuffled_row[
    x_type: DType, filter_type: DType, width: Int, checked: Bool
](
    row: InputRow[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    channel: Int,
    mut acc: Sums,
):
    """Adds one filter row of groups that share a panel."""
    comptime Vector = SIMD[DType.float32, PART]
    for s in range(problem.filter[2]):
        var values = Array[Vector, COLUMNS](fill=Vector(0))
        comptime for i in range(COLUMNS):
            values[i] = row.load[PART, checked](
                s * problem.dilation[2] + i * problem.stride[2], channel
            )
        comptime for j in range(width):
            comptime lanes = lane_channels[width](j)
            var weights = filter.unsafe_load[width=PART](
                (s * width + j) * PANEL
            ).cast[DType.float32]()
            comptime for i in range(COLUMNS):
                acc[i] = values[i].shuffle[mask=lanes]().fma(weights, acc[i])


@always_inline
def _tile[
    x_type: DType, filter_type: DType, width: Int, checked: Bool
](
    x: Reads[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    line: RowTaps,
    q: Int,
    panel: Int,
    part: Int,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes `COLUMNS` neighbouring pixels by `PART` filters of a panel."""
    var acc = Sums(fill=SIMD[DType.float32, PART](0))
    var channels = problem.group_channels()
    # Groups have as many channels as filters.
    var first = panel * PANEL + part
    var weights = filter.unsafe_offset(panel * problem.gemm_k() * PANEL + part)
    var origin = line.origin
    origin[2] += q * problem.stride[2]
    for t in range(line.depth.begin, line.depth.end):
        for r in range(line.height.begin, line.height.end):
            var at = origin
            at[0] += t * problem.dilation[0]
            at[1] += r * problem.dilation[1]
            var pixels = InputRow(x, problem, line.pixel.n, at)
            var taps = weights.unsafe_offset(
                (t * problem.filter[1] + r)
                * problem.filter[2]
                * channels
                * PANEL
            )
            _shuffled_row[x_type, filter_type, width, checked](
                pixels, taps, problem, first, acc
            )
    comptime for i in range(COLUMNS):
        to.unsafe_store(i * column_stride, acc[i])


@no_inline
def _span[
    x_type: DType, filter_type: DType, width: Int
](
    x: Reads[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    line: RowTaps,
    span: Span,
    to: Writes[DType.float32],
):
    """Computes a span of groups `width` filters wide."""
    for filters in range(span.begin, span.end, PART):
        var panel, part = divmod(filters, PANEL)
        var tile = ColumnTile(span)
        while tile.next(problem, line, span):
            var sums = to.unsafe_offset(
                (tile.q - span.q) * span.filters() + filters - span.begin
            )
            if tile.inside:
                _tile[x_type, filter_type, width, False](
                    x,
                    filter,
                    problem,
                    line,
                    tile.q,
                    panel,
                    part,
                    sums,
                    span.filters(),
                )
            else:
                _tile[x_type, filter_type, width, True](
                    x,
                    filter,
                    problem,
                    line,
                    tile.q,
                    panel,
                    part,
                    sums,
                    span.filters(),
                )


def grouped_span[
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
        filter: The packed filter.
        problem: The convolution; `can_implement` says which.
        line: The image row's taps.
        span: Which columns and filters, the latter in whole panels.
        to: `span.filters()` sums of each column; at least `COLUMNS` columns
            may be written.
    """
    comptime for doubling in range(1, 4):
        comptime width = 1 << doubling
        if problem.group_filters() == width:
            _span[x_type, filter_type, width](
                x, filter, problem, line, span, to
            )
