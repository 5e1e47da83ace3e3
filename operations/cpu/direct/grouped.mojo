"""Grouped convolution on the CPU: lanes are the filters of a panel, registers
are pixels.

Groups narrower than a panel share one: `16 / width` groups of `width` channels
and filters each (grouped_tile.mojo). With AVX512-VNNI those of 8 bits, and groups
that fill a panel, multiply by `vpdpbusd` (grouped_dot.mojo). Wider groups run on
the GEMMs.
"""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import CompilationTarget

from ...conv.fields import KERNEL_GROUPED, PANEL
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.quantization import sums_refusal
from ..config import fused_input_refusal
from ..epilogue import TileStore
from ..features import (
    AMX_BF16,
    AMX_INT8,
    AVX512_VNNI,
    has_fast_bfloat16_dots,
    has_feature,
)
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from .cut import RowCut
from .depthwise_dot import names_dot_tile
from .grouped_dot import DOT_GROUPS, compute_span_by_vnni, has_dot_tile
from .grouped_tile import compute_span_of_groups
from .image_row import COLUMNS, MAX_SPAN_FILTERS, SPAN_SUMS, ImageRow, Span
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

comptime LEAST_SPAN_FILTERS = 4 * PANEL
"""Filters of a span of wide images: a cache line of outputs of 8 bits."""


def multiplies_dots(problem: ConvProblem, dtype: DType) -> Bool:
    """Whether groups multiply by `vpdpbusd`.

    Args:
        problem: The convolution.
        dtype: Of the filter.
    """
    return (
        (dtype == DType.int8 or dtype == DType.uint8)
        and problem.group_channels() == problem.group_filters()
        and has_dot_tile(problem.group_filters())
        and problem.filters % PANEL == 0
        and has_feature(AVX512_VNNI)
    )


struct GroupedSpans[filter_type: DType](ImplicitlyCopyable, SpanKernel):
    """The kernel's arithmetic. Spans begin and end at whole panels.

    Parameters:
        filter_type: Of the filter.
    """

    var filter: Reads[Self.filter_type]
    """In panels that groups share, or of a group each."""
    var dots: Bool
    """Whether to multiply by AVX512-VNNI."""
    var span_filters: Int
    """Filters of a span."""

    def __init__(
        out self, filter: Reads[Self.filter_type], problem: ConvProblem
    ):
        """Takes a filter.

        Args:
            filter: The filter.
            problem: The convolution.
        """
        self.filter = filter
        self.dots = multiplies_dots(problem, Self.filter_type)
        self.span_filters = MAX_SPAN_FILTERS
        if self.dots:
            # Whole image rows: tiles are wide.
            var columns = ceildiv(max(problem.output[2], 1), COLUMNS) * COLUMNS
            var fit = SPAN_SUMS // columns // PANEL * PANEL
            self.span_filters = max(
                LEAST_SPAN_FILTERS, min(fit, MAX_SPAN_FILTERS)
            )

    def filters_at_once(self, filters: Int) -> Int:
        return self.span_filters

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
        self._compute(row, span, output)
        return 1

    @always_inline
    def _compute[
        dtype: DType, //
    ](self, row: ImageRow[dtype], span: Span, target: Some[SumTarget]):
        """Computes a span by the widest instructions that the CPU has."""
        comptime if dtype.is_integral():
            if self.dots:
                comptime for i in range(len(DOT_GROUPS)):
                    comptime width = DOT_GROUPS[i]
                    if row.problem.group_filters() == width:
                        compute_span_by_vnni[dtype, width](
                            row,
                            self.filter.unsafe_bitcast[Int8](),
                            span,
                            target,
                        )
                return
        comptime for doubling in range(1, 4):
            comptime width = 1 << doubling
            if row.problem.group_filters() != width:
                continue
            comptime if (
                dtype == DType.bfloat16
                and Self.filter_type == dtype
                and names_dot_tile()
            ):
                if has_fast_bfloat16_dots():
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
        if multiplies_dots(problem, operands.types.input):
            return sums_refusal(problem.gemm_k())
        if problem.panel_groups() > 1:
            return exactness_refusal(problem, operands.types)
        return String(
            t"grouped takes groups of 2, 4 or 8 channels and as many filters,"
            t" with AVX512-VNNI groups of 16 of integers too, in all a multiple"
            t" of {PANEL}; here {problem.groups} of {problem.group_channels()}"
            t" and {problem.group_filters()}"
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        # Tiles of AMX multiply whole panels faster, zeros between groups too.
        if problem.panel_groups() > 1:
            return not (
                operands.types.input == DType.bfloat16
                and has_feature(AMX_BF16)
                and CompilationTarget.is_x86()
            )
        return multiplies_dots(
            problem, operands.types.input
        ) and not has_feature(AMX_INT8)

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
                GroupedSpans(arguments.filter_elements(), problem),
                plan.rows,
                problem,
                arguments.activation.data(),
                arguments.quantization.zero_point.cast[DType.float32](),
                TileStore(arguments),
                direct_output(arguments, problem.filters),
            ),
            queue,
        )
