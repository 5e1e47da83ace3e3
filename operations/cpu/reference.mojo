"""The naive direct convolution: the oracle that the kernels are held against.
"""

from std.collections import Optional

from ..conv.access import ActivationSource, OutputTarget
from ..conv.fields import KERNEL_REFERENCE, PANEL
from ..conv.known import ANY_KERNEL, KnownFilter, KnownProblem
from ..conv.memory import Writes
from ..conv.operands import Arguments, Device, Operands, OperandTypes
from ..conv.problem import SPATIAL, ConvProblem
from .config import fused_input_refusal
from .form import finished
from .kernel import CpuKernel
from .pixel import Pixel, load_activation
from .pool import Pool
from .scheduler import Schedule, Tasks


@fieldwise_init
struct ReferencePlan(ImplicitlyCopyable, Movable, Writable):
    """A task for each output pixel."""

    var schedule: Schedule

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        writer.write("one output after the other, summed in float64")


struct Reference[P: Pool](CpuKernel):
    """Every output from its definition. Runs where it is asked for, and where
    no other kernel adds up integers exactly.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_REFERENCE
    comptime Plan = ReferencePlan
    comptime Queue = Self.P
    comptime takes_any_block = True

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        return fused_input_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether a call may ask for it by name."""
        return known.kernel == ANY_KERNEL

    @staticmethod
    def takes_the_rest(types: OperandTypes) -> Bool:
        """See `ConvKernel`: others refuse integers whose sums they cannot hold.
        """
        return types.input.is_integral()

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """See `ConvKernel`: it takes every problem."""
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return Self.takes_the_rest(operands.types)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> ReferencePlan:
        return ReferencePlan(
            Schedule(problem, problem.gemm_m(), device.units, 0)
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: ReferencePlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        plan.schedule.run(ReferenceTasks(problem, arguments), queue)


@fieldwise_init
struct ReferenceTasks[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](Tasks):
    """A task for each output pixel; the parameters are those of `Arguments`."""

    var problem: ConvProblem
    var arguments: Arguments[
        Self.Source, Self.Output, Self.bias_type, Self.residual_type
    ]

    def run(self, task: Int, scratch: Writes[DType.float32]):
        _compute_pixel(self.problem, self.arguments, task)


def _packed_offset[
    dtype: DType
](problem: ConvProblem, filter: Int, tap: Int, channel: Int) -> Int:
    """Where a filter value lies in the packed filter.

    Parameters:
        dtype: Of the filter.

    Args:
        problem: The convolution.
        filter: The output channel, over all groups.
        tap: `(t * R + r) * S + s`.
        channel: The channel within the group.

    Returns:
        The element offset.
    """
    if problem.is_depthwise():
        return tap * problem.channels + filter
    var group, within = divmod(filter, problem.packed_filters())
    var panel, lane = divmod(within, PANEL)
    var layout = problem.panel_layout(dtype)
    var row, s = divmod(tap, problem.filter[2])
    var step = row * layout.row_depth + s * problem.group_channels() + channel
    return (
        group * problem.panels() + panel
    ) * layout.elements() + layout.offset(step, lane)


def _compute_pixel(problem: ConvProblem, arguments: Arguments, row: Int):
    """Computes all filters of the output pixel of a row of the implicit GEMM.
    """
    comptime out_type = type_of(arguments).Output.dtype
    var pixel = Pixel(problem, row)
    var origin = pixel.input(problem)
    var channels = problem.group_channels()
    var filter = arguments.filter_elements()
    var zero = arguments.quantization.zero_point.cast[DType.float32]()
    for k in range(problem.filters):
        var group = k // problem.gemm_n()
        var total = Float64(0)
        for tap in range(problem.taps()):
            var tr, s = divmod(tap, problem.filter[2])
            var t, r = divmod(tr, problem.filter[1])
            var at = origin.tap(problem, t, r, s)
            var inside = True
            for axis in range(SPATIAL):
                inside = inside and at.is_inside(problem, axis)
            if not inside:
                continue
            for c in range(channels):
                var a = load_activation[DType.float32, 1](
                    arguments.activation, problem, at, group * channels + c
                )
                var b = filter[
                    unsafe_offset=_packed_offset[
                        type_of(arguments).Source.dtype
                    ](problem, k, tap, c)
                ]
                total += (a - zero).cast[DType.float64]() * b.cast[
                    DType.float64
                ]()
        var offset = row * problem.filters + k
        arguments.output.store[1](
            pixel.n,
            pixel.at,
            k,
            offset,
            finished[out_type](
                arguments, total.cast[DType.float32](), pixel, k, offset
            ),
        )
