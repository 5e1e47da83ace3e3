"""Depthwise convolution on the CPU: lanes are channels, registers are pixels.

Outputs of an epilogue that is a bias and limits are stored from registers. Then
float32 and float16 have tiles of two image rows at stride 1. Many channels of
bfloat16 are multiplied two filter rows at a time where the CPU has AVX512-BF16
(depthwise_dot.mojo), and otherwise loaded two vectors at a time where there are
registers for both.
"""

from std.collections import Optional

from ...conv.fields import KERNEL_DEPTHWISE
from ...conv.known import UNKNOWN, KnownFilter, KnownProblem
from ...conv.memory import Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..config import LANES, fused_input_refusal
from ..epilogue import TileStore
from ..features import has_fast_bfloat16_dots
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from .channels import Lanes
from .cut import RowCut
from .depthwise_dot import (
    DOT_COLUMNS,
    compute_span_of_dots,
    names_dot_tile,
)
from .depthwise_tile import COMMON_TAPS, TileForm, compute_span
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


def pairs_rows(problem: ConvProblem) -> Bool:
    """Whether a tile may have two image rows: filters of a common width, which
    read what both rows do at most once.

    Args:
        problem: The convolution.
    """
    return (
        problem.filter[2] in materialize[COMMON_TAPS]()
        and problem.stride[1] == 1
        and problem.stride[2] == 1
        and problem.dilation[1] == 1
        and problem.dilation[2] == 1
    )


@always_inline
def _cut_channels(span: Span, width: Int) -> Tuple[Span, Span]:
    """Cuts a span into one of vectors of `width` channels, the last of which may
    overlap the one before, and one of at most a vector of `LANES`.

    Args:
        span: The span, of at least `LANES` channels.
        width: Twice `LANES`.
    """
    var wide = span
    var rest = span
    var left = span.filters() % width
    if span.filters() < width:
        wide.end = span.begin
    elif 0 < left <= LANES:
        wide.end = span.end - left
        rest.begin = span.end - LANES
    else:
        rest.begin = span.end
    return (wide, rest)


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
            self._compute[Lanes.plain(LANES), 1](row, span, target)
            return
        var part = span
        comptime for halving in range(1, 5):
            comptime width = LANES >> halving
            comptime if width > 0:
                part.end = part.begin + width
                if part.end <= span.end:
                    comptime form = TileForm(Lanes.plain(width), 0, 0, 1)
                    compute_span[dtype, Self.filter_type, form](
                        row, self.filter, part, target
                    )
                    part.begin = part.end

    def finish[
        dtype: DType
    ](
        self,
        row: ImageRow[dtype],
        rows: Int,
        span: Span,
        output: DirectOutput[dtype],
    ) -> Int:
        comptime widest = Lanes.widest(dtype)
        if span.filters() < LANES:
            return 0
        comptime if widest.width > LANES:
            var wide, rest = _cut_channels(span, widest.width)
            if wide.filters() > 0:
                if not self._compute_dots(row, wide, output):
                    self._compute[widest, 1](row, wide, output)
            if rest.filters() > 0:
                self._compute[Lanes.plain(LANES), 1](row, rest, output)
            return 1
        else:
            if rows > 1 and pairs_rows(row.problem) and row.slices() == 1:
                self._compute[widest, 2](row, span, output)
                return 2
            self._compute[widest, 1](row, span, output)
            return 1

    @always_inline
    def _compute_dots[
        dtype: DType, //
    ](
        self, row: ImageRow[dtype], span: Span, target: DirectOutput[dtype]
    ) -> Bool:
        """Computes a span by AVX512-BF16, if the CPU has it and there is a tile
        for the problem."""
        ref problem = row.problem
        comptime if (
            dtype != DType.bfloat16
            or Self.filter_type != dtype
            or not names_dot_tile()
        ):
            return False
        if not has_fast_bfloat16_dots() or problem.dilation[2] != 1:
            return False
        var filter = rebind[Reads[dtype]](self.filter)
        var columns = span.q_end - span.q
        comptime for taps in COMMON_TAPS:
            comptime for stride in range(1, 3):
                if problem.filter[2] == taps and problem.stride[2] == stride:
                    if columns >= DOT_COLUMNS:
                        compute_span_of_dots[dtype, taps, stride, DOT_COLUMNS](
                            row, filter, span, target
                        )
                    else:
                        compute_span_of_dots[dtype, taps, stride, 1](
                            row, filter, span, target
                        )
                    return True
        return False

    @always_inline
    def _compute[
        dtype: DType, //, lanes: Lanes, rows: Int
    ](self, row: ImageRow[dtype], span: Span, target: Some[SumTarget]):
        """Computes a span of at least a vector of filters."""
        ref problem = row.problem
        if problem.dilation[2] == 1:
            comptime for taps in COMMON_TAPS:
                comptime for stride in range(1, 3 if rows == 1 else 2):
                    if (
                        problem.filter[2] == taps
                        and problem.stride[2] == stride
                    ):
                        comptime form = TileForm(lanes, taps, stride, rows)
                        compute_span[dtype, Self.filter_type, form](
                            row, self.filter, span, target
                        )
                        return
        comptime if rows == 1:
            comptime form = TileForm(lanes, 0, 0, 1)
            compute_span[dtype, Self.filter_type, form](
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
        writer.write("one channel and one filter a group: lanes are channels")


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
        return choose_rows(
            problem, threads, unit=LANES, pairs=pairs_rows(problem)
        )

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
                direct_output(arguments, problem.filters),
            ),
            queue,
        )
