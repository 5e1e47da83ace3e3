"""Grouped convolution on the CPU: lanes are the filters of a panel, registers
are pixels.

Groups narrower than a panel share one: `16 / width` groups of `width` channels
and filters each. A step multiplies, in every lane, the lane's filter by one
channel of the lane's group, which a shuffle of the loaded channels puts there.
Wider groups run on the implicit GEMM.
"""

from std.collections import Optional
from std.utils import IndexList

from ...conv.fields import KERNEL_GROUPED, PANEL
from ...conv.known import KnownFilter, KnownProblem
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
    ColumnTile,
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
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    q: Int,
    first: Int,
    to: Writes[DType.float32],
    column_stride: Int,
):
    """Computes `COLUMNS` neighbouring pixels by the `PART` filters from `first`
    on, and by as many channels: groups have as many of both."""
    ref problem = row.problem
    var acc = Sums(fill=SIMD[DType.float32, PART](0))
    var panel, part = divmod(first, PANEL)
    var weights = filter.unsafe_offset(panel * problem.gemm_k() * PANEL + part)
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var tap = (t * problem.filter[1] + r) * problem.filter[2]
            _shuffled_row[x_type, filter_type, width, checked](
                row.input(q, t, r),
                weights.unsafe_offset(tap * problem.group_channels() * PANEL),
                problem,
                first,
                acc,
            )
    comptime for i in range(COLUMNS):
        to.unsafe_store(i * column_stride, acc[i])


@no_inline
def _span[
    x_type: DType, filter_type: DType, width: Int
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    to: Writes[DType.float32],
):
    """Computes a span of groups `width` filters wide."""
    # A copy: as far as the compiler knows, a sum's store may change an argument.
    var local = row
    for first in range(span.begin, span.end, PART):
        var tile = ColumnTile(span)
        while tile.next(local, span):
            var sums = to.unsafe_offset(
                (tile.q - span.q) * span.filters() + first - span.begin
            )
            if tile.inside:
                _tile[x_type, filter_type, width, False](
                    local, filter, tile.q, first, sums, span.filters()
                )
            else:
                _tile[x_type, filter_type, width, True](
                    local, filter, tile.q, first, sums, span.filters()
                )


@fieldwise_init
struct GroupedSpans[filter_type: DType](ImplicitlyCopyable, SpanKernel):
    """The kernel's arithmetic. Spans begin and end at whole panels.

    Parameters:
        filter_type: Of the filter.
    """

    var filter: Reads[Self.filter_type]
    """In panels that groups share."""

    def filters_at_once(self, filters: Int) -> Int:
        return MAX_SPAN_FILTERS

    def compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, to: Writes[DType.float32]):
        comptime for doubling in range(1, 4):
            comptime width = 1 << doubling
            if row.problem.group_filters() == width:
                _span[dtype, Self.filter_type, width](
                    row, self.filter, span, to
                )


@fieldwise_init
struct GroupedPlan(ImplicitlyCopyable, Movable, Writable):
    """A cut of rows and filters."""

    var rows: RowPlan
    var group_channels: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        writer.write(
            t"groups of {self.group_channels} channels: too narrow to gather,"
            t" so read where they lie"
        )


struct Grouped[P: Pool](RowKernel):
    """Convolutions of several narrow groups to a panel.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_GROUPED
    comptime takes_cuts = True
    comptime Plan = GroupedPlan
    comptime Queue = Self.P
    comptime filter_unit = PANEL

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        return fused_input_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        return known.groups != 1 and not known.is_depthwise()

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        if problem.panel_groups() > 1:
            return exactness_refusal(problem, operands.types)
        return String(
            t"grouped takes groups of 2, 4 or 8 channels and as many filters,"
            t" in all a multiple of {PANEL}; here {problem.groups} of"
            t" {problem.group_channels()} and {problem.group_filters()}"
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return problem.panel_groups() > 1

    @staticmethod
    def choice(problem: ConvProblem, threads: Int) -> RowCut:
        return choose_rows(problem, threads, unit=PANEL)

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> GroupedPlan:
        var cut = checked_cut[RowCut](numbers)
        raise_refusal(cut.refusal(problem, Self.filter_unit))
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GroupedPlan:
        var cut = Self.choice(problem, device.units)
        return Self._planned(problem, cut, device.units)

    @staticmethod
    def _planned(
        problem: ConvProblem, cut: RowCut, threads: Int
    ) -> GroupedPlan:
        """The plan of a cut."""
        return GroupedPlan(
            RowPlan(problem, cut, threads), problem.group_channels()
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: GroupedPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        plan.rows.schedule.run(
            RowTasks(
                GroupedSpans(arguments.filter_elements()),
                plan.rows,
                problem,
                arguments.activation.data(),
                arguments.quantization.zero_point.cast[DType.float32](),
                TileStore(arguments),
            ),
            queue,
        )
