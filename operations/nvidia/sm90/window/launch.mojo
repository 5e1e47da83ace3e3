"""The host side of the Hopper window kernel: plan, descriptors, launch."""

from std.collections import Optional

from ....conv.fields import KERNEL_WINDOW
from ....conv.known import UNKNOWN, KnownFilter, KnownProblem
from ....conv.memory import element_bytes
from ....conv.operands import Arguments, Device, Operands, OperandTypes
from ....conv.problem import SPATIAL, ConvProblem
from ....conv.registry import kernel_name
from ...geometry import geometry_refusal, keeps_pixels
from ...im2col.traversal import ROW_BYTES
from ...inspect import GpuKernel, PtxWriter
from ...legality import (
    alignment_refusal,
    hopper_refusal,
    is_output_type,
    memory_refusal,
    precision_refusal,
)
from ...limits import MAX_BOX, MAX_INDEX, MAX_SHARED_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ...stream import LaunchGrid, Stream
from .geometry import WindowGeometry
from .kernel import WindowKernel
from .maps import activation_map, filter_map
from .model import Tiled, fastest_tiling, smallest_shared_bytes
from .tiling import (
    FEWEST_FILTERS,
    MAX_FILTERS,
    MAX_SLICES,
    WIDTHS,
    WindowTiling,
    width_of,
)

comptime FEWEST_PIXELS = 1024
"""Output pixels of a problem that it suits."""

comptime FEW_FILTERS = 16
"""Filters of float32 that it suits, and of 16 bits whatever the taps; channels
of so many filters that other kernels take."""

comptime WIDE_FILTERS = 32
"""Filters of any number of channels that it suits, and channels of few."""

comptime MANY_PIXELS = 1 << 17
"""Output pixels from which it suits more filters than `WIDE_FILTERS`."""

comptime SQUARE_TAPS = 9
"""Taps from which it suits more filters of up to as many channels."""

comptime STATIONARY_TAPS = 9
"""Taps of `WIDE_CHANNELS` that the implicit GEMM keeps in shared memory."""

comptime WIDE_CHANNELS = 64
"""Channels of more filters than `WIDE_FILTERS`, at most: the implicit GEMM's
tiles are full, and of more channels it is bound by products."""


struct WindowPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the window kernel."""

    var tiling: WindowTiling
    var geometry: WindowGeometry
    var width: Int
    """Which number of filters is multiplied."""
    var blocks: Int
    var seconds: Float64
    """The model's."""

    def __init__(out self, problem: ConvProblem, tiled: Tiled, units: Int):
        """A launch with a tiling.

        Args:
            problem: The convolution.
            tiled: The same with the tiling, which shared memory holds.
            units: Multiprocessors.
        """
        self.tiling = tiled.tiling
        self.geometry = tiled.geometry
        self.width = width_of(problem.filters)
        self.blocks = min(Int(tiled.geometry.tiles), units)
        self.seconds = tiled.seconds

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        ref geometry = self.geometry
        var microseconds = round(self.seconds * 1e7) / 10
        writer.write(
            t"{self.tiling}, {geometry.stages} stages of"
            t" {geometry.stage_bytes} bytes, {geometry.slices.value} slices of"
            t" channels, {self.blocks} blocks: {microseconds} us by the model"
        )


struct Window(GpuKernel):
    """Several taps and few filters, on Hopper's tensor cores: windows in shared
    memory."""

    comptime code = KERNEL_WINDOW
    comptime Plan = WindowPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses all but Hopper."""
        return hopper_refusal(Self.code, capability)

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses types of 8 bits, and work fused in front."""
        if not (is_output_type(types.input) and is_output_type(types.output)):
            return String(
                t"{kernel_name(Self.code)} takes and gives float32, bfloat16"
                t" and float16; here {types.input} and {types.output}"
            )
        return memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether there may be one group of few filters, several taps along w,
        pixels of whole chunks, and products that may be rounded to tf32."""
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
            and known.taps != 1
            and known.filters <= _most_filters(known.channels, types)
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses exact float32, addresses and channels that are no chunks,
        groups, many filters, and what shared memory does not hold."""
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
        """Whether there are few filters, several taps along w, and pixels for
        all multiprocessors: what other kernels read once a tap, or multiply with
        filters that are none."""
        return (
            problem.groups == 1
            and _fills_multiply(problem.channels, operands.types)
            and problem.filters
            <= _most_filters(problem.channels, operands.types)
            and problem.filter[2] > 1
            and problem.gemm_m() >= FEWEST_PIXELS
            and _is_faster(problem, operands)
            and not (operands.types.input == DType.float32 and operands.exact)
        )

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> WindowPlan:
        """The tiling that the model finds fastest."""
        return WindowPlan(
            problem, fastest_tiling(problem, operands, device), device.units
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
        """Encodes the descriptors and enqueues the kernel of the plan's number
        of filters."""
        comptime Call = type_of(arguments)
        var activation = activation_map(
            queue.ctx,
            problem,
            plan.geometry,
            arguments.activation.data(),
            plan.tiling.row_bytes,
        )
        var filter = filter_map(
            queue.ctx,
            problem,
            plan.geometry,
            arguments.filter,
            plan.tiling.row_bytes,
        )
        comptime for width in range(WIDTHS):
            comptime compiled = (
                known.filters <= UNKNOWN or width_of(known.filters) == width
            )
            comptime if compiled:
                if plan.width == width:
                    comptime kernel = WindowKernel[
                        Call.Source.dtype,
                        Call.bias_type,
                        Call.residual_type,
                        Call.Output,
                        FEWEST_FILTERS << width,
                    ].run
                    queue.enqueue[kernel, max_shared_bytes=MAX_SHARED_BYTES](
                        LaunchGrid(
                            plan.blocks,
                            plan.tiling.threads(),
                            shared_bytes=plan.geometry.shared_bytes,
                        ),
                        activation,
                        filter,
                        arguments.epilogue,
                        arguments.output,
                        plan.geometry,
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes the kernel of each number of filters."""
        comptime W = type_of(writer)
        comptime for width in range(WIDTHS):
            comptime columns = FEWEST_FILTERS << width
            comptime kernel = WindowKernel[
                dtype, W.out_type, W.out_type, W.Output, columns
            ].run
            writer.write[kernel](String(t"window-{columns}"))


def _most_filters(channels: Int, types: OperandTypes) -> Int:
    """Filters of a problem that the kernel suits, at most; of channels that may
    be `UNKNOWN`."""
    if not types.input.is_half_float():
        return FEW_FILTERS
    return MAX_FILTERS if channels <= WIDE_CHANNELS else WIDE_FILTERS


def _is_faster(problem: ConvProblem, operands: Operands) -> Bool:
    """Whether the kernel is faster than the implicit GEMM, the diagonal and the
    few filters' kernel, by timings of 81 convolutions of networks on an H100.
    """
    if problem.channels <= WIDE_FILTERS and problem.filters <= FEWEST_FILTERS:
        return False
    if problem.filters <= FEW_FILTERS:
        return problem.channels > FEW_FILTERS or (
            problem.filters != problem.channels
        )
    if problem.filters <= WIDE_FILTERS:
        return problem.taps() > 3
    if operands.visits():
        return False
    return problem.gemm_m() >= MANY_PIXELS and problem.taps() >= (
        SQUARE_TAPS if problem.channels <= WIDE_FILTERS else STATIONARY_TAPS + 1
    )


def _fills_multiply(channels: Int, types: OperandTypes) -> Bool:
    """Whether pixels have more than the half of what a multiply takes."""
    return channels * element_bytes(types.input) > CHUNK_BYTES


def _shape_refusal(
    problem: ConvProblem, operands: Operands
) -> Optional[String]:
    """Why the kernel does not take a problem's shape, or None."""
    var name = kernel_name(KERNEL_WINDOW)
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
    if bytes > MAX_SLICES * ROW_BYTES:
        return String(
            t"{name} takes pixels of up to {MAX_SLICES * ROW_BYTES} bytes; here"
            t" {problem.channels} channels of {bytes} bytes"
        )
    if problem.taps() > MAX_BOX:
        return String(
            t"{name} takes up to {MAX_BOX} taps; here {problem.filter}"
        )
    if problem.output[2] > 1 and problem.stride[2] > 2:
        return String(
            t"{name} takes strides 1 and 2 along w; here {problem.stride}"
        )
    return None


def _size_refusal(problem: ConvProblem, operands: Operands) -> Optional[String]:
    """Why the kernel's numbers or shared memory do not hold a problem, or
    None."""
    var name = kernel_name(KERNEL_WINDOW)
    var inputs = problem.batch
    for axis in range(SPATIAL):
        inputs *= problem.input[axis]
    var pixels = max(inputs, problem.gemm_m())
    if pixels >= MAX_INDEX:
        return String(t"{name} counts pixels with 31 bits; here {pixels}")
    var needed = smallest_shared_bytes(problem, operands)
    if needed == Int.MAX:
        return String(
            t"{name} loads windows of up to {MAX_BOX} rows and columns; here"
            t" filter {problem.filter} with stride {problem.stride} and"
            t" dilation {problem.dilation}"
        )
    if needed > MAX_SHARED_BYTES:
        return String(
            t"{name} needs {needed} bytes of shared memory for"
            t" {problem.filters} filters {problem.filter} of"
            t" {problem.channels} channels with dilation {problem.dilation}; a"
            t" block has {MAX_SHARED_BYTES}"
        )
    return None
