"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

A tile is `COLUMNS` neighbouring output pixels of one image row by one vector
of channels. Where every tap of a tile lies inside the image's width no tap is
checked. The common filter widths at stride 1 and 2 slide: an input pixel is
loaded once for all the outputs that it reaches.
"""

from std.collections import Optional

from ...conv.fields import KERNEL_DEPTHWISE
from ...conv.known import UNKNOWN, KnownFilter, KnownProblem
from ...conv.memory import Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..config import LANES, fused_input_refusal
from ..epilogue import TileStore
from ..kernel import CpuKernel
from ..pool import Pool
from .image_row import (
    COLUMNS,
    MAX_SPAN_FILTERS,
    ColumnTile,
    ImageRow,
    InputRow,
    Span,
)
from .launch import RowPlan, RowTasks, SpanKernel, exactness_refusal


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
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    q: Int,
    channel: Int,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes `COLUMNS` neighbouring pixels by `width` channels.

    With `taps` 0 the filter's width, stride and dilation are run-time values.
    """
    ref problem = row.problem
    var acc = Array[SIMD[DType.float32, width], COLUMNS](fill=0)
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var tap = (t * problem.filter[1] + r) * problem.filter[2]
            var weights = filter.unsafe_offset(tap * problem.channels + channel)
            var pixels = row.input(q, t, r)
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
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes a span of at least `width` channels; the last vector overlaps
    the one before where they do not divide."""
    # A copy: as far as the compiler knows, a sum's store may change an argument.
    var local = row
    var tile = ColumnTile(span)
    while tile.next(local, span):
        var sums = to.unsafe_offset((tile.q - span.q) * column_stride)
        var channel = span.begin
        while channel < span.end:
            channel = min(channel, span.end - width)
            var here = sums.unsafe_offset(channel - span.begin)
            if tile.inside:
                _tile[x_type, filter_type, width, False, taps, stride](
                    local, filter, tile.q, channel, here, column_stride
                )
            else:
                _tile[x_type, filter_type, width, True, taps, stride](
                    local, filter, tile.q, channel, here, column_stride
                )
            channel += width


@fieldwise_init
struct DepthwiseSpans[filter_type: DType](ImplicitlyCopyable, SpanKernel):
    """The kernel's arithmetic.

    Parameters:
        filter_type: Of the filter.
    """

    var filter: Reads[Self.filter_type]
    """`[taps][channels]`."""

    def filters_at_once(self, filters: Int) -> Int:
        return MAX_SPAN_FILTERS

    def compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, to: Writes[DType.float32]):
        ref problem = row.problem
        if span.filters() >= LANES:
            if problem.dilation[2] == 1:
                comptime for taps in range(3, 8, 2):
                    comptime for stride in range(1, 3):
                        if (
                            problem.filter[2] == taps
                            and problem.stride[2] == stride
                        ):
                            _span[dtype, Self.filter_type, LANES, taps, stride](
                                row, self.filter, span, to, span.filters()
                            )
                            return
            _span[dtype, Self.filter_type, LANES, 0, 0](
                row, self.filter, span, to, span.filters()
            )
            return
        var part = span
        comptime for halving in range(1, 5):
            comptime width = LANES >> halving
            comptime if width > 0:
                part.end = part.begin + width
                if part.end <= span.end:
                    _span[dtype, Self.filter_type, width, 0, 0](
                        row,
                        self.filter,
                        part,
                        to.unsafe_offset(part.begin - span.begin),
                        span.filters(),
                    )
                    part.begin = part.end


@fieldwise_init
struct DepthwisePlan(ImplicitlyCopyable, Movable, Writable):
    """A cut of rows and channels."""

    var rows: RowPlan

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        writer.write(
            t"one channel and one filter a group: lanes are channels, {LANES}"
            t" at a time"
        )


struct Depthwise[P: Pool](CpuKernel):
    """Convolutions of one channel and one filter a group.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_DEPTHWISE
    comptime Plan = DepthwisePlan
    comptime Queue = Self.P

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        return fused_input_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether groups may have one channel and one filter; where one group
        is known, they are known to."""
        if known.groups == 1:
            return known.channels == 1 and known.filters == 1
        return (known.channels == UNKNOWN or known.channels == 1) and (
            known.filters == UNKNOWN or known.filters == 1
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        if problem.is_depthwise():
            return exactness_refusal(problem, operands.types)
        return String(
            t"depthwise takes one channel and one filter a group; here"
            t" {problem.group_channels()} and {problem.group_filters()}"
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return problem.is_depthwise()

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> DepthwisePlan:
        return DepthwisePlan(RowPlan(problem, device.units, unit=LANES))

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: DepthwisePlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        plan.rows.schedule.run(
            RowTasks(
                DepthwiseSpans(arguments.filter_elements()),
                plan.rows,
                problem,
                arguments.activation.data(),
                arguments.quantization.zero_point.cast[DType.float32](),
                TileStore(arguments),
            ),
            queue,
        )
