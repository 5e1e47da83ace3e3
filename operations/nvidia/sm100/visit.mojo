"""Runs the Blackwell kernel with an epilogue of one's own, composed of visitors:
`plan_visited`, a workspace of `visitor_workspace` elements, and
`launch_visited`. An example is in `sm90.gemm.visit`."""

from ...conv.access import OutputTarget
from ...conv.memory import Writes
from ...conv.operands import Device
from ...conv.problem import ConvProblem
from ...conv.search import cheapest
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
    """A candidate's configuration, with room for a visitor."""
    var config = candidate(types, index)
    return with_room(config, Visitor.shared_bytes(layout_of(config)))


def plan_visited[
    Visitor: EpilogueVisitor, //, in_type: DType, out_type: DType
](problem: ConvProblem, visitor: Visitor, device: Device) raises -> GemmPlan:
    """The candidate that the model finds fastest among those that can take a
    problem with a visitor.

    Args:
        problem: The convolution, valid and with at least one output.
        visitor: The visitor.
        device: The device.

    Returns:
        The plan.

    Raises:
        Why no candidate can.
    """
    var types = visited_types(in_type, out_type)
    var table = GemmCandidates(
        problem, visited_operands(visitor, types), device
    )
    for row in table.rows:
        var config = visited_config[Visitor](GemmTypes.of(types), row)
        table.table[row].config = config
        table.refusals[row] = visitor_refusal(visitor, config, problem)
    return table.plan(cheapest(table))


def visitor_workspace[
    Visitor: EpilogueVisitor, //
](plan: GemmPlan, problem: ConvProblem, visitor: Visitor) -> Int:
    """Elements of float32 in device memory that a launch needs beside its
    operands.

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
