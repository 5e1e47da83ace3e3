"""Runs the Hopper kernel: descriptors, grid, launch."""

from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.sys.info import size_of
from std.utils import IndexList

from ..conv.epilogue import Epilogue
from ..conv.access import OutputTarget
from ..conv.memory import Reads
from ..conv.problem import ConvProblem
from ..tma.descriptor import (
    PixelBox,
    TensorMap,
    TensorView,
    encode_im2col,
    encode_tiled,
)
from .config import (
    ROW_BYTES,
    Sm90Config,
    can_implement,
    residual_refusal,
    walk_upper,
    walk_width,
)
from .epilogue_visitor import ConvVisitor
from .kernel import ConvKernel
from .scheduler import TileGeometry


@fieldwise_init
struct LaunchPlan[
    in_type: DType, Output: OutputTarget, bias_type: DType, config: Sm90Config
](ImplicitlyCopyable, Movable):
    """What a launch passes to the kernel.

    Parameters:
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        bias_type: Of the bias.
        config: The configuration.
    """

    comptime out_type = Self.Output.dtype

    var activation: TensorMap
    var filter: TensorMap
    var output: TensorMap
    var residual: TensorMap
    """Not to be used if the visitor has no residual."""
    var target: Self.Output
    var visitor: ConvVisitor[Self.bias_type]
    var geometry: TileGeometry
    var blocks: Int

    def __init__(
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        activation: Reads[Self.in_type],
        filter: Reads[Self.in_type],
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        output: Self.Output,
    ) raises:
        """Encodes the descriptors and counts the blocks.

        Args:
            ctx: The device.
            problem: The convolution, valid and with at least one output.
            activation: `[N, H, W, C]` in device memory.
            filter: `[K, R, S, C]` in device memory.
            epilogue: What is fused; its operands in device memory.
            output: `[N, P, Q, K]`, its elements in device memory.

        Raises:
            Why the configuration cannot take the problem, or what the driver
            refused.
        """
        var refusal = can_implement[Self.in_type, Self.out_type](
            Self.config, problem
        )
        if refusal:
            raise Error(t"sm90: {refusal.value()}; problem {problem}")
        self.visitor = ConvVisitor[Self.bias_type].of(epilogue)
        if self.visitor.has_residual:
            refusal = residual_refusal(Self.config)
            if refusal:
                raise Error(t"sm90: {refusal.value()}; problem {problem}")
        self.activation = _activation_map[Self.in_type, Self.config](
            ctx, problem, activation
        )
        self.filter = _filter_map[Self.in_type, Self.config](
            ctx, problem, filter
        )
        self.output = _output_map[Self.out_type, Self.config](
            ctx, problem, output.data().as_imm()
        )
        self.residual = self.output
        if self.visitor.has_residual:
            self.residual = _residual_map[Self.out_type, Self.config](
                ctx, problem, epilogue.residual
            )
        self.target = output
        self.geometry = TileGeometry.of[Self.in_type](Self.config, problem)
        comptime size = Self.config.cluster_size()
        var multiprocessors = ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        var clusters = min(Int(self.geometry.tiles()), multiprocessors // size)
        self.blocks = clusters * size

    @always_inline
    def launch(self, ctx: DeviceContext, overlap: Bool = True) raises:
        """Enqueues the kernel.

        Args:
            ctx: The device; nothing is waited for.
            overlap: Whether blocks may start, and wait, before what was
                enqueued last has ended.
        """
        comptime kernel = ConvKernel[
            Self.in_type, Self.Output, Self.bias_type, Self.config
        ].run
        comptime bytes = Self.config.shared_bytes()
        ctx.enqueue_function[kernel](
            self.activation,
            self.filter,
            self.output,
            self.residual,
            self.target,
            self.visitor,
            self.geometry,
            grid_dim=self.blocks,
            block_dim=Self.config.threads(),
            shared_mem_bytes=bytes,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(bytes)
            ),
            attributes=pdl_launch_attributes(
                PDLLevel.ON if overlap else PDLLevel.OFF
            ),
        )


def _activation_map[
    dtype: DType, config: Sm90Config
](
    ctx: DeviceContext, problem: ConvProblem, data: Reads[dtype]
) raises -> TensorMap:
    """The walk over the activation's pixels: one step an output pixel, plus,
    with a halo, the steps between the rows' ends."""
    return encode_im2col[dtype, 4](
        ctx,
        data,
        TensorView[4](
            IndexList[4](
                problem.channels,
                problem.input[2],
                problem.input[1],
                problem.batch,
            )
        ),
        PixelBox[2](
            IndexList[2](-problem.pad_before[2], -problem.pad_before[1]),
            IndexList[2](
                walk_upper(problem, 2, config.halo),
                walk_upper(problem, 1, config.halo),
            ),
            IndexList[2](problem.stride[2], problem.stride[1]),
        ),
        ROW_BYTES // size_of[dtype](),
        config.activation_stage_pixels() // config.blocks_n,
        TensorMapSwizzle.SWIZZLE_128B,
    )


def _filter_map[
    dtype: DType, config: Sm90Config
](
    ctx: DeviceContext, problem: ConvProblem, data: Reads[dtype]
) raises -> TensorMap:
    """The filter as `[K, R*S, C]`, one tap of some filters a box."""
    return encode_tiled[dtype, 3](
        ctx,
        data,
        TensorView[3](
            IndexList[3](problem.channels, problem.taps(), problem.filters)
        ),
        IndexList[3](
            ROW_BYTES // size_of[dtype](), 1, config.tile_n // config.blocks_m
        ),
        TensorMapSwizzle.SWIZZLE_128B,
    )


def _output_map[
    dtype: DType, config: Sm90Config
](
    ctx: DeviceContext, problem: ConvProblem, data: Reads[dtype]
) raises -> TensorMap:
    """The output as a matrix, a buffer a box."""
    return encode_tiled[dtype, 2](
        ctx,
        data,
        TensorView[2](IndexList[2](problem.filters, problem.gemm_m())),
        IndexList[2](
            ROW_BYTES // size_of[dtype](),
            config.epilogue.pixels(size_of[dtype]()),
        ),
        TensorMapSwizzle.SWIZZLE_128B,
    )


def _residual_map[
    dtype: DType, config: Sm90Config
](
    ctx: DeviceContext, problem: ConvProblem, data: Reads[dtype]
) raises -> TensorMap:
    """The walk over the residual's pixels: rows as long as the activation's
    walk has them, with zeros beyond the output's end, so that a buffer holds
    the pixels of its accumulators."""
    var width = problem.output[2]
    return encode_im2col[dtype, 3](
        ctx,
        data,
        TensorView[3](
            IndexList[3](problem.filters, width, problem.gemm_m() // width)
        ),
        PixelBox[1](
            IndexList[1](0),
            IndexList[1](walk_width(problem, config.halo) - width),
            IndexList[1](1),
        ),
        ROW_BYTES // size_of[dtype](),
        config.epilogue.pixels(size_of[dtype]()),
        TensorMapSwizzle.SWIZZLE_128B,
    )
