"""Runs the GPU's depthwise kernels: configuration, grid, launch."""

from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from std.collections import Optional
from std.math import ceildiv

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.known import UNKNOWN_FILTER, KnownFilter
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from ..sm90.diagonal.launch import convolve as convolve_diagonal
from ..sm90.diagonal.launch import explain_diagonal, has_diagonal_types
from ..sm90.diagonal.plan import choose_diagonal
from ..config import is_hopper
from ..limits import MAX_INDEX
from .depthwise import DepthwiseKernel
from .depthwise_geometry import (
    DEPTHWISE_CANDIDATES,
    FILTER_BYTES,
    RESIDENT,
    THREADS,
    choose_depthwise,
    depthwise_candidate,
    depthwise_geometry,
    items_of,
)
from .depthwise_strip_kernel import StripKernel
from .depthwise_strips import (
    MULTIPROCESSOR_BYTES,
    STRIP_CANDIDATES,
    StripGeometry,
    StripPlan,
    choose_strips,
    strip_candidate,
)


def can_implement[dtype: DType](problem: ConvProblem) -> Optional[String]:
    """Why the depthwise kernel cannot take a problem.

    Parameters:
        dtype: Of activation and filter.

    Args:
        problem: The convolution, valid (`ConvProblem.validate`).

    Returns:
        The reason, or None if the kernel can.
    """
    if problem.group_channels() != 1:
        return String(
            t"depthwise takes one input channel a group; here"
            t" {problem.group_channels()}"
        )
    var config = depthwise_candidate[dtype](choose_depthwise[dtype](problem))
    if config.filter_bytes(problem.taps()) > FILTER_BYTES:
        return String(
            t"depthwise keeps filters in {FILTER_BYTES} bytes of shared memory,"
            t" too few for {problem.taps()} taps"
        )
    if items_of(problem) >= MAX_INDEX // 2:
        return String(
            t"depthwise counts items with 30 bits; here {items_of(problem)}"
        )
    return None


def convolve[
    Source: ActivationSource,
    bias_type: DType,
    residual_type: DType,
    //,
    known: KnownFilter = UNKNOWN_FILTER,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Some[OutputTarget],
) raises:
    """Enqueues a depthwise convolution.

    Parameters:
        Source: How the activation is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        known: What is known of the filter: the configurations that may be for
            it are compiled.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        activation: `[N, D, H, W, C]`, at a multiple of 16 bytes.
        filter: `[K, T, R, S, 1]` in device memory.
        epilogue: Its operands in device memory, at multiples of 16 bytes.
        output: `[N, Z, P, Q, K]`, at a multiple of 16 bytes.

    Raises:
        Why the kernel cannot take the problem; if its configuration was not
        compiled.
    """
    comptime Output = type_of(output)
    comptime dtype = Source.dtype
    var refusal = can_implement[dtype](problem)
    if refusal:
        raise Error(t"{refusal.value()}; problem {problem}")
    var multiprocessors = ctx.get_attribute(
        DeviceAttribute.MULTIPROCESSOR_COUNT
    )
    comptime diagonal = (
        is_hopper()
        and not Source.fused
        and has_diagonal_types[dtype, residual_type, Output.dtype]()
    )
    comptime if diagonal:
        var found = choose_diagonal(problem)
        if found >= 0:
            convolve_diagonal[known=known.depthwise()](
                ctx,
                problem,
                found,
                activation.data(),
                filter,
                rebind[Epilogue[bias_type, Output.dtype]](epilogue),
                output,
            )
            return
    elif not Source.fused:
        var found = choose_strips[dtype](problem)
        if found >= 0:
            _launch_strips[known](
                ctx,
                problem,
                found,
                multiprocessors,
                activation.data(),
                filter,
                epilogue,
                output,
            )
            return
    var choice = choose_depthwise[dtype](problem)
    comptime for index in range(DEPTHWISE_CANDIDATES):
        if choice == index:
            comptime config = depthwise_candidate[dtype](index)
            comptime kernel = DepthwiseKernel[
                Source, bias_type, residual_type, Output, config
            ].run
            var geometry = depthwise_geometry(
                config, problem, RESIDENT * multiprocessors
            )
            ctx.enqueue_function[kernel](
                activation,
                filter,
                epilogue,
                output,
                geometry,
                grid_dim=ceildiv(Int(geometry.items), Int(geometry.block_items))
                * Int(geometry.slabs.value),
                block_dim=THREADS,
                shared_mem_bytes=config.filter_bytes(problem.taps()),
            )


def _launch_strips[
    dtype: DType,
    bias_type: DType,
    residual_type: DType,
    //,
    known: KnownFilter,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    choice: Int,
    multiprocessors: Int,
    activation: Reads[dtype],
    filter: Reads[dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Some[OutputTarget],
) raises:
    """Enqueues the strip kernel's candidate `choice`."""
    comptime for index in range(STRIP_CANDIDATES):
        comptime config = strip_candidate[dtype](index)
        comptime if config.may_run(known):
            if choice == index:
                comptime kernel = StripKernel[
                    dtype, bias_type, residual_type, type_of(output), config
                ].run
                var plan = StripPlan(config, problem, multiprocessors)
                ctx.enqueue_function[kernel](
                    activation,
                    filter,
                    epilogue,
                    output,
                    StripGeometry.of(problem, plan),
                    grid_dim=plan.blocks,
                    block_dim=plan.threads(),
                    shared_mem_bytes=plan.shared_bytes,
                    func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                        UInt32(MULTIPROCESSOR_BYTES)
                    ),
                )
                return
    raise Error(
        t"{strip_candidate[dtype](choice)}: the op was compiled without it;"
        t" problem {problem}"
    )


def explain_depthwise[
    dtype: DType, out_type: DType, hopper: Bool
](problem: ConvProblem, multiprocessors: Int) -> String:
    """What would run on an activation in memory, for people.

    Parameters:
        dtype: Of the activation.
        out_type: Of output and residual.
        hopper: Whether the GPU has compute capability 9.0.

    Args:
        problem: The convolution; `can_implement` has agreed.
        multiprocessors: Of the device.

    Returns:
        The configuration and the cut, on one line.
    """
    comptime if hopper and has_diagonal_types[dtype, out_type, out_type]():
        var found = choose_diagonal(problem)
        if found >= 0:
            return explain_diagonal(found, problem, multiprocessors)
    else:
        var found = choose_strips[dtype](problem)
        if found >= 0:
            var config = strip_candidate[dtype](found)
            return String(
                t"{config}: {StripPlan(config, problem, multiprocessors)}"
            )
    return String(depthwise_candidate[dtype](choose_depthwise[dtype](problem)))
