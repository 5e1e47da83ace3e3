"""The host side of the Hopper diagonal kernel: plan, descriptors, launch."""

from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.collections import Optional
from std.utils import IndexList

from ....conv.epilogue import Epilogue
from ....conv.fields import DIAGONAL_CHANNELS, KERNEL_DIAGONAL
from ....conv.known import UNKNOWN, KnownFilter, KnownProblem
from ....conv.memory import Reads
from ....conv.operands import Arguments, Device, Operands, OperandTypes
from ....conv.problem import SPATIAL, ConvProblem
from ...inspect import GpuKernel, PtxWriter
from ...legality import (
    alignment_refusal,
    has_diagonal_types,
    hopper_refusal,
    memory_refusal,
)
from ...limits import MAX_SHARED_BYTES
from ...stream import LaunchGrid, Stream
from ...tma.descriptor import TensorMap, TensorView, encode_tiled
from .geometry import DiagonalGeometry
from .kernel import DiagonalKernel
from .plan import (
    DIAGONAL_CANDIDATES,
    MATRIX,
    SLAB,
    STAGE_ROWS,
    STEP_ROWS,
    DiagonalTiling,
    choose_diagonal,
    diagonal_candidate,
    diagonal_refusal,
)
from .slab_kernel import SlabKernel
from .slabs import SLAB_THREADS, SQUARE, SlabGeometry, SlabShape, SlabTiling

comptime FEW_PIXELS = 64
"""Output pixels up to which groups of `DIAGONAL_CHANNELS` run on sm80, unless
the slab kernel takes them."""

comptime FEW_OUTPUTS = 32 * 1024
"""Up to which these run on sm80 all the same."""


@fieldwise_init
struct DiagonalPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the diagonal kernel, or of the slab kernel in its place."""

    var candidate: Int
    var tiling: DiagonalTiling
    var geometry: DiagonalGeometry
    var slabs: Optional[SlabTiling]
    """The slab kernel's cut, if that runs."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var config = diagonal_candidate(self.candidate)
        if self.slabs:
            writer.write(t"{config}: {self.slabs.value()}")
        else:
            writer.write(t"{config}: {self.tiling}")


struct Diagonal(GpuKernel):
    """Depthwise convolutions and groups of few channels on Hopper's tensor
    cores: taps are matrices with blocks on their diagonal."""

    comptime code = KERNEL_DIAGONAL
    comptime Plan = DiagonalPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses all but Hopper."""
        return hopper_refusal(Self.code, capability)

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses all but 16 bits, and work fused in front."""
        if not has_diagonal_types(types):
            return String(
                t"diagonal takes and gives bfloat16 or float16, and a residual"
                t" of the output's type; here {types.input}, {types.output} and"
                t" {types.residual}"
            )
        return memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether a configuration may be for the filter."""
        if known.groups == 1 and known.channels > 1:
            if not _is_one_group(known.channels):
                return False
        if known.channels > UNKNOWN and known.filters > UNKNOWN:
            if known.channels != known.filters:
                return False
        comptime for index in range(DIAGONAL_CANDIDATES):
            comptime config = diagonal_candidate(index)
            if config.may_run(known.filter()):
                return True
        return False

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses what no configuration takes."""
        var refusal = alignment_refusal(Self.code, operands)
        if refusal:
            return refusal
        return diagonal_refusal(problem)

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether groups have few channels: most of a stage of the implicit
        GEMM would hold zeros. So have convolutions of one such group; of
        `DIAGONAL_CHANNELS` where it does not stride. Few pixels of groups so
        wide run faster on sm80, unless these are many."""
        var channels = problem.group_channels()
        if problem.groups == 1 and channels > 1:
            return _is_one_group(channels) and (
                channels < DIAGONAL_CHANNELS
                or problem.stride == IndexList[SPATIAL](fill=1)
            )
        if channels == DIAGONAL_CHANNELS and problem.gemm_m() <= FEW_PIXELS:
            var candidate = choose_diagonal(problem)
            return (
                problem.gemm_m() * problem.channels > FEW_OUTPUTS
                and candidate >= 0
                and SlabTiling.suits(
                    diagonal_candidate(candidate), problem, device.units
                )
            )
        return channels <= DIAGONAL_CHANNELS

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> DiagonalPlan:
        """The configuration for the filter, and the cut that takes least
        time."""
        var candidate = choose_diagonal(problem)
        var config = diagonal_candidate(candidate)
        var tiling = DiagonalTiling(config, problem, device.units)
        var slabs = Optional[SlabTiling](None)
        if SlabTiling.suits(config, problem, device.units):
            slabs = SlabTiling(config, problem, device.units, operands.residual)
        return DiagonalPlan(
            candidate,
            tiling,
            DiagonalGeometry.of(config, problem, tiling),
            slabs,
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
        """Encodes the descriptors and enqueues the plan's configuration."""
        comptime Call = type_of(arguments)
        comptime dtype = Call.Source.dtype
        ref tiling = plan.tiling
        var config = diagonal_candidate(plan.candidate)
        if not config.may_run(known):
            raise Error(
                t"{config}: the op was compiled without it; problem {problem}"
            )
        if plan.slabs:
            Self._launch_slabs[known](plan, problem, arguments, queue)
            return
        var input = _map(
            queue.ctx,
            arguments.activation.data(),
            problem,
            tiling,
            problem.input,
            tiling.staged_columns,
            STAGE_ROWS,
            1,
        )
        # Any descriptor where nothing is read or written through it.
        var to = input
        comptime if not (Call.Output.computes or Call.Output.stores):
            to = _output_map(
                queue.ctx, arguments.output.data().as_imm(), problem, tiling
            )
        var residual = input
        if arguments.epilogue.has_residual:
            residual = _output_map(
                queue.ctx, arguments.epilogue.residual, problem, tiling
            )
        comptime for index in range(DIAGONAL_CANDIDATES):
            comptime config = diagonal_candidate(index)
            comptime if config.may_run(known):
                if plan.candidate == index:
                    comptime kernel = DiagonalKernel[
                        dtype, Call.bias_type, Call.Output, config
                    ].run
                    queue.enqueue[kernel, max_shared_bytes=MAX_SHARED_BYTES](
                        LaunchGrid(
                            tiling.blocks,
                            config.threads(tiling.slab_warps),
                            shared_bytes=tiling.shared_bytes(),
                        ),
                        input,
                        to,
                        residual,
                        arguments.filter,
                        rebind[Epilogue[Call.bias_type, Call.Output.dtype]](
                            arguments.epilogue
                        ),
                        arguments.output,
                        plan.geometry,
                    )
                    return

    @staticmethod
    def _launch_slabs[
        known: KnownFilter
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Encodes the slab kernel's descriptors and enqueues it."""
        comptime Call = type_of(arguments)
        ref tiling = plan.slabs.value()
        var input = window_map(
            queue.ctx,
            arguments.activation.data(),
            problem,
            SlabShape.of(diagonal_candidate(plan.candidate)),
        )
        # Any descriptor where nothing is read or written through it.
        var to = input
        comptime if not (Call.Output.computes or Call.Output.stores):
            to = _tile_map(queue.ctx, arguments.output.data().as_imm(), problem)
        var residual = input
        if arguments.epilogue.has_residual:
            residual = _tile_map(
                queue.ctx, arguments.epilogue.residual, problem
            )
        comptime for index in range(DIAGONAL_CANDIDATES):
            comptime config = diagonal_candidate(index)
            comptime if config.may_run(known) and config.group_chunks > 1:
                if plan.candidate == index:
                    comptime kernel = SlabKernel[
                        Call.Source.dtype, Call.bias_type, Call.Output, config
                    ].run
                    queue.enqueue[kernel, max_shared_bytes=MAX_SHARED_BYTES](
                        LaunchGrid(
                            tiling.blocks(),
                            SLAB_THREADS,
                            shared_bytes=tiling.shared_bytes,
                        ),
                        input,
                        to,
                        residual,
                        arguments.filter,
                        rebind[Epilogue[Call.bias_type, Call.Output.dtype]](
                            arguments.epilogue
                        ),
                        arguments.output,
                        SlabGeometry.of(problem, tiling),
                    )
                    return

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every configuration."""
        comptime for index in range(DIAGONAL_CANDIDATES):
            comptime kernel = DiagonalKernel[
                dtype, dtype, type_of(writer).Output, diagonal_candidate(index)
            ].run
            writer.write[kernel](String(t"diagonal-{index}"))
            comptime if diagonal_candidate(index).group_chunks > 1:
                comptime slab_kernel = SlabKernel[
                    dtype,
                    dtype,
                    type_of(writer).Output,
                    diagonal_candidate(index),
                ].run
                writer.write[slab_kernel](String(t"slabs-{index}"))


def window_map[
    dtype: DType
](
    ctx: DeviceContext,
    data: Reads[dtype],
    problem: ConvProblem,
    shape: SlabShape,
) raises -> TensorMap:
    """An activation as `[N, D, H, W, C]`, of which a box is a window of a slab,
    or its even or odd columns.

    Parameters:
        dtype: Of the activation.

    Args:
        ctx: The device.
        data: The activation.
        problem: The convolution.
        shape: Of the slab kernel's configuration.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    var every = IndexList[5](fill=1)
    every[1] = shape.stride
    return encode_tiled[dtype, 5](
        ctx,
        data,
        TensorView[5](
            IndexList[5](
                problem.channels,
                problem.input[2],
                problem.input[1],
                problem.input[0],
                problem.batch,
            )
        ),
        IndexList[5](SLAB, shape.columns() * shape.stride, shape.rows(), 1, 1),
        TensorMapSwizzle.SWIZZLE_128B,
        every=every,
    )


def _tile_map[
    dtype: DType
](
    ctx: DeviceContext, data: Reads[dtype], problem: ConvProblem
) raises -> TensorMap:
    """The outputs of a tile of the slab kernel, or their residuals, a box."""
    return encode_tiled[dtype, 5](
        ctx,
        data,
        TensorView[5](
            IndexList[5](
                problem.channels,
                problem.output[2],
                problem.output[1],
                problem.output[0],
                problem.batch,
            )
        ),
        IndexList[5](SLAB, SQUARE, SQUARE, 1, 1),
        TensorMapSwizzle.SWIZZLE_128B,
    )


def _map[
    dtype: DType
](
    ctx: DeviceContext,
    data: Reads[dtype],
    problem: ConvProblem,
    tiling: DiagonalTiling,
    size: IndexList[SPATIAL],
    columns: Int,
    rows: Int,
    images: Int,
) raises -> TensorMap:
    """Rows of some columns of a slab of images of a tensor `[N, *size, C]`, a
    box."""
    return encode_tiled[dtype, 5](
        ctx,
        data,
        TensorView[5](
            IndexList[5](
                problem.channels, size[2], size[1], size[0], problem.batch
            )
        ),
        IndexList[5](tiling.slab_warps * MATRIX, columns, rows, 1, images),
        TensorMapSwizzle.SWIZZLE_NONE if tiling.is_wide() else TensorMapSwizzle.SWIZZLE_128B,
    )


def _output_map[
    dtype: DType
](
    ctx: DeviceContext,
    data: Reads[dtype],
    problem: ConvProblem,
    tiling: DiagonalTiling,
) raises -> TensorMap:
    """The outputs of a step, or their residuals, a box."""
    return _map(
        ctx,
        data,
        problem,
        tiling,
        problem.output,
        tiling.columns,
        STEP_ROWS,
        tiling.images,
    )


def _is_one_group(channels: Int) -> Bool:
    """Whether the kernel is for convolutions of so many channels and as many
    filters, that have one group. The stem's is for fewer.

    Args:
        channels: Of the input.
    """
    return channels == DIAGONAL_CHANNELS or channels == DIAGONAL_CHANNELS // 2
