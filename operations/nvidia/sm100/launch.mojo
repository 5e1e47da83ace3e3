"""Runs the Blackwell kernel: checks, descriptors, grid, launch; one launcher
for all of its entry points."""

from max.gpu.host import DeviceContext, Dim, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.collections import Optional
from std.sys.info import size_of

from ...conv.access import OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.problem import ConvProblem
from ..epilogue.callbacks import EpilogueVisitor, LaunchShape
from ..epilogue.conv_visitor import ConvVisitor
from ..epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
)
from ..epilogue.params import EpilogueParams
from ..im2col.tiles import TileGeometry
from ..im2col.traversal import ROW_BYTES, Traversal
from ..tma.descriptor import TensorMap
from ..tma.operands import activation_map, filter_map, output_map
from .config import Conv2dConfig
from .kernel import NUM_THREADS, Conv2dFpropKernel


struct LaunchPlan[
    act_type: DType,
    filter_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Conv2dConfig[act_type, filter_type, Output.dtype],
    *,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
    register_based_epilogue: Bool = True,
](ImplicitlyCopyable, Movable):
    """What a launch passes to the kernel.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are rounded.
        config: The configuration.
        elementwise_lambda_fn: As in `Conv2dFpropKernel`.
        elementwise_compute_lambda_fn: As in `Conv2dFpropKernel`.
        register_based_epilogue: As in `Conv2dFpropKernel`.
    """

    comptime out_type = Self.Output.dtype
    comptime Kernel = Conv2dFpropKernel[
        Self.act_type,
        Self.filter_type,
        Self.Output,
        Self.Visitor,
        Self.config,
        elementwise_lambda_fn=Self.elementwise_lambda_fn,
        elementwise_compute_lambda_fn=Self.elementwise_compute_lambda_fn,
        register_based_epilogue=Self.register_based_epilogue,
    ]

    var activation: TensorMap
    var filter: TensorMap
    var output: TensorMap
    """Not to be used if what is fused behind stores."""
    var residual: TensorMap
    """Not to be used unless `adds_residual`."""
    var adds_residual: Bool
    var params: EpilogueParams[Self.Output, Self.Visitor]
    var shape: LaunchShape
    var geometry: TileGeometry
    var blocks: Int

    def __init__(
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        activation: Reads[Self.act_type],
        filter: Reads[Self.filter_type],
        residual: Reads[Self.out_type],
        visitor: Self.Visitor,
        output: Self.Output,
        workspace: Writes[DType.float32] = Writes[DType.float32](
            unsafe_from_address=CACHE_LINE
        ),
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
            output: `[N, *output, K]`, its elements in device memory; left as
                they are if `elementwise_lambda_fn` is given, or the visitor
                discards it.
            workspace: The visitor's `workspace_elements` in device memory.

        Raises:
            Why the configuration cannot take the problem, or what the driver
            refused.
        """
        self.adds_residual = visitor.reads_residual()
        self.shape = Self.config.launch_shape(problem)
        self.params = EpilogueParams[Self.Output, Self.Visitor](
            problem, visitor.prepared(self.shape, workspace), output
        )
        var refusal = Self.config.can_implement(problem)
        if not refusal:
            refusal = Self.config.visitor_refusal(visitor, problem)
        if refusal:
            raise Error(t"sm100: {refusal.value()}; problem {problem}")
        var traversal = Traversal(problem)
        self.activation = activation_map(
            ctx,
            traversal,
            activation,
            Self.config.act_tile_dim0(),
            ROW_BYTES // size_of[Self.act_type](),
            0,
        )
        self.filter = filter_map(
            ctx,
            problem,
            filter,
            Self.config.filter_tile_dim0(),
            ROW_BYTES // size_of[Self.filter_type](),
        )
        self.output = self.filter
        comptime if not (Self.Kernel.Work.stores or Self.Visitor.discards):
            self.output = Self._matrix_map(ctx, problem, output.data().as_imm())
        self.residual = self.output
        if self.adds_residual:
            self.residual = Self._matrix_map(ctx, problem, residual)
        self.geometry = Self.config.geometry(traversal)
        self.blocks = Self.config.blocks(traversal)

    @staticmethod
    def _matrix_map(
        ctx: DeviceContext, problem: ConvProblem, data: Reads[Self.out_type]
    ) raises -> TensorMap:
        """The output, or the residual, in sub-tiles."""
        comptime swizzle = Self.config.output_swizzle()
        return output_map(
            ctx,
            problem,
            data,
            Self.config.output_tile_shape[0],
            Self.config.output_tile_shape[1],
            swizzle,
        )

    @always_inline
    def launch(self, ctx: DeviceContext, overlap: Bool = True) raises:
        """Enqueues the kernel.

        Args:
            ctx: The device; nothing is waited for.
            overlap: Whether blocks may start, and wait, before what was
                enqueued last has ended.

        Raises:
            What the driver refused.
        """
        comptime bytes = Self.Kernel.shared_bytes()
        comptime size = Self.config.cluster_size()
        var cluster: Optional[Dim] = None
        comptime if size > 1:
            cluster = Dim(size)
        var shared = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(bytes))
        var level = PDLLevel.ON if overlap else PDLLevel.OFF
        comptime if Self.Visitor.adds_residual:
            if self.adds_residual:
                ctx.enqueue_function[Self.Kernel.run_with_residual](
                    self.activation,
                    self.filter,
                    self.output,
                    self.residual,
                    self.params,
                    self.geometry,
                    grid_dim=self.blocks,
                    block_dim=NUM_THREADS,
                    cluster_dim=cluster,
                    shared_mem_bytes=bytes,
                    func_attribute=shared,
                    attributes=pdl_launch_attributes(level),
                )
        if not self.adds_residual:
            ctx.enqueue_function[Self.Kernel.run](
                self.activation,
                self.filter,
                self.output,
                self.params,
                self.geometry,
                grid_dim=self.blocks,
                block_dim=NUM_THREADS,
                cluster_dim=cluster,
                shared_mem_bytes=bytes,
                func_attribute=shared,
                attributes=pdl_launch_attributes(level),
            )
        self.params.visitor.conclude(ctx, self.shape)


def convolve[
    act_type: DType,
    filter_type: DType,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    config: Conv2dConfig[act_type, filter_type, Output.dtype],
    *,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
    register_based_epilogue: Bool = True,
    scaled: Bool = False,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Reads[act_type],
    filter: Reads[filter_type],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
) raises:
    """Enqueues a convolution on a configuration; one without outputs is done.

    Parameters:
        act_type: Of the activation: bfloat16, float16, float8_e4m3fn,
            float8_e5m2, int8, uint8, or float32, of which the products take
            the 19 bits of tf32.
        filter_type: Of the filter: the activation's, or the other float8.
        Output: The output, of bfloat16, float16 or float32, and what the graph
            compiler fused behind it.
        bias_type: Of the bias.
        residual_type: Of the residual: the output's.
        config: The configuration.
        elementwise_lambda_fn: As in `Conv2dFpropKernel`.
        elementwise_compute_lambda_fn: As in `Conv2dFpropKernel`.
        register_based_epilogue: As in `Conv2dFpropKernel`.
        scaled: Whether each filter has a scale.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid.
        activation: `[N, *input, C]` in device memory.
        filter: `[K, *filter, C / groups]` in device memory.
        epilogue: What is fused; its operands in device memory.
        output: `[N, *output, K]`, its elements in device memory; left as they
            are if `elementwise_lambda_fn` is given.

    Raises:
        Why the configuration cannot take the problem, or what the driver
        refused.
    """
    comptime assert residual_type == Output.dtype
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    LaunchPlan[
        act_type,
        filter_type,
        Output,
        ConvVisitor[bias_type, scaled],
        config,
        elementwise_lambda_fn=elementwise_lambda_fn,
        elementwise_compute_lambda_fn=elementwise_compute_lambda_fn,
        register_based_epilogue=register_based_epilogue,
    ](
        ctx,
        problem,
        activation,
        filter,
        rebind[Reads[Output.dtype]](epilogue.residual),
        ConvVisitor[bias_type, scaled].of(epilogue),
        output,
    ).launch(
        ctx
    )
