"""Runs the Hopper kernel with an epilogue of one's own, composed of visitors.

A convolution in training, whose output is normalized over the batch: the values
in front of the normalization, and each channel's sum and sum of squares, in one
kernel (and a small one behind it):

    from operations.conv.access import MemoryOutput
    from operations.nvidia.sm90.gemm.epilogue_steps import ChannelBias, Rounded
    from operations.nvidia.sm90.gemm.epilogue_sums import sum_channels
    from operations.nvidia.sm90.gemm.visit import convolve_visited

    var visitor = (
        ChannelBias(bias)
        .then(Rounded[DType.bfloat16]())
        .then(sum_channels(sums, squares))
    )
    convolve_visited(
        ctx, problem, activation, filter, visitor, MemoryOutput(output)
    )

With `.then(Discard())` behind it only the sums are kept, and with
`.then(AuxiliaryOutput[DType.bfloat16](MemoryOutput(before)))` in front of an
`Activate` the backward pass gets what it needs beside what the next layer does.
"""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.collections import Optional

from ....conv.access import OutputTarget
from ....conv.memory import CACHE_LINE, Reads
from ....conv.problem import ConvProblem
from .candidates import CANDIDATES, candidate, offered, offered_fused
from ...limits import MAX_SHARED_BYTES
from .config import Sm90Config, can_implement
from .epilogue_callbacks import EpilogueVisitor
from .epilogue_params import layout_of, visitor_refusal
from .launch import LaunchPlan
from .model import FusedWork, predicted_seconds

comptime MIN_STAGES = 2
"""Of a ring: one is filled while another is multiplied."""


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
            if result.num_filter_pipeline_stages == MIN_STAGES:
                return config
            result.num_filter_pipeline_stages -= 1
        else:
            if result.num_act_pipeline_stages == MIN_STAGES:
                return config
            result.num_act_pipeline_stages -= 1
    return result


def visited_candidate[
    Visitor: EpilogueVisitor, out_type: DType
](index: Int) -> Sm90Config:
    """A candidate with room for a visitor.

    Parameters:
        Visitor: Of the visitor.
        out_type: Of the output.

    Args:
        index: Of the candidate.
    """
    var config = candidate(index)
    return with_room(
        config,
        config.consumers * Visitor.shared_bytes(layout_of[out_type](config)),
    )


def choose_visited[
    Visitor: EpilogueVisitor, //, in_type: DType, out_type: DType
](problem: ConvProblem, visitor: Visitor, multiprocessors: Int) raises -> Int:
    """The candidate that the model finds fastest among those that can take a
    problem with a visitor.

    Parameters:
        Visitor: Of the visitor.
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        problem: The convolution, valid and with at least one output.
        visitor: The visitor.
        multiprocessors: Of the device.

    Returns:
        The candidate's index.

    Raises:
        Why none can.
    """
    var best = -1
    var fastest = Float64(0)
    var reason = String()
    var work = FusedWork(
        visits=True, residual=visitor.reads_residual(), looped=False
    )
    for index in range(CANDIDATES):
        if not (offered[in_type, out_type](index) and offered_fused(index)):
            continue
        var config = visited_candidate[Visitor, out_type](index)
        var refusal = can_implement[in_type, out_type](config, problem)
        if not refusal:
            refusal = visitor_refusal[out_type](visitor, config, problem)
        if refusal:
            reason = refusal.value()
            continue
        var seconds = predicted_seconds[in_type, out_type](
            config, problem, multiprocessors, 1, work
        )
        if best < 0 or seconds < fastest:
            best = index
            fastest = seconds
    if best < 0:
        raise Error(t"sm90: {reason}; problem {problem}")
    return best


def convolve_visited[
    in_type: DType, Output: OutputTarget, Visitor: EpilogueVisitor, //
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Reads[in_type],
    filter: Reads[in_type],
    visitor: Visitor,
    output: Output,
    residual: Reads[Output.dtype] = Reads[Output.dtype](
        unsafe_from_address=CACHE_LINE
    ),
) raises:
    """Enqueues a convolution with an epilogue of visitors, on the fastest
    configuration that has room for them.

    Parameters:
        in_type: As in `dispatch.convolve`.
        Output: As in `dispatch.convolve`.
        Visitor: Of the visitor.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        activation: `[N, *input, C]` in device memory.
        filter: `[K, *filter, C / groups]` in device memory.
        visitor: What happens to the values; its operands in device memory.
        output: `[N, *output, K]`, its elements in device memory; not touched
            if the visitor discards it.
        residual: `[N, *output, K]` in device memory, if the visitor reads it.

    Raises:
        Why no configuration can take problem and visitor, or what the driver
        refused.
    """
    var index = choose_visited[in_type, Output.dtype](
        problem,
        visitor,
        ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    comptime for i in range(CANDIDATES):
        comptime if offered[in_type, Output.dtype](i) and offered_fused(i):
            if index == i:
                comptime config = visited_candidate[Visitor, Output.dtype](i)
                LaunchPlan[in_type, Output, Visitor, config](
                    ctx, problem, activation, filter, residual, visitor, output
                ).launch(ctx)
