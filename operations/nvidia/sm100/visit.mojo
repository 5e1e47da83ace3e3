"""Runs the Blackwell kernel with an epilogue of one's own, composed of visitors:
`plan_visited`, a workspace of `visitor_workspace` elements, and
`launch_visited`. An example is in `sm90.gemm.visit`."""

from std.collections import Optional

from ...conv.access import OutputTarget
from ...conv.memory import Writes
from ...conv.operands import Device, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.search import Candidates, cheapest
from ..epilogue.callbacks import EpilogueVisitor
from ..epilogue.work import visited_operands, visited_types
from ..limits import MAX_SHARED_BYTES
from ..stream import Stream
from .candidates import CANDIDATES, candidate, candidates
from .config import Conv2dConfig, GemmTypes
from .launch import GemmOperands, launch_gemm
from .layout import launch_shape, layout_of, visitor_refusal
from .plan import GemmCandidates, GemmPlan


def with_room(config: Conv2dConfig, bytes: Int) -> Conv2dConfig:
    """A configuration with as many stages less as leave a block some shared
    memory; if there are none left to drop, `visitor_refusal` will say so.

    Args:
        config: The configuration.
        bytes: Of the block, for visitors.
    """
    var result = config
    while result.shared_bytes() + bytes > MAX_SHARED_BYTES:
        result.num_pipeline_stages -= result.k_group_size
        if result.num_group_pipeline_stages() < 2:
            return config
    return result


def visited_config[
    Visitor: EpilogueVisitor
](types: GemmTypes, index: Int) -> Conv2dConfig:
    """A candidate's configuration, with room for a visitor.

    Parameters:
        Visitor: Of the visitor.

    Args:
        types: Of the operands.
        index: Of the candidate.
    """
    var config = candidate(types, index)
    return with_room(config, Visitor.shared_bytes(layout_of(config)))


struct VisitedCandidates[Visitor: EpilogueVisitor](Candidates):
    """The candidates of the implicit GEMM, each with room for a visitor.

    Parameters:
        Visitor: Of the visitor.
    """

    var base: GemmCandidates
    var visitor: Self.Visitor

    def __init__(
        out self,
        problem: ConvProblem,
        visitor: Self.Visitor,
        types: OperandTypes,
        device: Device,
    ):
        """The rows of the table that visitors are compiled with.

        Args:
            problem: The convolution.
            visitor: The visitor.
            types: `visited_types`.
            device: The device.
        """
        self.base = GemmCandidates(
            problem, visited_operands(visitor, types), device
        )
        for row in self.base.rows:
            self.base.table[row].config = visited_config[Self.Visitor](
                GemmTypes.of(types), row
            )
        self.visitor = visitor

    def count(self) -> Int:
        """The number of rows."""
        return self.base.count()

    def refusal(self, index: Int) -> Optional[String]:
        """Why a candidate cannot run the problem with the visitor.

        Args:
            index: Of the candidate.
        """
        var refusal = self.base.refusal(index)
        if refusal:
            return refusal
        return visitor_refusal(
            self.visitor,
            self.base.table[self.base.rows[index]].config,
            self.base.problem,
        )

    def cost(self, index: Int) -> Float64:
        """The model's time, in seconds.

        Args:
            index: Of a candidate that does not refuse.
        """
        return self.base.cost(index)


def plan_visited[
    Visitor: EpilogueVisitor, //, in_type: DType, out_type: DType
](problem: ConvProblem, visitor: Visitor, device: Device) raises -> GemmPlan:
    """The candidate that the model finds fastest among those that can take a
    problem with a visitor.

    Parameters:
        Visitor: Of the visitor.
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        problem: The convolution, valid and with at least one output.
        visitor: The visitor.
        device: The device.

    Returns:
        The plan.

    Raises:
        Why no candidate can.
    """
    var table = VisitedCandidates[Visitor](
        problem, visitor, visited_types(in_type, out_type), device
    )
    return table.base.plan(cheapest(table))


def visitor_workspace[
    Visitor: EpilogueVisitor, //
](plan: GemmPlan, problem: ConvProblem, visitor: Visitor) -> Int:
    """Elements of float32 in device memory that a launch needs beside its
    operands.

    Parameters:
        Visitor: Of the visitor.

    Args:
        plan: What `plan_visited` returned.
        problem: The convolution.
        visitor: The visitor.
    """
    return visitor.workspace_elements(launch_shape(plan.config, problem))


def launch_visited[
    in_type: DType, Output: OutputTarget, Visitor: EpilogueVisitor, //
](
    plan: GemmPlan,
    problem: ConvProblem,
    operands: GemmOperands[in_type, in_type, Output],
    visitor: Visitor,
    mut stream: Stream,
    workspace: Writes[DType.float32],
) raises:
    """Enqueues a convolution with an epilogue of visitors.

    Parameters:
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: Of the visitor.

    Args:
        plan: What `plan_visited` returned.
        problem: The convolution.
        operands: The pointers.
        visitor: What happens to the values; its operands in device memory.
        stream: Where to run.
        workspace: As many elements as `visitor_workspace` says; of a visitor
            that needs none, any address.

    Raises:
        What the driver refused.
    """
    comptime types = visited_types(in_type, Output.dtype)
    comptime gemm_types = GemmTypes.of(types)
    comptime table = candidates(gemm_types)
    comptime for index in range(CANDIDATES):
        comptime if table[index].offered(types):
            if plan.candidate == index:
                comptime config = visited_config[Visitor](gemm_types, index)
                launch_gemm[config, register_based_epilogue=not Output.stores](
                    plan,
                    problem,
                    operands,
                    visitor,
                    stream,
                    workspace=workspace,
                )
