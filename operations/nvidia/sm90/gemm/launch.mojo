"""The host side of the Hopper implicit GEMM: plan, descriptors, launch."""

from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.collections import Optional
from std.sys.info import size_of
from std.utils import IndexList

from ....conv.access import OutputTarget
from ....conv.fields import (
    COPY_BYTES,
    KERNEL_SM90,
    KERNEL_UNALIGNED,
    STEM_CHANNELS,
)
from ....conv.known import UNKNOWN, KnownFilter, KnownProblem
from ....conv.memory import CACHE_LINE, Reads, Writes, element_bytes
from ....conv.operands import Arguments, Device, Operands, OperandTypes
from ....conv.problem import ConvProblem
from ....conv.kernel import kernel_name
from ....conv.search import cheapest
from ...epilogue.callbacks import EpilogueVisitor, LaunchShape
from ...epilogue.conv_visitor import ConvVisitor
from ...epilogue.params import EpilogueParams
from ...im2col.traversal import ROW_BYTES, Traversal
from ...inspect import GpuKernel, PtxWriter
from ...legality import (
    alignment_refusal,
    hopper_refusal,
    may_be_tiled,
    memory_refusal,
    precision_refusal,
    tensor_core_refusal,
)
from ...stream import LaunchGrid, Stream
from ...tma.descriptor import (
    PixelBox,
    TensorMap,
    TensorView,
    encode_im2col,
)
from ...im2col.descriptors import activation_map, filter_map, output_map
from .candidates import CANDIDATES, TABLE
from .config import Sm90Config
from .gather import GatherGeometry
from .legality import stores_any_filters
from .kernel import ConvKernel as GemmKernel
from .plan import GemmCandidates, GemmPlan, gemm_refusal, plan_gemm


comptime Gemm = GemmKernels[unaligned=False]
"""What takes pixels that are multiples of `COPY_BYTES`."""

comptime Unaligned = GemmKernels[unaligned=True]
"""What takes others. It has a library of its own, so that few compile it."""


struct GemmKernels[*, unaligned: Bool](GpuKernel):
    """The implicit GEMM on Hopper's tensor cores.

    Parameters:
        unaligned: Whether pixels of activation or output are no multiples of
            `COPY_BYTES`.
    """

    comptime code = KERNEL_UNALIGNED if Self.unaligned else KERNEL_SM90
    comptime Plan = GemmPlan
    comptime Queue = Stream

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses all but Hopper."""
        return hopper_refusal(Self.code, capability)

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses types that wgmma does not multiply, and work in front."""
        var refusal = tensor_core_refusal(Self.code, types)
        return refusal if refusal else memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether TMA may take the activation's pixels, or may not."""
        comptime if Self.unaligned:
            return may_be_unaligned(known, types)
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
        return gemm_refusal(problem, operands, device, unaligned=Self.unaligned)

    @staticmethod
    def predicted_seconds(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[Float64]:
        """The model's time of what it finds fastest, or of what was measured to
        be, if that is less: both are no slower than the model's choice."""
        if not problem.has_outputs():
            return None
        var table = GemmCandidates(
            problem, operands, device, unaligned=Self.unaligned
        )
        var least = cheapest(table).cost
        var measured = table.tuned()
        if measured:
            least = min(least, measured.value().cost)
        return least

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GemmPlan:
        """The candidate that the model finds fastest."""
        return plan_gemm(problem, operands, device, unaligned=Self.unaligned)

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
        var operands = GemmOperands(
            arguments.activation.data(),
            arguments.filter,
            rebind[Reads[Call.Output.dtype]](arguments.epilogue.residual),
            arguments.output,
        )
        var visitor = ConvVisitor[Call.bias_type, scaled].of(arguments.epilogue)
        comptime for index in range(CANDIDATES):
            comptime if TABLE[index].offered(
                types,
                narrow=known.narrow,
                unaligned=Self.unaligned,
                has_chunks=known.has_chunks,
                lacks_chunks=known.lacks_chunks,
            ):
                if plan.candidate == index:
                    launch_gemm[TABLE[index].config](
                        plan, problem, operands, visitor, queue
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every configuration."""
        comptime W = type_of(writer)
        comptime for index in range(CANDIDATES):
            comptime if TABLE[index].offered(W.types, unaligned=Self.unaligned):
                comptime config = TABLE[index].config
                comptime Kernel = GemmKernel[
                    dtype, W.Output, ConvVisitor[W.out_type], config
                ]
                comptime if config.gathers():
                    writer.write[Kernel.run_gathered](
                        String(t"{kernel_name(Self.code)}-{index}"),
                        Kernel.shared_bytes(),
                    )
                else:
                    writer.write[Kernel.run](
                        String(t"{kernel_name(Self.code)}-{index}"),
                        Kernel.shared_bytes(),
                    )


@fieldwise_init
struct GemmOperands[in_type: DType, Output: OutputTarget](
    ImplicitlyCopyable, Movable
):
    """The pointers of a launch, beside the visitor's."""

    var activation: Reads[Self.in_type]
    """`[N, *input, C]`."""
    var filter: Reads[Self.in_type]
    """`[K, *filter, C / groups]`."""
    var residual: Reads[Self.Output.dtype]
    """`[N, *output, K]`; not read unless the visitor does."""
    var output: Self.Output
    """`[N, *output, K]`; not touched if the visitor discards it."""


@always_inline
def launch_gemm[
    in_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    //,
    config: Sm90Config,
](
    plan: GemmPlan,
    problem: ConvProblem,
    operands: GemmOperands[in_type, Output],
    visitor: Visitor,
    mut queue: Stream,
    *,
    workspace: Writes[DType.float32] = Writes[DType.float32](
        unsafe_from_address=CACHE_LINE
    ),
) raises:
    """Encodes the descriptors that a configuration needs, and enqueues it.

    Parameters:
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values before they are stored.
        config: The configuration.

    Args:
        plan: Of this configuration, for the problem.
        problem: The convolution.
        operands: The pointers.
        visitor: What is fused; its operands in device memory.
        queue: Where to run.
        workspace: As many elements as `visitor.workspace_elements` says for
            `launch_shape`.

    Raises:
        What the driver refused.
    """
    comptime kernel = GemmKernel[in_type, Output, Visitor, config]
    comptime bytes = kernel.shared_bytes()
    var maps = GemmMaps[config](queue.ctx, problem, operands, visitor)
    var shape = launch_shape(config, problem, plan)
    var prepared = visitor.prepared(shape, workspace)
    var grid = LaunchGrid(
        plan.blocks,
        config.threads(),
        rows=plan.relays,
        shared_bytes=bytes,
        cluster=plan.cluster,
    )
    var params = EpilogueParams[Output, Visitor](
        problem, prepared, operands.output, operands.residual
    )
    comptime if config.gathers():
        queue.enqueue[kernel.run_gathered, max_shared_bytes=bytes](
            grid,
            operands.activation,
            operands.filter,
            maps.residual,
            params,
            plan.geometry,
            GatherGeometry.of(Traversal(problem, in_type)),
        )
    else:
        queue.enqueue[kernel.run, max_shared_bytes=bytes](
            grid,
            maps.activation,
            maps.filter,
            maps.output,
            maps.residual,
            params,
            plan.geometry,
        )
    prepared.conclude(queue, shape)


def may_be_unaligned(known: KnownProblem, types: OperandTypes) -> Bool:
    """Whether there may be one group of more than few channels whose pixels TMA
    does not take, and products that may be rounded to tf32.

    Args:
        known: What is known of the problem.
        types: Of the operands.
    """
    var bytes = element_bytes(types.output)
    var channels = known.channels * element_bytes(types.input)
    var whole = known.filters > UNKNOWN and (
        known.filters * bytes % COPY_BYTES == 0
    )
    return (
        not (types.input == DType.float32 and known.exact)
        and known.may_have_one_group()
        and not UNKNOWN < known.channels <= STEM_CHANNELS
        and not (
            whole and known.channels > UNKNOWN and channels % COPY_BYTES == 0
        )
        and (
            stores_any_filters(types)
            or known.may_be_multiple(known.filters, bytes, COPY_BYTES)
        )
    )


def launch_shape(
    config: Sm90Config, problem: ConvProblem, plan: GemmPlan
) -> LaunchShape:
    """A launch as a visitor's host side sees it.

    Args:
        config: The configuration.
        problem: The convolution.
        plan: Of this configuration, for the problem.
    """
    var blocks = plan.blocks * plan.relays
    return LaunchShape(problem, blocks * config.consumers)


struct GemmMaps[config: Sm90Config]:
    """The descriptors of a launch; empty where threads load or store, or nobody
    does."""

    var activation: TensorMap
    var filter: TensorMap
    var output: TensorMap
    var residual: TensorMap

    @always_inline
    def __init__[
        in_type: DType, Output: OutputTarget, Visitor: EpilogueVisitor
    ](
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        operands: GemmOperands[in_type, Output],
        visitor: Visitor,
    ) raises:
        """Encodes them.

        Parameters:
            in_type: Of activation and filter.
            Output: How the output is reached.
            Visitor: What is made of the values.

        Args:
            ctx: The device.
            problem: The convolution.
            operands: The pointers.
            visitor: What is fused.

        Raises:
            What the driver refused.
        """
        comptime out_type = Output.dtype
        var traversal = Traversal(problem, in_type)
        var channels = traversal.slice_channels()
        self.activation = TensorMap()
        self.filter = TensorMap()
        self.output = TensorMap()
        self.residual = TensorMap()
        comptime if not Self.config.gathers():
            self.activation = activation_map(
                ctx,
                traversal,
                operands.activation,
                Self.config.act_tile_dim0(),
                channels,
                Self.config.halo,
            )
            self.filter = filter_map(
                ctx,
                problem,
                operands.filter,
                Self.config.filter_tile_dim0(),
                channels,
            )
        comptime if (Self.config.epilogue.tma_store and not Visitor.discards):
            self.output = output_map(
                ctx,
                problem,
                operands.output.data().as_imm(),
                Self.config.epilogue.pixels(size_of[out_type]()),
                ROW_BYTES // size_of[out_type](),
                TensorMapSwizzle.SWIZZLE_128B,
                group_filters=Self.config.group_filters(
                    problem.group_filters()
                ),
            )
        if visitor.reads_residual() and not traversal.output_refusal(
            size_of[out_type]()
        ):
            self.residual = _residual_map[out_type, Self.config](
                ctx, traversal, operands.residual
            )


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
