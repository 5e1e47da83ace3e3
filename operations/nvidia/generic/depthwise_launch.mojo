"""The host side of the depthwise kernels for any GPU: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import KERNEL_DEPTHWISE
from ...conv.known import UNKNOWN, KnownFilter, KnownProblem
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..device import is_hopper, target_capability
from ..inspect import GpuKernel, PtxWriter
from ..legality import alignment_refusal, has_diagonal_types
from ..limits import MAX_INDEX
from ..stream import LaunchGrid, Stream
from .depthwise import DepthwiseKernel
from .depthwise_geometry import (
    DEPTHWISE_CANDIDATES,
    FILTER_BYTES,
    exact_taps,
    RESIDENT,
    THREADS,
    DepthwiseGeometry,
    Phases,
    choose_depthwise,
    depthwise_candidate,
    depthwise_geometry,
    items_of,
)
from .depthwise_strip_kernel import StripKernel
from .depthwise_strips import (
    MULTIPROCESSOR_BYTES,
    STRIP_CANDIDATES,
    StripConfig,
    StripGeometry,
    StripPlan,
    choose_strips,
    strip_candidate,
)

comptime NO_STRIPS = -1
"""The strip candidate of a plan that reads pixels straight from memory."""


@fieldwise_init
struct DepthwisePlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of a depthwise kernel: strips of rows pass through a ring in
    shared memory, or each pixel is read straight from memory."""

    var strip: Int
    """Which strip candidate, or `NO_STRIPS`."""
    var strip_config: StripConfig
    """That candidate, for people."""
    var strips: StripPlan
    """How the strips are cut."""
    var candidate: Int
    """Which candidate without strips."""
    var geometry: DepthwiseGeometry
    """The geometry for that candidate."""
    var width: Int
    """Neighbouring filters of a thread."""
    var filter_bytes: Int
    """Shared memory of its filters."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        if self.strip == NO_STRIPS:
            writer.write(
                t"depthwise of any filter, {self.geometry.lanes.value} lanes of"
                t" {self.width} filters, outputs {self.geometry.spacing.value}"
                t" apart, {self.geometry.phases} phases of taps"
            )
        else:
            writer.write(t"{self.strip_config}: {self.strips}")


struct Depthwise(GpuKernel):
    """One input channel a group, on CUDA cores."""

    comptime code = KERNEL_DEPTHWISE
    comptime Plan = DepthwisePlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """None: it takes every type."""
        return None

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether groups may have one channel."""
        return known.channels == UNKNOWN or known.channels == 1

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses wider groups, filters that do not fit shared memory, of int8
        those whose sums float32 may round, and more outputs than are
        counted."""
        var refusal = alignment_refusal(Self.code, operands)
        if refusal:
            return refusal
        if problem.group_channels() != 1:
            return String(
                t"depthwise takes one input channel a group; here"
                t" {problem.group_channels()}"
            )
        var config = depthwise_candidate(
            operands.types.input,
            choose_depthwise(operands.types.input, problem),
        )
        if config.filter_bytes(problem.taps()) > FILTER_BYTES:
            return String(
                t"depthwise keeps filters in {FILTER_BYTES} bytes of shared"
                t" memory, too few for {problem.taps()} taps"
            )
        var input = operands.types.input
        var taps = exact_taps(input)
        if input.is_integral() and problem.taps() > taps:
            return String(
                t"depthwise adds up the products of at most {taps}"
                t" taps of {input} without rounding; here {problem.taps()}"
            )
        var items = items_of(problem, Phases.of(problem))
        if items >= MAX_INDEX // 2:
            return String(t"depthwise counts items with 30 bits; here {items}")
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether groups have one channel."""
        return problem.group_channels() == 1

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> DepthwisePlan:
        """Strips, where a candidate takes the filter and no other kernel is
        faster; otherwise pixels from memory."""
        var dtype = operands.types.input
        var strip = NO_STRIPS
        var strips = StripPlan.nothing()
        var strip_config = StripConfig(0, 0, 0, 0)
        if _has_strips(operands.types, device.capability):
            strip = choose_strips(dtype, problem)
            if strip != NO_STRIPS:
                strip_config = strip_candidate(dtype, strip)
                strips = StripPlan(strip_config, problem, device.units)
        var candidate = choose_depthwise(dtype, problem)
        var config = depthwise_candidate(dtype, candidate)
        return DepthwisePlan(
            strip,
            strip_config,
            strips,
            candidate,
            depthwise_geometry(
                config,
                problem,
                Phases.of(problem),
                RESIDENT * device.units,
            ),
            config.width,
            config.filter_bytes(problem.taps()),
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Enqueues a kernel."""
        comptime Call = type_of(arguments)
        comptime types = type_of(arguments).types(scaled)
        comptime if _has_strips(types, target_capability()):
            if plan.strip != NO_STRIPS:
                _launch_strips[known](plan, problem, arguments, queue)
                return
        ref geometry = plan.geometry
        comptime for index in range(DEPTHWISE_CANDIDATES):
            if plan.candidate == index:
                comptime kernel = DepthwiseKernel[
                    Call.Source,
                    Call.bias_type,
                    Call.residual_type,
                    Call.Output,
                    depthwise_candidate(Call.Source.dtype, index),
                ].run
                queue.enqueue[kernel](
                    LaunchGrid(
                        ceildiv(Int(geometry.items), Int(geometry.block_items))
                        * Int(geometry.slabs.value),
                        THREADS,
                        shared_bytes=plan.filter_bytes,
                    ),
                    arguments.activation,
                    arguments.filter_elements(),
                    arguments.epilogue,
                    arguments.output,
                    geometry,
                )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every configuration, and those of strips that an op has."""
        comptime W = type_of(writer)
        comptime for index in range(DEPTHWISE_CANDIDATES):
            comptime kernel = DepthwiseKernel[
                W.Source,
                dtype,
                dtype,
                W.Output,
                depthwise_candidate(dtype, index),
            ].run
            writer.write[kernel](String(t"depthwise-{index}"))
        comptime if _has_strips(W.types, target_capability()):
            comptime for index in range(STRIP_CANDIDATES):
                comptime kernel = StripKernel[
                    dtype, dtype, dtype, W.Output, strip_candidate(dtype, index)
                ].run
                writer.write[kernel](String(t"depthwise-strip-{index}"))


def _has_strips(types: OperandTypes, capability: Int) -> Bool:
    """Whether the strip kernel is built: for activations in memory, and types
    that Hopper's diagonal kernel does not take."""
    return not types.fused_input and not (
        is_hopper(capability) and has_diagonal_types(types)
    )


def _launch_strips[
    known: KnownFilter,
](
    plan: DepthwisePlan,
    problem: ConvProblem,
    arguments: Arguments,
    mut queue: Stream,
) raises:
    """Enqueues the plan's strip candidate."""
    comptime Call = type_of(arguments)
    comptime dtype = Call.Source.dtype
    comptime for index in range(STRIP_CANDIDATES):
        comptime config = strip_candidate(dtype, index)
        comptime if config.may_run(known):
            if plan.strip == index:
                comptime kernel = StripKernel[
                    dtype,
                    Call.bias_type,
                    Call.residual_type,
                    Call.Output,
                    config,
                ].run
                queue.enqueue[kernel, max_shared_bytes=MULTIPROCESSOR_BYTES](
                    LaunchGrid(
                        plan.strips.blocks,
                        plan.strips.threads(),
                        shared_bytes=plan.strips.shared_bytes,
                    ),
                    arguments.activation.data(),
                    arguments.filter_elements(),
                    arguments.epilogue,
                    arguments.output,
                    StripGeometry.of(problem, plan.strips),
                )
                return
    raise Error(t"{plan}: the op was compiled without it; problem {problem}")
