"""Runs the Hopper kernel: descriptors, grid, launch."""

from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    Dim,
    FuncAttribute,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.collections import Optional
from std.sys.info import size_of
from std.utils import IndexList

from ....conv.access import OutputTarget
from ....conv.memory import CACHE_LINE, Reads, Writes
from ....conv.problem import ConvProblem
from ...im2col.tiles import TileGeometry
from ...im2col.traversal import ROW_BYTES, Traversal
from ...tma.descriptor import (
    PixelBox,
    TensorMap,
    TensorView,
    encode_im2col,
)
from ...tma.operands import activation_map, filter_map, output_map
from .config import Sm90Config, can_implement
from .epilogue_callbacks import EpilogueVisitor, LaunchShape
from .epilogue_params import EpilogueParams, visitor_refusal
from .grid import Grid
from .kernel import ConvKernel
from .split_k import split_refusal


@fieldwise_init
struct LaunchPlan[
    in_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Sm90Config,
](ImplicitlyCopyable, Movable):
    """What a launch passes to the kernel.

    Parameters:
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are stored.
        config: The configuration.
    """

    comptime out_type = Self.Output.dtype

    var activation: TensorMap
    var filter: TensorMap
    var output: TensorMap
    var residual: TensorMap
    """Not to be used if the visitor has no residual."""
    var workspace: Optional[DeviceBuffer[DType.float32]]
    """The visitor's, kept alive."""
    var shape: LaunchShape
    var epilogue: EpilogueParams[Self.Output, Self.Visitor]
    var geometry: TileGeometry
    var cluster: Int
    """Blocks of a cluster."""
    var blocks: Int

    def __init__(
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        activation: Reads[Self.in_type],
        filter: Reads[Self.in_type],
        residual: Reads[Self.out_type],
        visitor: Self.Visitor,
        output: Self.Output,
        parts: Int = 1,
    ) raises:
        """Encodes the descriptors and counts the blocks.

        Args:
            ctx: The device.
            problem: The convolution, valid and with at least one output.
            activation: `[N, *input, C]` in device memory.
            filter: `[K, *filter, C / groups]` in device memory.
            residual: `[N, *output, K]` in device memory; not read unless the
                visitor does.
            visitor: What is fused; its operands in device memory.
            output: `[N, *output, K]`, its elements in device memory; not
                touched if the visitor discards it.
            parts: Of a tile's sum.

        Raises:
            Why the configuration cannot take the problem, or what the driver
            refused.
        """
        var refusal = can_implement[Self.in_type, Self.out_type](
            Self.config, problem
        )
        if refusal:
            raise Error(t"sm90: {refusal.value()}; problem {problem}")
        refusal = visitor_refusal[Self.out_type](visitor, Self.config, problem)
        if refusal:
            raise Error(t"sm90: {refusal.value()}; problem {problem}")
        var traversal = Traversal(problem)
        refusal = split_refusal[Self.in_type](Self.config, traversal, parts)
        if refusal:
            raise Error(t"sm90: {refusal.value()}; problem {problem}")
        var channels = traversal.slice_channels[Self.in_type]()
        self.activation = activation_map(
            ctx,
            traversal,
            activation,
            Self.config.act_tile_dim0(),
            channels,
            Self.config.halo,
        )
        self.filter = filter_map(
            ctx,
            problem,
            filter,
            Self.config.filter_tile_dim0(),
            channels,
        )
        comptime if Self.Visitor.discards:
            self.output = self.filter
        else:
            self.output = output_map(
                ctx,
                problem,
                output.data().as_imm(),
                Self.config.epilogue.pixels(size_of[Self.out_type]()),
                ROW_BYTES // size_of[Self.out_type](),
                TensorMapSwizzle.SWIZZLE_128B,
            )
        self.residual = self.output
        if visitor.reads_residual():
            self.residual = _residual_map[Self.out_type, Self.config](
                ctx, traversal, residual
            )
        var grid = Grid.of[Self.in_type](
            Self.config,
            traversal,
            ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
            parts,
        )
        self.geometry = grid.geometry[Self.in_type](Self.config, traversal)
        if parts > 1:
            self.geometry.split(Self.config.halo, parts)
        self.cluster = Self.config.cluster_size() * parts
        self.blocks = grid.clusters * self.cluster
        self.shape = LaunchShape(Self.config, problem, self.blocks)
        self.workspace = None
        var memory = Writes[DType.float32](unsafe_from_address=CACHE_LINE)
        var values = visitor.workspace(self.shape)
        if values > 0:
            var buffer = ctx.enqueue_create_buffer[DType.float32](values)
            memory = (
                buffer.unsafe_ptr()
                .unsafe_mut_cast[True]()
                .unsafe_origin_cast[MutUntrackedOrigin]()
            )
            self.workspace = buffer
        self.epilogue = EpilogueParams[Self.Output, Self.Visitor](
            problem, visitor.prepared(self.shape, memory), output
        )

    @always_inline
    def launch(self, ctx: DeviceContext, overlap: Bool = True) raises:
        """Enqueues the kernel.

        Args:
            ctx: The device; nothing is waited for.
            overlap: Whether blocks may start, and wait, before what was
                enqueued last has ended.
        """
        comptime kernel = ConvKernel[
            Self.in_type, Self.Output, Self.Visitor, Self.config
        ]
        comptime bytes = kernel.shared_bytes()
        var cluster: Optional[Dim] = None
        if self.cluster > 1:
            cluster = Dim(self.cluster)
        ctx.enqueue_function[kernel.run](
            self.activation,
            self.filter,
            self.output,
            self.residual,
            self.epilogue,
            self.geometry,
            grid_dim=self.blocks,
            block_dim=Self.config.threads(),
            cluster_dim=cluster,
            shared_mem_bytes=bytes,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(bytes)
            ),
            attributes=pdl_launch_attributes(
                PDLLevel.ON if overlap else PDLLevel.OFF
            ),
        )
        self.epilogue.visitor.conclude(ctx, self.shape)


def _residual_map[
    dtype: DType, config: Sm90Config
](
    ctx: DeviceContext, traversal: Traversal, data: Reads[dtype]
) raises -> TensorMap:
    """The traversal over the residual's pixels: rows as long as the activation's
    traversal has them, with zeros beyond the output's end, so that a buffer holds
    the pixels of its accumulators."""
    var filters = traversal.filters * traversal.groups
    var width = traversal.output[2]
    return encode_im2col[dtype, 3](
        ctx,
        data,
        TensorView[3](
            IndexList[3](filters, width, traversal.rows()),
            IndexList[3](1, filters, filters * width),
        ),
        PixelBox[1](
            IndexList[1](0),
            IndexList[1](traversal.width(config.halo) - width),
            IndexList[1](1),
        ),
        ROW_BYTES // size_of[dtype](),
        config.epilogue.pixels(size_of[dtype]()),
        TensorMapSwizzle.SWIZZLE_128B,
    )
