"""The host side of the GEMV kernel: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import KERNEL_GEMV
from ...conv.known import ANY_KERNEL, UNKNOWN, KnownFilter, KnownProblem
from ...conv.memory import element_bytes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..device import is_blackwell, is_hopper
from ..inspect import GpuKernel, PtxWriter
from ..legality import may_be_tiled
from ..limits import WARP
from ..stream import LaunchGrid, Stream
from .gemv import LOAD_BYTES, THREADS, GemvGeometry, GemvKernel
from ..geometry import geometry_refusal, keeps_pixels

comptime ROWS = [1, 2, 4, 8]
"""Pixels of a block for which kernels are compiled. Each filter element is
loaded once from memory but meets every pixel's from L1: with 8 pixels L1 is as
busy as memory."""

comptime FEW_PIXELS = 8
"""Pixels up to which the kernel may be faster than those of tensor cores: those
of one block."""

comptime MAX_PIXELS = 1024
"""Pixels of a problem, at most: the images of a batch, after their pooling."""

comptime MAX_PRODUCTS = 1 << 25
"""Products of a problem of several pixels, at most, where tensor cores could
multiply them, or tiles in shared memory would load them less often. CUDA cores
convert and multiply each product on their own, which for 8 pixels of 16 bits
takes longer than loading the filter; up to here that is less than what a kernel
of tensor cores takes to begin and end. One pixel's products are always as fast
as memory."""

comptime FUSED_WIDTH = 4
"""Channels of one load of what is fused in front of the op, which may read
wider types."""


@fieldwise_init
struct GemvPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the GEMV kernel."""

    var geometry: GemvGeometry
    var rows: Int
    """Which of `ROWS`."""
    var width: Int
    """Channels of one load."""
    var threads: Int
    """Of a block."""
    var blocks: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var rows = materialize[ROWS]()[self.rows]
        var lanes = 1 << Int(self.geometry.lane_bits)
        writer.write(
            t"{lanes} lanes a filter, up to {rows} pixels a block, loads of"
            t" {self.width} channels, CUDA cores"
        )


struct Gemv(GpuKernel):
    """Pointwise convolutions of few pixels, on CUDA cores."""

    comptime code = KERNEL_GEMV
    comptime Plan = GemvPlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """None: it takes every type."""
        return None

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether the filter may have one tap and the problem one group."""
        return known.may_have_one_group() and (
            known.taps == UNKNOWN or known.taps == 1
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses groups, filters, strides and padding by which output pixel m
        is not made of input pixel m alone, more than `MAX_PIXELS` pixels, and
        sizes beyond 32 bits."""
        if problem.groups != 1:
            return String(t"gemv takes one group; here {problem.groups}")
        if not keeps_pixels(problem):
            return String(
                t"gemv takes filters of one tap, without padding, and strides"
                t" that leave out no pixel; here filter {problem.filter},"
                t" padding {problem.pad_before}/{problem.pad_after}, stride"
                t" {problem.stride}"
            )
        if problem.gemm_m() > MAX_PIXELS:
            return String(
                t"gemv takes up to {MAX_PIXELS} pixels; here {problem.gemm_m()}"
            )
        return geometry_refusal(problem)

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether it takes the problem, and no other kernel would be faster:
        with few pixels, `MAX_PRODUCTS` or what no kernel of tensor cores takes;
        with more of them, both, and of int8 neither, because `sm80` takes all.

        Every multiprocessor streams filters, so that up to there it takes as
        long as memory, or a few loads one after the other. Kernels of tensor
        cores load no faster, and first fill their pipelines."""
        var pixels = problem.gemm_m()
        if pixels > MAX_PIXELS or problem.groups != 1:
            return False
        if not keeps_pixels(problem):
            return False
        var small = pixels * problem.filters * problem.channels <= MAX_PRODUCTS
        if pixels > FEW_PIXELS:
            return (
                small
                and operands.types.input != DType.int8
                and not _may_be_tiled(problem, operands, device)
            )
        return (
            pixels == 1 or small or not _may_be_tiled(problem, operands, device)
        )

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GemvPlan:
        """The widest loads that channels and addresses allow; a lane for each
        load of a filter and each pixel of a block, up to a warp; and blocks of
        one warp until every multiprocessor has some. Loads of one channel for
        several blocks of pixels have a lane for each pixel alone: to add up
        what more lanes have takes longer than to load."""
        var pixels = problem.gemm_m()
        comptime last = len(ROWS) - 1
        var index = 0
        while index < last and materialize[ROWS]()[index] < pixels:
            index += 1
        var rows = materialize[ROWS]()[index]
        var width = _vector_width(operands.types)
        if not operands.aligned() or problem.channels % width != 0:
            width = 1
        var parts = ceildiv(pixels, rows)
        var wanted = rows
        if width > 1 or parts == 1:
            wanted = max(ceildiv(problem.channels, width), rows)
        var lane_bits = 0
        while 1 << lane_bits < min(wanted, WARP):
            lane_bits += 1
        var warps = ceildiv(problem.filters << lane_bits, WARP)
        var threads = WARP if warps * parts <= device.units else THREADS
        var filter_blocks = ceildiv(warps * WARP, threads)
        return GemvPlan(
            GemvGeometry(problem, lane_bits, width, filter_blocks),
            index,
            width,
            threads,
            filter_blocks * parts,
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
        """Enqueues the kernel for the plan's pixels and loads. Where channels
        are whole vectors, loads of elements are for addresses that are not: the
        kernel for the most pixels takes them all."""
        comptime Call = type_of(arguments)
        comptime last = len(ROWS) - 1
        comptime widest = _vector_width(Call.types(scaled))
        # The fewest channels then fill the lanes that its pixels take.
        comptime rare = known.tiled and widest >= ROWS[last]
        comptime for index in range(len(ROWS)):
            comptime for width in [1, widest]:
                comptime whole = rare and width == 1
                comptime if whole and index != last:
                    continue
                if (whole or plan.rows == index) and plan.width == width:
                    comptime kernel = GemvKernel[
                        Call.Source,
                        Call.Output,
                        Call.bias_type,
                        Call.residual_type,
                        ROWS[index],
                        width,
                    ].run
                    queue.enqueue[kernel](
                        LaunchGrid(plan.blocks, plan.threads),
                        arguments.activation,
                        arguments.filter,
                        arguments.epilogue,
                        arguments.output,
                        plan.geometry,
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every number of pixels, with loads of vectors and of
        elements."""
        comptime W = type_of(writer)
        comptime for index in range(len(ROWS)):
            comptime rows = ROWS[index]
            comptime for width in [_vector_width(W.types), 1]:
                comptime kernel = GemvKernel[
                    W.Source, W.Output, W.out_type, W.out_type, rows, width
                ].run
                comptime loads = "gemv-vector" if width > 1 else "gemv"
                writer.write[kernel](String(t"{loads}-{rows}"), 0)


def _may_be_tiled(
    problem: ConvProblem, operands: Operands, device: Device
) -> Bool:
    """Whether an implicit GEMM of tensor cores may take a pointwise problem."""
    if operands.types.fused_input or not operands.aligned():
        return False
    var known = KnownProblem(
        ANY_KERNEL,
        operands.exact,
        groups=problem.groups,
        channels=problem.group_channels(),
        filters=problem.group_filters(),
        taps=1,
        stride=1,
    )
    return (
        is_hopper(device.capability) or is_blackwell(device.capability)
    ) and may_be_tiled(known, operands.types)


def _vector_width(types: OperandTypes) -> Int:
    """Channels of the widest load."""
    if types.fused_input:
        return FUSED_WIDTH
    return LOAD_BYTES // element_bytes(types.input)
