"""Runs the Hopper diagonal kernel: descriptors, grid, launch."""

from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.collections import Optional
from std.utils import IndexList

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.known import KnownFilter
from ....conv.memory import Reads
from ....conv.problem import SPATIAL, ConvProblem
from ...tma.descriptor import TensorMap, TensorView, encode_tiled
from ...limits import MAX_SHARED_BYTES
from .kernel import DiagonalKernel
from .geometry import DiagonalGeometry
from .plan import (
    DIAGONAL_CANDIDATES,
    SLAB,
    STAGE_ROWS,
    STEP_ROWS,
    DiagonalConfig,
    DiagonalPlan,
    diagonal_candidate,
)


def has_diagonal_types[
    in_type: DType, residual_type: DType, out_type: DType
]() -> Bool:
    """Whether the diagonal kernel is built for these types.

    Parameters:
        in_type: Of activation and filter.
        residual_type: Of the residual.
        out_type: Of the output.
    """
    return (
        in_type.is_half_float()
        and out_type.is_half_float()
        and residual_type == out_type
    )


def explain_diagonal(
    choice: Int, problem: ConvProblem, multiprocessors: Int
) -> String:
    """What would run, for people.

    Args:
        choice: Of `choose_diagonal`, not -1.
        problem: The convolution.
        multiprocessors: Of the device.

    Returns:
        The configuration and the cut, on one line.
    """
    var config = diagonal_candidate(choice)
    return String(t"{config}: {DiagonalPlan(config, problem, multiprocessors)}")


def convolve[
    dtype: DType,
    bias_type: DType,
    Output: OutputTarget,
    //,
    *,
    known: KnownFilter,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    choice: Int,
    activation: Reads[dtype],
    filter: Reads[dtype],
    epilogue: Epilogue[bias_type, Output.dtype],
    output: Output,
) raises:
    """Enqueues a depthwise convolution, or one of groups of few channels.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        bias_type: Of the bias.
        Output: How the output is reached: bfloat16 or float16.
        known: What is known of the filter: the configurations that may be for
            it are compiled.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        choice: Of `choose_diagonal`, not -1.
        activation: `[N, D, H, W, C]`, at a multiple of 16 bytes.
        filter: `[K, 1, R, S, C / groups]` in device memory, at a multiple of 4
            bytes.
        epilogue: Its operands in device memory, at multiples of 16 bytes.
        output: `[N, Z, P, Q, C]`, at a multiple of 16 bytes.

    Raises:
        If the choice was not compiled; what the driver refused.
    """
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime config = diagonal_candidate(index)
        comptime if config.may_run(known):
            if choice == index:
                _launch[config](
                    ctx, problem, activation, filter, epilogue, output
                )
                return
    raise Error(
        t"{diagonal_candidate(choice)}: the op was compiled without it;"
        t" problem {problem}"
    )


def _launch[
    dtype: DType,
    bias_type: DType,
    Output: OutputTarget,
    //,
    config: DiagonalConfig,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Reads[dtype],
    filter: Reads[dtype],
    epilogue: Epilogue[bias_type, Output.dtype],
    output: Output,
) raises:
    """Enqueues a configuration."""
    comptime kernel = DiagonalKernel[dtype, bias_type, Output, config].run
    var plan = DiagonalPlan(
        config,
        problem,
        ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    var input = _map(
        ctx,
        activation,
        problem,
        problem.input,
        plan.staged_columns,
        STAGE_ROWS,
        1,
    )
    # Where nothing is read or written through it, any will do.
    var to = input
    comptime if not (Output.computes or Output.stores):
        to = _output_map(ctx, output.data().as_imm(), problem, plan)
    var residual = input
    if epilogue.has_residual:
        residual = _output_map(ctx, epilogue.residual, problem, plan)
    ctx.enqueue_function[kernel](
        input,
        to,
        residual,
        filter,
        epilogue,
        output,
        DiagonalGeometry.of(config, problem, plan),
        grid_dim=plan.blocks,
        block_dim=config.threads(),
        shared_mem_bytes=plan.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(MAX_SHARED_BYTES)
        ),
        attributes=pdl_launch_attributes(PDLLevel.ON),
    )


def _map[
    dtype: DType
](
    ctx: DeviceContext,
    data: Reads[dtype],
    problem: ConvProblem,
    size: IndexList[SPATIAL],
    columns: Int,
    rows: Int,
    images: Int,
) raises -> TensorMap:
    """Rows of some columns of a slab of images of a tensor `[N, *size, C]`, a
    box."""
    return encode_tiled[dtype, 5](
        ctx,
        data,
        TensorView[5](
            IndexList[5](
                problem.channels, size[2], size[1], size[0], problem.batch
            )
        ),
        IndexList[5](SLAB, columns, rows, 1, images),
        TensorMapSwizzle.SWIZZLE_128B,
    )


def _output_map[
    dtype: DType
](
    ctx: DeviceContext,
    data: Reads[dtype],
    problem: ConvProblem,
    plan: DiagonalPlan,
) raises -> TensorMap:
    """The outputs of a step, or their residuals, a box."""
    return _map(
        ctx,
        data,
        problem,
        problem.output,
        plan.columns,
        STEP_ROWS,
        plan.images,
    )
