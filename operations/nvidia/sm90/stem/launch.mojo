"""The host side of the Hopper stem kernel: plan and launch."""

from std.collections import Optional

from ....conv.fields import KERNEL_STEM, STEM_CHANNELS
from ....conv.known import KnownFilter, KnownProblem
from ....conv.memory import element_bytes
from ....conv.operands import Arguments, Device, Operands, OperandTypes
from ....conv.problem import ConvProblem
from ...inspect import GpuKernel, PtxWriter
from ...legality import alignment_refusal, hopper_refusal, memory_refusal
from ...limits import MAX_INDEX, MAX_SHARED_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ...stream import LaunchGrid, Stream
from .geometry import STEM_CANDIDATES, StemGeometry, stem_candidate
from .kernel import StemKernel
from .tiling import StemTiling, choose_stem, stem_geometry


@fieldwise_init
struct StemPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the stem kernel."""

    var candidate: Int
    var tiling: StemTiling
    var geometry: StemGeometry
    var blocks: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        writer.write(t"{stem_candidate(self.candidate)}: {self.tiling}")


struct Stem(GpuKernel):
    """Few input channels, on Hopper's tensor cores."""

    comptime code = KERNEL_STEM
    comptime Plan = StemPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses all but Hopper."""
        return hopper_refusal(Self.code, capability)

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses all but 16 bits, and work fused in front."""
        if not (types.input.is_half_float() and types.output.is_half_float()):
            return String(
                t"stem takes and gives bfloat16 or float16; here {types.input}"
                t" and {types.output}"
            )
        return memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether the problem may have one group of few channels."""
        return known.may_have_one_group() and known.channels <= STEM_CHANNELS

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses several groups, more channels, and filters that do not fit
        shared memory."""
        var refusal = alignment_refusal(Self.code, operands)
        if refusal:
            return refusal
        if problem.groups != 1:
            return String(t"stem takes one group; here {problem.groups}")
        if problem.channels > STEM_CHANNELS:
            return String(
                t"stem takes up to {STEM_CHANNELS} input channels; here"
                t" {problem.channels}"
            )
        var image = (
            problem.channels
            * problem.input[0]
            * problem.input[1]
            * problem.input[2]
        )
        if image >= MAX_INDEX:
            return String(
                t"stem counts an image's elements with 31 bits; here {image}"
            )
        if problem.gemm_m() >= MAX_INDEX:
            return String(
                t"stem counts pixels with 31 bits; here {problem.gemm_m()}"
            )
        var smallest = StemTiling(stem_candidate(choose_stem(problem)), problem)
        if smallest.shared_bytes() > MAX_SHARED_BYTES:
            return String(
                t"stem needs {smallest.shared_bytes()} bytes of shared memory"
                t" for filter {problem.filter} with dilation"
                t" {problem.dilation}; a block has {MAX_SHARED_BYTES}"
            )
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether there is one group of few channels, but for what is a small
        matrix product: images of one pixel, each of which would be a tile."""
        if problem.groups > 1 or problem.channels > STEM_CHANNELS:
            return False
        var chunk = CHUNK_BYTES // element_bytes(operands.types.input)
        return (
            problem.gemm_m() > problem.batch
            or problem.channels % chunk != 0
            or not operands.aligned()
        )

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> StemPlan:
        """The configuration whose multiplies take least time, and the tile of
        pixels that the model finds fastest."""
        var candidate = choose_stem(problem)
        var config = stem_candidate(candidate)
        var tiling = StemTiling(config, problem)
        tiling.choose_pixels(
            config, problem, operands.types.output, device.units
        )
        return StemPlan(
            candidate,
            tiling,
            stem_geometry(problem, tiling),
            tiling.blocks(config, device.units),
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
        """Enqueues the plan's configuration."""
        comptime Call = type_of(arguments)
        comptime for index in range(STEM_CANDIDATES):
            if plan.candidate == index:
                comptime kernel = StemKernel[
                    Call.Source.dtype,
                    Call.bias_type,
                    Call.residual_type,
                    Call.Output,
                    stem_candidate(index),
                ].run
                queue.enqueue[kernel, max_shared_bytes=MAX_SHARED_BYTES](
                    LaunchGrid(
                        plan.blocks,
                        stem_candidate(index).threads(),
                        shared_bytes=plan.tiling.shared_bytes(),
                    ),
                    arguments.activation.data(),
                    arguments.filter,
                    arguments.epilogue,
                    arguments.output,
                    plan.geometry,
                )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every configuration."""
        comptime for index in range(STEM_CANDIDATES):
            comptime kernel = StemKernel[
                dtype,
                dtype,
                dtype,
                type_of(writer).Output,
                stem_candidate(index),
            ].run
            writer.write[kernel](String(t"stem-{index}"))
