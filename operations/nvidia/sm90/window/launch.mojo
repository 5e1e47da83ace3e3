"""The host side of the Hopper window kernel: plan, descriptors, launch."""

from std.collections import Optional

from ....conv.fields import KERNEL_WINDOW
from ....conv.known import UNKNOWN, KnownFilter, KnownProblem
from ....conv.memory import element_bytes
from ....conv.operands import Arguments, Device, Operands, OperandTypes
from ....conv.problem import SPATIAL, ConvProblem
from ....conv.kernel import kernel_name
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
from ..wgmma import MMA_M
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
    most_consumers,
    width_of,
)

comptime FEWEST_PIXELS = 1024
"""Output pixels of a problem that it suits."""

comptime FEW_FILTERS = 16
"""Filters of float32 that it suits, and of 16 bits whatever the taps: the
implicit GEMM multiplies with four times as many."""

comptime WIDE_FILTERS = 32
"""Filters of any number of channels that it suits, and channels of few."""

comptime MANY_PIXELS = 1 << 17
"""Output pixels from which it suits more filters than `WIDE_FILTERS`."""

comptime SQUARE_TAPS = 9
"""Taps from which it suits more filters of up to as many channels."""

comptime STATIONARY_TAPS = 9
"""Taps of `WIDE_CHANNELS` that the implicit GEMM keeps in shared memory."""

comptime FUSED_TAPS = 15
"""Taps from which it suits more filters whatever the epilogue."""

comptime FEW_TAPS = 3
"""Taps of more channels than `WIDE_FILTERS` that the implicit GEMM is as fast
with."""

comptime WIDE_CHANNELS = 64
"""Channels of more filters than `WIDE_FILTERS`, at most: the implicit GEMM's
tiles are full, and of more channels it is bound by products."""

comptime FEW_PRODUCTS = 512
"""Products of a pixel with one tap that it suits without an epilogue, at most:
the implicit GEMM is bound by memory from there on."""


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
    """Few filters, on Hopper's tensor cores: windows in shared memory."""

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
        """Whether there may be one group of few filters, pixels of whole chunks,
        and products that may be rounded to tf32."""
        var most = _most_filters(known.channels, known.taps, types)
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
            and most > 0
            and known.filters <= most
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
        """Whether there are few filters, several taps along w or one of each
        pixel, and pixels for all multiprocessors: what other kernels read once a
        tap, or multiply with filters that are none."""
        ref types = operands.types
        var most = _most_filters(problem.channels, problem.filter[2], types)
        if (
            problem.groups != 1
            or not _fills_multiply(problem.channels, types)
            or problem.filters > most
            or (types.input == DType.float32 and operands.exact)
        ):
            return False
        if problem.filter[2] == 1:
            return _is_faster_pointwise(problem, operands, device)
        return problem.gemm_m() >= FEWEST_PIXELS and _is_faster(
            problem, operands
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


def _most_filters(channels: Int, taps: Int, types: OperandTypes) -> Int:
    """Filters of a problem that the kernel suits, at most; of channels and taps
    along w that may be `UNKNOWN`."""
    if not types.input.is_half_float():
        # None of one tap, which no timing has compared.
        return 0 if taps == 1 else FEW_FILTERS
    if taps == 1 or channels > WIDE_CHANNELS:
        return WIDE_FILTERS
    return MAX_FILTERS


def _is_faster(problem: ConvProblem, operands: Operands) -> Bool:
    """Whether the kernel is faster with several taps than the implicit GEMM and
    the few filters' kernel, by timings of some 130 convolutions, most of them of
    networks, on an H100 and an H200."""
    ref types = operands.types
    if problem.filters <= FEW_FILTERS:
        # The few filters' kernel has no depth; in float32 it was faster once.
        return (
            types.input.is_half_float()
            or problem.filter[0] > 1
            or problem.channels > WIDE_FILTERS
            or problem.filters > FEWEST_FILTERS
        )
    if not _leaves_windows(problem, types):
        return False
    var narrow = problem.channels <= WIDE_FILTERS
    if problem.filters <= WIDE_FILTERS:
        return narrow or problem.taps() > FEW_TAPS
    var fewest = SQUARE_TAPS if narrow else STATIONARY_TAPS + 1
    if operands.visits():
        fewest = FUSED_TAPS
    return problem.gemm_m() >= MANY_PIXELS and problem.taps() >= fewest


def _is_faster_pointwise(
    problem: ConvProblem, operands: Operands, device: Device
) -> Bool:
    """Whether the kernel is faster than the implicit GEMM with one tap that takes
    each pixel, by timings of 28 convolutions on an H200."""
    return (
        keeps_pixels(problem)
        and problem.gemm_m() >= device.units * MMA_M
        and (
            operands.visits()
            or problem.filters < FEWEST_FILTERS
            or problem.channels * problem.filters <= FEW_PRODUCTS
        )
    )


def _leaves_windows(problem: ConvProblem, types: OperandTypes) -> Bool:
    """Whether the filters leave shared memory for the pixels that all warpgroups
    multiply, all channels or a row of them each: without, multiplies wait for
    each other and for windows that are most of them halo."""
    var width = FEWEST_FILTERS << width_of(problem.filters)
    var channels = problem.channels * element_bytes(types.input)
    var pixels = most_consumers(problem.filters) * MMA_M
    var windows = pixels * min(channels, ROW_BYTES)
    return width * problem.taps() * channels + windows <= MAX_SHARED_BYTES


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
