"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

A tile is `COLUMNS` neighbouring output pixels of one image row by one vector
of channels, where every tap lies inside the image's width: no tap is checked.
Pixels at the edges are tiles of their own. The common filter widths at stride 1 and 2 slide: an input pixel is
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
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from .cut import RowCut
from .image_row import (
    COLUMNS,
    MAX_SPAN_FILTERS,
    ImageRow,
    InputRow,
    Span,
)
from .launch import (
    RowKernel,
    RowPlan,
    RowTasks,
    SpanKernel,
    exactness_refusal,
    choose_rows,
)
from .sums import DirectOutput, ScratchSums, SumTarget


def edge_columns(taps: Int, stride: Int) -> Int:
    """Pixels of a tile at the edge of an image: as many as "same" padding lets
    read outside it.

    Args:
        taps: Of a filter row.
        stride: Along w.
    """
    return max(1, taps // 2 // stride) if taps > 0 else 1


@always_inline
def _slide[
    x_type: DType,
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
    columns: Int,
](
    row: InputRow[x_type],
    filter: Reads[filter_type],
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], columns],
):
    """Adds one filter row of `taps` side by side: each input pixel is loaded
    once, for all the output pixels that it reaches."""
    comptime Vector = SIMD[DType.float32, width]
    var weights = Array[Vector, taps](fill=Vector(0))
    comptime for s in range(taps):
        weights[s] = filter.unsafe_load[width=width](s * row.channels).cast[
            DType.float32
        ]()
    comptime for j in range((columns - 1) * stride + taps):
        var value = row.load[width, checked](j, channel)
        comptime for s in range(taps):
            comptime if j >= s and (j - s) % stride == 0 and (
                j - s
            ) // stride < columns:
                comptime q = (j - s) // stride
                acc[q] = value.fma(weights[s], acc[q])


@always_inline
def _step[
    x_type: DType, filter_type: DType, width: Int, checked: Bool, columns: Int
](
    row: InputRow[x_type],
    filter: Reads[filter_type],
    problem: ConvProblem,
    channel: Int,
    mut acc: Array[SIMD[DType.float32, width], columns],
):
    """Adds one filter row of any length, stride and dilation, tap by tap."""
    for s in range(problem.filter[2]):
        var weight = filter.unsafe_load[width=width](s * row.channels).cast[
            DType.float32
        ]()
        comptime for i in range(columns):
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
    columns: Int,
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    q: Int,
    channel: Int,
    target: Some[SumTarget],
):
    """Computes `columns` neighbouring pixels by `width` channels.

    With `taps` 0 the filter's width, stride and dilation are run-time values.
    """
    ref problem = row.problem
    var acc = Array[SIMD[DType.float32, width], columns](fill=0)
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var tap = (t * problem.filter[1] + r) * problem.filter[2]
            var weights = filter.unsafe_offset(tap * problem.channels + channel)
            var pixels = row.input(q, t, r)
            comptime if taps > 0:
                _slide[
                    x_type, filter_type, width, checked, taps, stride, columns
                ](pixels, weights, channel, acc)
            else:
                _step[x_type, filter_type, width, checked, columns](
                    pixels, weights, problem, channel, acc
                )
    var bias = target.bias[width](channel)
    comptime for i in range(columns):
        target.store[width](q + i, channel, acc[i], bias)


@always_inline
def _tiles[
    x_type: DType,
    filter_type: DType,
    width: Int,
    checked: Bool,
    taps: Int,
    stride: Int,
    columns: Int,
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    q: Int,
    span: Span,
    target: Some[SumTarget],
):
    """Computes `columns` pixels by the channels of a span, the last vector of
    which overlaps the one before where they do not divide."""
    var channel = span.begin
    while channel < span.end:
        channel = min(channel, span.end - width)
        _tile[x_type, filter_type, width, checked, taps, stride, columns](
            row, filter, q, channel, target
        )
        channel += width


@no_inline
def _span[
    x_type: DType,
    filter_type: DType,
    width: Int,
    taps: Int,
    stride: Int,
    Target: SumTarget,
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    target: Target,
):
    """Computes a span of at least `width` channels and `edge_columns` pixels:
    tiles of `COLUMNS` pixels that read nothing outside the image, and narrower
    ones beside them. The last tile of each may overlap others."""
    comptime edge = edge_columns(taps, stride)
    # A copy: as far as the compiler knows, a sum's store may change an argument.
    var local = row
    var inside = local.inside(span)
    if inside.count() < COLUMNS:
        inside.end = inside.begin
    for q in range(span.q, inside.begin, edge):
        _tiles[x_type, filter_type, width, True, taps, stride, edge](
            local, filter, min(q, span.q_end - edge), span, target
        )
    for q in range(inside.begin, inside.end, COLUMNS):
        _tiles[x_type, filter_type, width, False, taps, stride, COLUMNS](
            local, filter, min(q, inside.end - COLUMNS), span, target
        )
    for q in range(inside.end, span.q_end, edge):
        _tiles[x_type, filter_type, width, True, taps, stride, edge](
            local, filter, min(q, span.q_end - edge), span, target
        )


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
        var target = ScratchSums(to, span)
        if span.filters() >= LANES:
            self._compute(row, span, target)
            return
        var part = span
        comptime for halving in range(1, 5):
            comptime width = LANES >> halving
            comptime if width > 0:
                part.end = part.begin + width
                if part.end <= span.end:
                    _span[dtype, Self.filter_type, width, 0, 0](
                        row, self.filter, part, target
                    )
                    part.begin = part.end

    def finish[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, output: DirectOutput) -> Bool:
        comptime if dtype == DType.float32:
            if span.filters() >= LANES:
                self._compute(row, span, output)
                return True
        return False

    @always_inline
    def _compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, target: Some[SumTarget]):
        """Computes a span of at least a vector of filters."""
        ref problem = row.problem
        if problem.dilation[2] == 1:
            comptime for taps in range(3, 8, 2):
                comptime for stride in range(1, 3):
                    if (
                        problem.filter[2] == taps
                        and problem.stride[2] == stride
                        and span.q_end - span.q >= edge_columns(taps, stride)
                    ):
                        _span[dtype, Self.filter_type, LANES, taps, stride](
                            row, self.filter, span, target
                        )
                        return
        _span[dtype, Self.filter_type, LANES, 0, 0](
            row, self.filter, span, target
        )


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


struct Depthwise[P: Pool](RowKernel):
    """Convolutions of one channel and one filter a group.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_DEPTHWISE
    comptime takes_cuts = True
    comptime Plan = DepthwisePlan
    comptime Queue = Self.P
    comptime filter_unit = LANES

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
    def choice(problem: ConvProblem, threads: Int) -> RowCut:
        return choose_rows(problem, threads, unit=LANES)

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> DepthwisePlan:
        var cut = checked_cut[RowCut](numbers)
        raise_refusal(cut.refusal(problem, Self.filter_unit))
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> DepthwisePlan:
        var cut = Self.choice(problem, device.units)
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def _planned(
        problem: ConvProblem, cut: RowCut, threads: Int
    ) -> DepthwisePlan:
        """The plan of a cut."""
        return DepthwisePlan(RowPlan(problem, cut, threads))

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
                DirectOutput.of(arguments, problem.filters),
            ),
            queue,
        )
