"""Grouped convolution on the CPU: lanes are the filters of a panel, registers
are pixels.

Groups narrower than a panel share one: `16 / width` groups of `width` channels
and filters each (grouped_tile.mojo). Wider groups run on the implicit GEMM.
"""

from std.collections import Optional

from ...conv.fields import KERNEL_GROUPED, PANEL
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..config import fused_input_refusal
from ..epilogue import TileStore
from ..features import AVX512_BF16, has_feature
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from .cut import RowCut
from .depthwise_dot import names_dot_tile
from .grouped_tile import compute_span_of_groups
from .image_row import MAX_SPAN_FILTERS, ImageRow, Span
from .launch import (
    RowKernel,
    RowPlan,
    RowTasks,
    SpanKernel,
    exactness_refusal,
    choose_rows,
)
from .sums import (
    DirectOutput,
    ScratchSums,
    SumTarget,
    direct_output,
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
        self._compute(row, span, ScratchSums(to, span))

    def finish[
        dtype: DType
    ](
        self,
        row: ImageRow[dtype],
        rows: Int,
        span: Span,
        output: DirectOutput[dtype],
    ) -> Int:
        comptime if dtype.is_integral():
            return 0
        else:
            self._compute(row, span, output)
            return 1

    @always_inline
    def _compute[
        dtype: DType, //
    ](self, row: ImageRow[dtype], span: Span, target: Some[SumTarget]):
        """Computes a span by the widest instructions that the CPU has."""
        comptime for doubling in range(1, 4):
            comptime width = 1 << doubling
            if row.problem.group_filters() != width:
                continue
            comptime if (
                dtype == DType.bfloat16
                and Self.filter_type == dtype
                and names_dot_tile()
            ):
                if has_feature(AVX512_BF16):
                    compute_span_of_groups[
                        dtype, Self.filter_type, width, True
                    ](row, self.filter, span, target)
                    return
            compute_span_of_groups[dtype, Self.filter_type, width, False](
                row, self.filter, span, target
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
                direct_output(arguments, problem.filters),
            ),
            queue,
        )
