"""The host side of the reference kernel: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import KERNEL_REFERENCE
from ...conv.known import ANY_KERNEL, KnownFilter, KnownProblem
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..inspect import GpuKernel, PtxWriter
from ..stream import LaunchGrid, Stream
from .reference import reference_kernel
from ..limits import MAX_BLOCKS
from .rows import THREADS


@fieldwise_init
struct ReferencePlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the reference kernel."""

    var blocks: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        writer.write("the definition, a thread an output")


struct Reference(GpuKernel):
    """The definition of a convolution, which other kernels are compared
    with."""

    comptime code = KERNEL_REFERENCE
    comptime Plan = ReferencePlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """None: it takes every type."""
        return None

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether a call may ask for it by name."""
        return known.kernel == ANY_KERNEL

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """None: it takes every problem."""
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether to choose it: only by name."""
        return False

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> ReferencePlan:
        """A thread an output; several outputs a thread where the grid is
        full."""
        var elements = problem.gemm_m() * problem.filters
        return ReferencePlan(min(ceildiv(elements, THREADS), MAX_BLOCKS))

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Enqueues the kernel."""
        comptime Call = type_of(arguments)
        comptime kernel = reference_kernel[
            Call.Source, Call.Output, Call.bias_type, Call.residual_type
        ]
        queue.enqueue[kernel](
            LaunchGrid(plan.blocks, THREADS),
            arguments.activation,
            arguments.filter_elements(),
            arguments.epilogue,
            arguments.output,
            problem,
        )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes the kernel."""
        comptime W = type_of(writer)
        comptime kernel = reference_kernel[
            W.Source, W.Output, W.out_type, W.out_type
        ]
        writer.write[kernel]("reference", 0)
