"""Runs the Hopper kernel with an epilogue of one's own, composed of visitors.

A convolution in training, whose output is normalized over the batch: the values
in front of the normalization, and each channel's sum and sum of squares, in one
kernel (and a small one behind it):

    from operations.conv.access import MemoryOutput
    from operations.nvidia.epilogue.steps import ChannelBias, Rounded
    from operations.nvidia.epilogue.sums import sum_channels
    from operations.nvidia.sm90.gemm.launch import GemmOperands
    from operations.nvidia.sm90.gemm.visit import convolve_visited

    var visitor = (
        ChannelBias(bias)
        .then(Rounded[DType.bfloat16]())
        .then(sum_channels(sums, squares))
    )
    convolve_visited(
        ctx,
        problem,
        GemmOperands(activation, filter, no_residual, MemoryOutput(output)),
        visitor,
    )

`convolve_visited` plans and allocates in every call; `plan_visited`,
`visitor_workspace` and `launch_visited` are its steps, of which a loop repeats
the last alone, on any stream.

With `.then(Discard())` behind it only the sums are kept, and with
`.then(AuxiliaryOutput[DType.bfloat16](MemoryOutput(before)))` in front of an
`Activate` the backward pass gets what it needs beside what the next layer does.
"""

from max.gpu.host import DeviceContext

from ....conv.access import OutputTarget
from ....conv.memory import Writes
from ....conv.operands import Device
from ....conv.problem import ConvProblem
from ....conv.search import cheapest
from ...device import device_of
from ...epilogue.callbacks import EpilogueVisitor
from ...epilogue.work import visited_operands, visited_types
from ...limits import MAX_SHARED_BYTES
from ...stream import Stream
from .candidates import CANDIDATES, TABLE, candidate
from .config import Sm90Config
from .legality import layout_of, visitor_refusal
from .launch import GemmOperands, launch_gemm, launch_shape
from .plan import GemmCandidates, GemmPlan


def with_room(config: Sm90Config, bytes: Int) -> Sm90Config:
    """A configuration with as many stages less as leave a block some shared
    memory; if there are none left to drop, `visitor_refusal` will say so.

    Args:
        config: The configuration.
        bytes: Of the block, for visitors.
    """
    var result = config
    while result.shared_bytes() + bytes > MAX_SHARED_BYTES:
        var more_filters = (
            result.num_filter_pipeline_stages >= result.num_act_pipeline_stages
        )
        # A stationary filter's ring holds all of it.
        if more_filters and not result.stationary:
            result.num_filter_pipeline_stages -= 1
        else:
            result.num_act_pipeline_stages -= 1
        if result.refusal():
            return config
    return result


def visited_config[
    Visitor: EpilogueVisitor
](index: Int, out_type: DType) -> Sm90Config:
    """A candidate's configuration, with room for a visitor."""
    var config = candidate(index)
    return with_room(
        config,
        config.consumers * Visitor.shared_bytes(layout_of(config, out_type)),
    )


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
    table.ways = 1
    table.types.fused_output = False
    for i in range(len(table.rows)):
        var config = visited_config[Visitor](table.rows[i], out_type)
        table.offered[i].config = config
        table.refusals[i] = visitor_refusal(visitor, config, problem, out_type)
    return table.plan(cheapest(table))


def visitor_workspace[
    Visitor: EpilogueVisitor, //, out_type: DType
](plan: GemmPlan, problem: ConvProblem, visitor: Visitor) -> Int:
    """Float32 values of device memory that a launch needs beside its operands.

    Args:
        plan: What `plan_visited` returned.
        problem: The convolution.
        visitor: The visitor.
    """
    var config = visited_config[Visitor](plan.candidate, out_type)
    return visitor.workspace_elements(launch_shape(config, problem, plan))


def launch_visited[
    in_type: DType, Output: OutputTarget, Visitor: EpilogueVisitor, //
](
    plan: GemmPlan,
    problem: ConvProblem,
    operands: GemmOperands[in_type, Output],
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
        workspace: As many values as `visitor_workspace` says; of a visitor that
            needs none, any address.

    Raises:
        What the driver refused.
    """
    comptime types = visited_types(in_type, Output.dtype)
    comptime for index in range(CANDIDATES):
        comptime if TABLE[index].offered(types):
            if plan.candidate == index:
                comptime config = visited_config[Visitor](index, Output.dtype)
                launch_gemm[config](
                    plan,
                    problem,
                    operands,
                    visitor,
                    stream,
                    workspace=workspace,
                )


def convolve_visited[
    in_type: DType, Output: OutputTarget, Visitor: EpilogueVisitor, //
](
    ctx: DeviceContext,
    problem: ConvProblem,
    operands: GemmOperands[in_type, Output],
    visitor: Visitor,
) raises:
    """Plans and enqueues a convolution with an epilogue of visitors, with a
    workspace of its own.

    Parameters:
        in_type: Of activation and filter.
        Output: The output, and what the graph compiler fused behind it.
        Visitor: Of the visitor.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        operands: The pointers.
        visitor: What happens to the values; its operands in device memory.

    Raises:
        Why no candidate can take problem and visitor, or what the driver
        refused.
    """
    comptime out_type = Output.dtype
    var plan = plan_visited[in_type, out_type](problem, visitor, device_of(ctx))
    var elements = visitor_workspace[out_type](plan, problem, visitor)
    var buffer = ctx.enqueue_create_buffer[DType.float32](max(1, elements))
    var stream = Stream(ctx)
    launch_visited(
        plan,
        problem,
        operands,
        visitor,
        stream,
        buffer.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin](),
    )
    # Freed in the stream's order, behind the kernels.
    _ = buffer^
