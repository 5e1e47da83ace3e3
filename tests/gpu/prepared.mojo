"""A launch of the Hopper implicit GEMM with a configuration of one's choice, as
often as wanted: its plan, its operands, and the workspace of its visitor."""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.collections import Optional

from operations.conv.access import OutputTarget
from operations.conv.memory import CACHE_LINE, Writes
from operations.conv.problem import ConvProblem
from operations.nvidia.device import device_of
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.work import FusedWork
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.relays import MOST_RELAYS
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.sm90.gemm.legality import (
    problem_refusal,
    visitor_refusal,
)
from operations.nvidia.sm90.gemm.kernel import ConvKernel
from operations.nvidia.sm90.gemm.launch import (
    GemmOperands,
    launch_gemm,
    launch_shape,
)
from operations.nvidia.sm90.gemm.pace import Pace
from operations.nvidia.sm90.gemm.plan import GemmPlan
from operations.nvidia.sm90.gemm.split_k import split_refusal
from operations.nvidia.stream import Stream

comptime FEW_STAGES = 2
"""That loads of a launch in relays fill."""


def whole_pieces[
    in_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Sm90Config,
]() -> Bool:
    """Whether a kernel takes no pixels of other than multiples of 16 bytes, of
    any configuration: for `problem_refusal`.

    Parameters:
        in_type: Of activation and filter.
        Output: How the output is reached.
        Visitor: What is made of the values.
        config: The configuration.
    """
    return not ConvKernel[in_type, Output, Visitor, config].Epilogue.any_filters


struct Prepared[
    in_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    //,
    config: Sm90Config,
](Copyable, Movable):
    """A launch.

    Parameters:
        in_type: Of activation and filter.
        Output: How the output is reached.
        Visitor: What is made of the values.
        config: The configuration.
    """

    var problem: ConvProblem
    var operands: GemmOperands[Self.in_type, Self.Output]
    var visitor: Self.Visitor
    var plan: GemmPlan
    var workspace: Optional[DeviceBuffer[DType.float32]]

    def __init__(
        out self,
        ctx: DeviceContext,
        problem: ConvProblem,
        operands: GemmOperands[Self.in_type, Self.Output],
        visitor: Self.Visitor,
        split_k: Int = 1,
        relays: Bool = False,
    ) raises:
        """Plans, and allocates what the visitor needs.

        Args:
            ctx: The device.
            problem: The convolution, valid and with at least one output.
            operands: The pointers.
            visitor: What is fused.
            split_k: Blocks that share a tile.
            relays: Whether few clusters run the problem, in relays, with few
                loads under way, as they are where memory bounds it.

        Raises:
            Why the configuration cannot take the problem or the visitor.
        """
        comptime out_type = Self.Output.dtype
        var traversal = Traversal(problem, Self.in_type)
        var refusal = problem_refusal(
            Self.config,
            traversal,
            out_type,
            whole_pieces=whole_pieces[
                Self.in_type, Self.Output, Self.Visitor, Self.config
            ](),
        )
        if not refusal:
            refusal = visitor_refusal(visitor, Self.config, problem, out_type)
        if not refusal:
            refusal = split_refusal(Self.config, traversal, split_k)
        if refusal:
            raise Error(t"sm90: {refusal.value()}; problem {problem}")
        self.problem = problem
        self.operands = operands
        self.visitor = visitor
        self.plan = GemmPlan(
            Self.config,
            traversal,
            device_of(ctx),
            split_k=split_k,
            work=FusedWork(
                visits=not visitor.is_identity(),
                residual=visitor.reads_residual(),
                looped=False,
            ),
        )
        comptime if Self.config.keeps_pace():
            if relays:
                self.plan.blocks = Int(self.plan.geometry.clusters_n.value)
                self.plan.keep(Pace(MOST_RELAYS, FEW_STAGES), Self.config)
        self.workspace = None
        var elements = visitor.workspace_elements(
            launch_shape(Self.config, problem, self.plan)
        )
        if elements > 0:
            self.workspace = ctx.enqueue_create_buffer[DType.float32](elements)

    def launch(self, ctx: DeviceContext, overlap: Bool = True) raises:
        """Enqueues the kernel.

        Args:
            ctx: The device, or what records its launches.
            overlap: Whether blocks may start before what was enqueued last has
                ended.

        Raises:
            What the driver refused.
        """
        var stream = Stream(ctx)
        self.enqueue(stream, overlap)

    def enqueue(self, mut stream: Stream, overlap: Bool = True) raises:
        """Enqueues the kernel.

        Args:
            stream: Where.
            overlap: As for `launch`.

        Raises:
            What the driver refused.
        """
        var memory = Writes[DType.float32](unsafe_from_address=CACHE_LINE)
        if self.workspace:
            memory = (
                self.workspace.value()
                .unsafe_ptr()
                .unsafe_mut_cast[True]()
                .unsafe_origin_cast[MutUntrackedOrigin]()
            )
        stream.overlaps = overlap
        launch_gemm[Self.config](
            self.plan,
            self.problem,
            self.operands,
            self.visitor,
            stream,
            workspace=memory,
        )
