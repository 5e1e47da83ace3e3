"""The host side of the Blackwell implicit GEMM: plan, descriptors, launch; one
launcher for all of the kernel's entry points."""

from max.gpu.host import DeviceContext
from std.collections import Optional

from ...conv.access import OutputTarget
from ...conv.fields import KERNEL_SM100
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.search import refusal_of_all
from ..epilogue.callbacks import EpilogueVisitor
from ..epilogue.conv_visitor import ConvVisitor
from ..epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
)
from ..epilogue.params import EpilogueParams
from ..inspect import GpuKernel, PtxWriter
from ..legality import (
    alignment_refusal,
    blackwell_refusal,
    may_be_tiled,
    memory_refusal,
    precision_refusal,
    tensor_core_refusal,
)
from ..stream import LaunchGrid, Stream
from ..tma.descriptor import TensorMap
from ..im2col.descriptors import activation_map, filter_map, output_map
from .candidates import candidates
from .config import Conv2dConfig, GemmTypes
from .layout import launch_shape, visitor_refusal
from .kernel import NUM_THREADS, Conv2dFpropKernel
from .plan import GemmCandidates, GemmPlan, plan_gemm


struct Gemm(GpuKernel):
    """The implicit GEMM on Blackwell's tensor cores."""

    comptime code = KERNEL_SM100
    comptime Plan = GemmPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses all but Blackwell."""
        return blackwell_refusal(Self.code, capability)

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses types that tcgen05 does not multiply, and work in front."""
        var refusal = tensor_core_refusal(Self.code, types)
        return refusal if refusal else memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether TMA may take the pixels."""
        return may_be_tiled(known, types)

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses what no candidate takes."""
        var refusal = precision_refusal(Self.code, operands)
        if not refusal:
            refusal = alignment_refusal(Self.code, operands)
        if refusal or not problem.has_outputs():
            return refusal
        return refusal_of_all(GemmCandidates(problem, operands, device))

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GemmPlan:
        """The candidate that the model finds fastest."""
        return plan_gemm(problem, operands, device)

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: GemmPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Encodes the descriptors and enqueues the plan's candidate."""
        comptime Call = type_of(arguments)
        comptime assert Call.residual_type == Call.Output.dtype
        comptime types = type_of(arguments).types(scaled)
        comptime table = candidates(GemmTypes.of(types))
        comptime for index in range(len(table)):
            comptime if table[index].offered(types):
                if plan.candidate == index:
                    # Stores of one pixel's neighbouring filters lie side by
                    # side only after shared memory.
                    launch_gemm[
                        table[index].config,
                        register_based_epilogue=not Call.Output.stores,
                    ](
                        plan,
                        problem,
                        GemmOperands(
                            arguments.activation.data(),
                            arguments.filter,
                            rebind[Reads[Call.Output.dtype]](
                                arguments.epilogue.residual
                            ),
                            arguments.output,
                        ),
                        ConvVisitor[Call.bias_type, scaled].of(
                            arguments.epilogue
                        ),
                        queue,
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every configuration, and with a residual the defaults."""
        comptime W = type_of(writer)
        comptime table = candidates(GemmTypes.of(W.types))
        comptime for index in range(len(table)):
            comptime config = table[index].config
            comptime Kernel = Conv2dFpropKernel[
                W.Output, ConvVisitor[W.out_type], config
            ]
            comptime bytes = config.shared_bytes()
            writer.write[Kernel.run](String(t"sm100-{index}"), bytes)
            comptime if index < 2:
                writer.write[Kernel.run_with_residual](
                    String(t"sm100-{index}-residual"), bytes
                )


@fieldwise_init
struct GemmOperands[act_type: DType, filter_type: DType, Output: OutputTarget](
    ImplicitlyCopyable, Movable
):
    """The pointers of a launch, beside the visitor's.

    Parameters:
        act_type: Of the activation, as `GemmTypes` has it.
        filter_type: Of the filter.
        Output: The output, and what the graph compiler fused behind it.
    """

    var activation: Reads[Self.act_type]
    """`[N, *input, C]`."""
    var filter: Reads[Self.filter_type]
    """`[K, *filter, C / groups]`."""
    var residual: Reads[Self.Output.dtype]
    """`[N, *output, K]`; not read unless the visitor does."""
    var output: Self.Output
    """`[N, *output, K]`; left as it is if `elementwise_lambda_fn` is given, or
    the visitor discards it."""


@always_inline
def launch_gemm[
    act_type: DType,
    filter_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    //,
    config: Conv2dConfig,
    *,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
    register_based_epilogue: Bool = True,
](
    plan: GemmPlan,
    problem: ConvProblem,
    operands: GemmOperands[act_type, filter_type, Output],
    visitor: Visitor,
    mut queue: Stream,
    *,
    workspace: Writes[DType.float32] = Writes[DType.float32](
        unsafe_from_address=CACHE_LINE
    ),
) raises:
    """Encodes the descriptors and enqueues a configuration.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are rounded.
        config: The configuration.
        elementwise_lambda_fn: Stores values, instead of the kernel.
        elementwise_compute_lambda_fn: Changes values before they are stored.
        register_based_epilogue: Whether what is fused behind is computed in
            registers, or after shared memory.

    Args:
        plan: Of this configuration, for the problem.
        problem: The convolution.
        operands: The pointers.
        visitor: What is fused; its operands in device memory.
        queue: Where to run.
        workspace: As many elements as `visitor.workspace_elements` says for
            `launch_shape`.

    Raises:
        Why the epilogue's operands cannot be taken, or what the driver refused.
    """
    comptime Kernel = Conv2dFpropKernel[
        Output,
        Visitor,
        config,
        elementwise_lambda_fn=elementwise_lambda_fn,
        elementwise_compute_lambda_fn=elementwise_compute_lambda_fn,
        register_based_epilogue=register_based_epilogue,
    ]
    comptime bytes = Kernel.shared_bytes()
    comptime size = config.cluster_size()
    var refusal = visitor_refusal(visitor, config, problem)
    if refusal:
        raise Error(t"sm100: {refusal.value()}; problem {problem}")
    var maps = GemmMaps[config](
        queue.ctx,
        problem,
        operands,
        stores_output=not (Kernel.Work.stores or Visitor.discards),
        adds_residual=visitor.reads_residual(),
    )
    var shape = launch_shape(config, problem)
    var prepared = visitor.prepared(shape, workspace)
    var params = EpilogueParams[Output, Visitor](
        problem, prepared, operands.output
    )
    var grid = LaunchGrid(
        plan.blocks,
        NUM_THREADS,
        shared_bytes=bytes,
        cluster=size,
    )
    comptime if Visitor.adds_residual:
        if visitor.reads_residual():
            queue.enqueue[Kernel.run_with_residual, max_shared_bytes=bytes](
                grid,
                maps.activation,
                maps.filter,
                maps.output,
                maps.residual,
                params,
                plan.geometry,
            )
    if not visitor.reads_residual():
        queue.enqueue[Kernel.run, max_shared_bytes=bytes](
            grid,
            maps.activation,
            maps.filter,
            maps.output,
            params,
            plan.geometry,
        )
    prepared.conclude(queue, shape)


struct GemmMaps[config: Conv2dConfig]:
    """The descriptors of a launch."""

    var activation: TensorMap
    var filter: TensorMap
    var output: TensorMap
    """The filter's unless the kernel stores the output."""
    var residual: TensorMap
    """The output's unless a residual is added."""

    def __init__[
        act_type: DType, filter_type: DType, Output: OutputTarget, //
    ](
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        operands: GemmOperands[act_type, filter_type, Output],
        *,
        stores_output: Bool,
        adds_residual: Bool,
    ) raises:
        """Encodes them.

        Args:
            ctx: The device.
            problem: The convolution.
            operands: The pointers.
            stores_output: Whether the kernel stores the output.
            adds_residual: Whether a residual is read.

        Raises:
            What the driver refused.
        """
        comptime channels = Self.config.block_tile_shape[2]
        self.activation = activation_map(
            ctx,
            Self.config.traversal(problem),
            operands.activation,
            Self.config.act_tile_dim0(),
            channels,
            0,
        )
        self.filter = filter_map(
            ctx,
            problem,
            operands.filter,
            Self.config.filter_tile_dim0(),
            channels,
        )
        self.output = self.filter
        if stores_output:
            self.output = Self._matrix_map(
                ctx, problem, operands.output.data().as_imm()
            )
        self.residual = self.output
        if adds_residual:
            self.residual = Self._matrix_map(ctx, problem, operands.residual)

    @staticmethod
    def _matrix_map[
        dtype: DType
    ](
        ctx: DeviceContext, problem: ConvProblem, data: Reads[dtype]
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
            group_filters=problem.group_filters(),
        )
