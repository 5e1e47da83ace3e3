"""Runs the Hopper stem kernel: configuration, grid, launch."""

from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from std.collections import Optional

from ....conv.access import ActivationSource, OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.fields import STEM_CHANNELS
from ....conv.memory import Reads
from ....conv.problem import ConvProblem
from ...limits import MAX_INDEX, MAX_SHARED_BYTES
from .kernel import THREADS, StemKernel
from .geometry import (
    STEM_CANDIDATES,
    StemPlan,
    choose_stem,
    stem_candidate,
    stem_geometry,
)


def can_implement[
    in_type: DType, out_type: DType
](problem: ConvProblem) -> Optional[String]:
    """Why the stem kernel cannot take a problem.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        problem: The convolution, valid (`ConvProblem.validate`).

    Returns:
        The reason, or None if the kernel can.
    """
    comptime if not in_type.is_half_float():
        return String(
            t"stem takes bfloat16 and float16 activations; here {in_type}"
        )
    if problem.groups != 1:
        return String(t"stem takes one group; here {problem.groups}")
    if problem.channels > STEM_CHANNELS:
        return String(
            t"stem takes up to {STEM_CHANNELS} input channels; here"
            t" {problem.channels}"
        )
    var image = (
        problem.channels
        * problem.input[0]
        * problem.input[1]
        * problem.input[2]
    )
    if image >= MAX_INDEX:
        return String(
            t"stem counts an image's elements with 31 bits; here {image}"
        )
    if problem.gemm_m() >= MAX_INDEX:
        return String(
            t"stem counts pixels with 31 bits; here {problem.gemm_m()}"
        )
    var config = stem_candidate(choose_stem(problem))
    var smallest = StemPlan(config, problem)
    if smallest.shared_bytes() > MAX_SHARED_BYTES:
        return String(
            t"stem needs {smallest.shared_bytes()} bytes of shared memory for"
            t" filter {problem.filter} with dilation {problem.dilation}; a"
            t" block has {MAX_SHARED_BYTES}"
        )
    return None


def explain_stem[
    out_type: DType
](problem: ConvProblem, multiprocessors: Int) raises -> String:
    """What would run, for people.

    Parameters:
        out_type: Of the output.

    Args:
        problem: The convolution; `can_implement` has agreed.
        multiprocessors: Of the device.

    Returns:
        The configuration and the cut, on one line.
    """
    var config = stem_candidate(choose_stem(problem))
    var plan = StemPlan(config, problem)
    plan.choose_pixels[out_type](config, problem, multiprocessors)
    return String(t"{config}: {plan}")


def convolve[
    Source: ActivationSource, bias_type: DType, residual_type: DType
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Some[OutputTarget],
) raises:
    """Enqueues a convolution of few input channels.

    Parameters:
        Source: How the activation is reached: in memory, bfloat16 or float16.
        bias_type: Of the bias.
        residual_type: Of the residual.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        activation: `[N, D, H, W, C]` in device memory.
        filter: `[K, T, R, S, C]` in device memory.
        epilogue: Its operands in device memory, at multiples of 16 bytes.
        output: `[N, Z, P, Q, K]`, at a multiple of 16 bytes.

    Raises:
        Why the kernel cannot take the problem.
    """
    comptime Output = type_of(output)
    comptime assert not Source.fused, "stem reads memory"
    var refusal = can_implement[Source.dtype, Output.dtype](problem)
    if refusal:
        raise Error(t"{refusal.value()}; problem {problem}")
    var multiprocessors = ctx.get_attribute(
        DeviceAttribute.MULTIPROCESSOR_COUNT
    )
    var choice = choose_stem(problem)
    var plan = StemPlan(stem_candidate(choice), problem)
    plan.choose_pixels[Output.dtype](
        stem_candidate(choice), problem, multiprocessors
    )
    var workers = max(1, multiprocessors // plan.filter_blocks)
    comptime for index in range(STEM_CANDIDATES):
        if choice == index:
            comptime kernel = StemKernel[
                Source.dtype,
                bias_type,
                residual_type,
                Output,
                stem_candidate(index),
            ].run
            ctx.enqueue_function[kernel](
                activation.data(),
                filter,
                epilogue,
                output,
                stem_geometry(problem, plan),
                grid_dim=min(workers, plan.tiles) * plan.filter_blocks,
                block_dim=THREADS,
                shared_mem_bytes=plan.shared_bytes(),
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(MAX_SHARED_BYTES)
                ),
            )
