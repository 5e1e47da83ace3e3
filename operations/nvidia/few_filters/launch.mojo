"""The host side of the kernel for few filters: plan and launch."""

from std.collections import Optional

from ...conv.fields import KERNEL_FEW_FILTERS
from ...conv.known import UNKNOWN, KnownFilter, KnownProblem
from ...conv.memory import element_bytes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ..device import is_blackwell
from ..geometry import geometry_refusal, keeps_pixels
from ..inspect import GpuKernel, PtxWriter
from ..legality import (
    alignment_refusal,
    memory_refusal,
    precision_refusal,
    takes_mma_types,
)
from ..limits import MAX_INDEX, WARP
from ..pipeline.chunks import CHUNK_BYTES
from ..stream import LaunchGrid, Stream
from .geometry import WindowGeometry, has_planes
from .kernel import WindowKernel
from .model import (
    SHARED_BYTES,
    Tiled,
    fastest_tiling,
    smallest_shared_bytes,
)
from .tile import MAX_FILTERS, TILES, tile_of

comptime FEWEST_PIXELS = 1024
"""Output pixels of a problem that it suits."""

comptime MOST_TAPS = 7
"""Along an axis."""


struct WindowPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the kernel for few filters."""

    var geometry: WindowGeometry
    var tile: Int
    """Which of `TILES`."""
    var warps: Int
    """Of a block."""
    var blocks: Int
    var seconds: Float64
    """The model's."""

    def __init__(out self, problem: ConvProblem, tiled: Tiled):
        """A launch with a tiling.

        Args:
            problem: The convolution.
            tiled: The same with the tiling, which shared memory holds.
        """
        self.geometry = tiled.geometry
        self.tile = tile_of(problem.filters)
        self.warps = tiled.warps
        self.blocks = tiled.blocks
        self.seconds = tiled.seconds

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        ref geometry = self.geometry
        var microseconds = round(self.seconds * 1e7) / 10
        writer.write(
            t"tiles of {geometry.tile_rows}x{geometry.tile_columns} pixels,"
            t" {geometry.stages} stages of {geometry.stage_bytes} bytes,"
            t" {geometry.slices} slices of channels, {self.warps} warps,"
            t" {self.blocks} blocks: {microseconds} us by the model"
        )


struct FewFilters(GpuKernel):
    """Few filters, or few channels: windows in shared memory."""

    comptime code = KERNEL_FEW_FILTERS
    comptime Plan = WindowPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses Blackwell, whose own kernel nothing has compared it with."""
        if is_blackwell(capability):
            return String(
                t"{kernel_name(Self.code)} does not run on compute capability"
                t" 10.0 and 10.3 (B200, B300), where sm100 takes few filters"
            )
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses what the multiply does not take, and work fused in front."""
        if types.input.is_integral() or not takes_mma_types(types):
            return String(
                t"{kernel_name(Self.code)} takes and gives float32, bfloat16"
                t" and float16 on a GPU; here {types.input} and {types.output}"
            )
        return memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether there may be one group of few filters, pixels of whole
        chunks, and products that may be rounded to tf32."""
        return (
            not (types.input == DType.float32 and known.exact)
            and known.may_have_one_group()
            and known.may_be_multiple(
                known.channels, element_bytes(types.input), CHUNK_BYTES
            )
            and (
                known.channels <= UNKNOWN
                or _fills_multiply(known.channels, types)
            )
            and known.filters <= MAX_FILTERS
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses exact float32, addresses and channels that are no chunks,
        groups, many filters, volumes, and what shared memory does not hold."""
        var refusal = precision_refusal(Self.code, operands)
        if not refusal:
            refusal = alignment_refusal(Self.code, operands)
        if not refusal:
            refusal = _shape_refusal(problem, operands)
        if not refusal:
            refusal = geometry_refusal(problem)
        if not refusal:
            refusal = _size_refusal(problem, operands)
        return refusal

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether there are few filters, and pixels for all multiprocessors:
        what other kernels read once a tap, or multiply with filters that are
        none."""
        return (
            problem.groups == 1
            and _fills_multiply(problem.channels, operands.types)
            and problem.filters <= MAX_FILTERS
            and problem.taps() > 1
            and problem.gemm_m() >= FEWEST_PIXELS
            and not (operands.types.input == DType.float32 and operands.exact)
        )

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> WindowPlan:
        """The tiling that the model finds fastest."""
        return WindowPlan(problem, fastest_tiling(problem, operands, device))

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Enqueues the kernel of the plan's tile."""
        comptime Call = type_of(arguments)
        comptime for index in range(len(TILES)):
            comptime tile = TILES[index]
            comptime compiled = (
                known.filters <= UNKNOWN or tile_of(known.filters) == index
            )
            comptime if compiled:
                if plan.tile == index:
                    comptime kernel = WindowKernel[
                        Call.Source,
                        Call.Output,
                        Call.bias_type,
                        Call.residual_type,
                        tile,
                    ].run
                    queue.enqueue[kernel, max_shared_bytes=SHARED_BYTES](
                        LaunchGrid(
                            plan.blocks,
                            plan.warps * WARP,
                            shared_bytes=plan.geometry.shared_bytes,
                        ),
                        arguments.activation,
                        arguments.filter,
                        arguments.epilogue,
                        arguments.output,
                        plan.geometry,
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes the kernel of each number of filters."""
        comptime W = type_of(writer)
        comptime for index in range(len(TILES)):
            comptime tile = TILES[index]
            comptime kernel = WindowKernel[
                W.Source, W.Output, W.out_type, W.out_type, tile
            ].run
            comptime filters = tile.filters
            writer.write[kernel](String(t"few_filters-{filters}"))


def _fills_multiply(channels: Int, types: OperandTypes) -> Bool:
    """Whether pixels have more than the half of what a multiply takes."""
    return channels * element_bytes(types.input) > CHUNK_BYTES


def _shape_refusal(
    problem: ConvProblem, operands: Operands
) -> Optional[String]:
    """Why the kernel does not take a problem's shape, or None."""
    var name = kernel_name(KERNEL_FEW_FILTERS)
    if problem.groups != 1:
        return String(t"{name} takes one group; here {problem.groups}")
    if problem.filters > MAX_FILTERS:
        return String(
            t"{name} takes up to {MAX_FILTERS} filters; here {problem.filters}"
        )
    var bytes = problem.channels * element_bytes(operands.types.input)
    if bytes % CHUNK_BYTES != 0:
        return String(
            t"{name} takes pixels in multiples of {CHUNK_BYTES} bytes; here"
            t" {problem.channels} channels of {bytes} bytes"
        )
    if keeps_pixels(problem):
        return None
    if not has_planes(problem):
        return String(
            t"{name} takes filters of one tap along d without stride and"
            t" padding there; here filter {problem.filter}, stride"
            t" {problem.stride}"
        )
    if problem.filter[1] > MOST_TAPS or problem.filter[2] > MOST_TAPS:
        return String(
            t"{name} takes up to {MOST_TAPS} taps along h and w; here"
            t" {problem.filter}"
        )
    if problem.stride[1] > 2 or problem.stride[2] > 2:
        return String(
            t"{name} takes strides 1 and 2 along h and w; here {problem.stride}"
        )
    return None


def _size_refusal(problem: ConvProblem, operands: Operands) -> Optional[String]:
    """Why the kernel's numbers or shared memory do not hold a problem, or
    None."""
    var name = kernel_name(KERNEL_FEW_FILTERS)
    var inputs = problem.batch * problem.input[0]
    inputs *= problem.input[1] * problem.input[2]
    var pixels = max(inputs, problem.gemm_m())
    if pixels >= MAX_INDEX:
        return String(t"{name} counts pixels with 31 bits; here {pixels}")
    var needed = smallest_shared_bytes(problem, operands)
    if needed > SHARED_BYTES:
        return String(
            t"{name} needs {needed} bytes of shared memory for"
            t" {problem.filters} filters {problem.filter} of"
            t" {problem.channels} channels with dilation {problem.dilation}; a"
            t" block has {SHARED_BYTES}"
        )
    return None
