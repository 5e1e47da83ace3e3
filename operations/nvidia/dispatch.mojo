"""Problem -> kernel, on a GPU: the Hopper or the Blackwell kernel where there is
one and it can, else a general one. Every refusal has its reason."""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.math import ceildiv

from ..conv.access import ActivationSource, OutputTarget
from ..conv.registry import kernel_name
from ..conv.epilogue import Epilogue
from ..conv.fields import (
    KERNEL_AUTO,
    KERNEL_DEPTHWISE,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_SM100,
    KERNEL_SM90,
    KERNEL_STEM,
    LAYOUT_KRSC,
    STEM_CHANNELS,
    TILE_FILTERS,
)
from ..conv.known import UNKNOWN_FILTER, KnownFilter
from ..conv.memory import Reads
from ..conv.problem import ConvProblem
from .sm100.dispatch import Choice as BlackwellChoice
from .sm100.dispatch import convolve as convolve_sm100
from .sm90.stem import launch as stem_launch
from .sm90.gemm.dispatch import Choice
from .sm90.gemm.dispatch import convolve as convolve_sm90
from .sm90.diagonal.launch import explain_diagonal
from .generic import depthwise_launch
from .config import (
    Operands,
    has_depthwise_types,
    has_sm100_types,
    has_sm90_types,
    has_stem_types,
    is_blackwell,
    is_hopper,
    judge,
    needs_sm100,
    operands_of,
)
from .generic.implicit_gemm import NARROW, SMALL, VECTOR, WIDE, DirectTile
from .generic.implicit_gemm import convolve as convolve_direct
from .generic.geometry import geometry_refusal
from .generic.grouped_launch import convolve as convolve_grouped
from .generic.grouped_launch import diagonal_of
from .generic.packing import pack_filter
from .generic.reference import convolve as convolve_reference
from ..conv.trace import is_traced, trace

comptime ALL_KERNELS = -1
"""What an op is compiled with unless it is told: bit `k` stands for the kernel
of code `k`."""


def has_kernel(kernels: Int, kernel: Int) -> Bool:
    """Whether an op is compiled with a kernel.

    Args:
        kernels: A bit for each.
        kernel: A `KERNEL_*` code.
    """
    return (kernels >> kernel) & 1 == 1


@fieldwise_init
struct Chosen(Copyable, Movable):
    """The kernel that runs a problem."""

    var kernel: Int
    """A `KERNEL_*` code."""
    var sm90: Choice
    """The candidate that the Hopper kernel runs with, if it is that."""
    var sm100: BlackwellChoice
    """The candidate that the Blackwell kernel runs with, if it is that."""

    @staticmethod
    def of(kernel: Int) -> Chosen:
        """A kernel without candidates.

        Args:
            kernel: Its `KERNEL_*` code.
        """
        return Chosen(
            kernel, Choice(-1, 1, 0.0, String()), BlackwellChoice.none()
        )


def choose_kernel[
    in_type: DType,
    out_type: DType,
    hopper: Bool,
    blackwell: Bool,
    kernels: Int,
](
    requested: Int,
    problem: ConvProblem,
    operands: Operands,
    multiprocessors: Int,
) raises -> Chosen:
    """The kernel that runs a problem on a GPU.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
        hopper: Whether the GPU has compute capability 9.0.
        blackwell: Whether it has compute capability 10.0 or 10.3.
        kernels: Which kernels there are, a bit each.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    comptime if needs_sm100[in_type]() and not blackwell:
        raise Error(
            t"input: dtype {in_type} takes a GPU of compute capability 10.0 or"
            t" 10.3 (B200, B300); on this one float32, bfloat16, float16 and"
            t" float8_e4m3fn are allowed"
        )
    comptime judge_here = judge[in_type, out_type, hopper, blackwell]
    if requested != KERNEL_AUTO:
        var verdict = judge_here(requested, problem, operands, multiprocessors)
        if verdict.refusal:
            raise Error(
                t"config: {kernel_name(requested)} cannot take this"
                t" convolution: {verdict.refusal.value()}"
            )
        if not has_kernel(kernels, requested):
            raise Error(
                t"config: the op was compiled without {kernel_name(requested)}"
            )
        return Chosen(requested, verdict.sm90.copy(), verdict.sm100.copy())
    # A refusal costs time to write: only what may well be taken is asked.
    comptime if hopper and has_stem_types[in_type, out_type]() and has_kernel(
        kernels, KERNEL_STEM
    ):
        if problem.groups == 1 and problem.channels <= STEM_CHANNELS:
            if not judge_here(
                KERNEL_STEM, problem, operands, multiprocessors
            ).refusal:
                return Chosen.of(KERNEL_STEM)
    comptime if has_depthwise_types[in_type]() and has_kernel(
        kernels, KERNEL_DEPTHWISE
    ):
        if problem.group_channels() == 1:
            if not judge_here(
                KERNEL_DEPTHWISE, problem, operands, multiprocessors
            ).refusal:
                return Chosen.of(KERNEL_DEPTHWISE)
    comptime if hopper and has_kernel(kernels, KERNEL_GROUPED):
        if (
            # Most of a stage of the implicit GEMM would hold zeros.
            problem.groups > 1
            and diagonal_of[in_type, out_type, hopper](problem, operands) >= 0
        ):
            return Chosen.of(KERNEL_GROUPED)
    comptime if hopper and has_sm90_types[in_type, out_type]() and has_kernel(
        kernels, KERNEL_SM90
    ):
        var verdict = judge_here(
            KERNEL_SM90, problem, operands, multiprocessors
        )
        if not verdict.refusal:
            return Chosen(
                KERNEL_SM90, verdict.sm90.copy(), verdict.sm100.copy()
            )
    comptime if blackwell and has_sm100_types[
        in_type, out_type
    ]() and has_kernel(kernels, KERNEL_SM100):
        var verdict = judge_here(
            KERNEL_SM100, problem, operands, multiprocessors
        )
        if not verdict.refusal:
            return Chosen(
                KERNEL_SM100, verdict.sm90.copy(), verdict.sm100.copy()
            )
        comptime if needs_sm100[in_type]():
            raise Error(
                t"no kernel takes this convolution of {in_type}:"
                t" {verdict.refusal.value()}"
            )
    var refusal = geometry_refusal(problem)
    if refusal:
        raise Error(t"no kernel takes this convolution: {refusal.value()}")
    comptime if has_kernel(kernels, KERNEL_GROUPED):
        if (
            not has_kernel(kernels, KERNEL_IMPLICIT_GEMM)
            or problem.groups > 1
            and problem.group_filters() < TILE_FILTERS
        ):
            return Chosen.of(KERNEL_GROUPED)
    if not has_kernel(kernels, KERNEL_IMPLICIT_GEMM):
        raise Error("config: the op was compiled for one kernel; name it")
    return Chosen.of(KERNEL_IMPLICIT_GEMM)


def explain_choice[
    in_type: DType, out_type: DType, hopper: Bool, blackwell: Bool
](
    chosen: Chosen,
    requested: Int,
    problem: ConvProblem,
    operands: Operands,
    multiprocessors: Int,
) raises -> String:
    """Why `choose_kernel` chose a kernel, for people.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
        hopper: Whether the GPU has compute capability 9.0.
        blackwell: Whether it has compute capability 10.0 or 10.3.

    Args:
        chosen: What it returned.
        requested: What it was asked for.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.

    Returns:
        A sentence without its full stop.
    """
    if requested != KERNEL_AUTO:
        return "asked for by config="
    var kernel = chosen.kernel
    if kernel == KERNEL_SM90:
        return String(chosen.sm90)
    if kernel == KERNEL_SM100:
        return chosen.sm100.reason
    if kernel == KERNEL_STEM:
        return stem_launch.explain_stem[out_type](problem, multiprocessors)
    if kernel == KERNEL_DEPTHWISE:
        return depthwise_launch.explain_depthwise[in_type, out_type, hopper](
            problem, multiprocessors
        )
    if kernel == KERNEL_GROUPED:
        var found = diagonal_of[in_type, out_type, hopper](problem, operands)
        if found >= 0:
            return explain_diagonal(found, problem, multiprocessors)
    comptime tensor = KERNEL_SM100 if blackwell else KERNEL_SM90
    var refusal = judge[in_type, out_type, hopper, blackwell](
        tensor, problem, operands, multiprocessors
    ).refusal.or_else(String())
    if kernel == KERNEL_GROUPED:
        return String(
            t"groups of {problem.group_filters()} filters: neighbouring threads"
            t" compute neighbouring filters; {refusal}"
        )
    var tile = choose_tile(problem, multiprocessors)
    return String(
        t"tile {tile.pixels} pixels x {tile.filters} filters, the ordinary"
        t" units; {refusal}"
    )


def choose_tile(problem: ConvProblem, multiprocessors: Int) -> DirectTile:
    """The tile of the implicit GEMM: one that few filters fill, a small one
    where larger ones would leave multiprocessors without work.

    Args:
        problem: The convolution.
        multiprocessors: Of the GPU.
    """
    if problem.group_filters() <= NARROW.filters:
        return materialize[NARROW]()
    var blocks = (
        ceildiv(problem.gemm_m(), WIDE.pixels)
        * ceildiv(problem.gemm_n(), WIDE.filters)
        * problem.groups
    )
    if blocks < multiprocessors:
        return materialize[SMALL]()
    return materialize[WIDE]()


def convolve[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    kernels: Int = ALL_KERNELS,
    known: KnownFilter = UNKNOWN_FILTER,
    *,
    scaled: Bool = False,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    layout: Int,
    requested: Int,
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    exact: Bool = False,
) raises:
    """Enqueues a validated problem; brings its filter into the kernels' layout
    first, if it has another.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        kernels: Which kernels to compile, a bit each.
        known: What is known of the filter: which of their configurations.
        scaled: Whether the epilogue has a scale.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution.
        activation: The activation.
        filter: The filter in device memory.
        layout: Its `LAYOUT_*` code.
        requested: A `KERNEL_*` code.
        epilogue: The epilogue, its operands in device memory.
        output: The output.
        exact: Whether products of float32 must not be rounded to tf32.

    Raises:
        If the requested kernel cannot take the problem, or the filter is
        packed for a CPU; what the driver refused.
    """
    if layout == LAYOUT_KRSC:
        _run[kernels, known, scaled](
            ctx, problem, activation, filter, requested, epilogue, output, exact
        )
        return
    var elements = problem.filter_length(LAYOUT_KRSC)
    var packed = ctx.enqueue_create_buffer[Source.dtype](max(1, elements))
    var data = (
        packed.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
    )
    if elements > 0:
        pack_filter(ctx, problem, layout, filter, data)
    _run[kernels, known, scaled](
        ctx,
        problem,
        activation,
        data.as_imm(),
        requested,
        epilogue,
        output,
        exact,
    )
    # Freed in the stream's order, behind the kernel.
    _ = packed^


def _run[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    kernels: Int,
    known: KnownFilter,
    scaled: Bool,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    requested: Int,
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    exact: Bool,
) raises:
    """Chooses a kernel and enqueues it."""
    comptime hopper = is_hopper()
    comptime blackwell = is_blackwell()
    comptime in_type = Source.dtype
    comptime out_type = Output.dtype
    var operands = operands_of(activation, filter, epilogue, output, exact)
    var multiprocessors = ctx.get_attribute(
        DeviceAttribute.MULTIPROCESSOR_COUNT
    )
    var chosen = choose_kernel[in_type, out_type, hopper, blackwell, kernels](
        requested, problem, operands, multiprocessors
    )
    var kernel = chosen.kernel
    if is_traced():
        var why = explain_choice[in_type, out_type, hopper, blackwell](
            chosen, requested, problem, operands, multiprocessors
        )
        trace(
            String(
                t"maxconv: {problem}, {in_type} -> {out_type}:"
                t" {kernel_name(kernel)}: {why}"
            )
        )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    comptime if hopper and not Source.fused:
        comptime if has_kernel(kernels, KERNEL_SM90) and has_sm90_types[
            in_type, out_type
        ]():
            if kernel == KERNEL_SM90:
                convolve_sm90[scaled=scaled](
                    ctx,
                    problem,
                    activation.data(),
                    filter,
                    epilogue,
                    output,
                    chosen.sm90,
                )
                return
        comptime if has_kernel(kernels, KERNEL_STEM) and has_stem_types[
            in_type, out_type
        ]():
            if kernel == KERNEL_STEM:
                stem_launch.convolve(
                    ctx, problem, activation, filter, epilogue, output
                )
                return
    comptime if blackwell and not Source.fused and has_kernel(
        kernels, KERNEL_SM100
    ) and has_sm100_types[in_type, out_type]():
        if kernel == KERNEL_SM100:
            convolve_sm100(
                ctx,
                problem,
                activation.data(),
                filter,
                epilogue,
                output,
                chosen.sm100,
            )
            return
    comptime if has_kernel(kernels, KERNEL_DEPTHWISE) and has_depthwise_types[
        in_type
    ]():
        if kernel == KERNEL_DEPTHWISE:
            depthwise_launch.convolve[known](
                ctx, problem, activation, filter, epilogue, output
            )
            return
    comptime if has_kernel(kernels, KERNEL_GROUPED):
        if kernel == KERNEL_GROUPED:
            convolve_grouped[known](
                ctx, problem, activation, filter, epilogue, output, operands
            )
            return
    comptime if has_kernel(kernels, KERNEL_REFERENCE):
        if kernel == KERNEL_REFERENCE:
            convolve_reference(
                ctx, problem, activation, filter, epilogue, output
            )
            return
    comptime if has_kernel(kernels, KERNEL_IMPLICIT_GEMM):
        _run_implicit_gemm(
            ctx,
            problem,
            activation,
            filter,
            epilogue,
            output,
            operands,
            multiprocessors,
        )


def _run_implicit_gemm[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    operands: Operands,
    multiprocessors: Int,
) raises:
    """Enqueues the implicit GEMM with the tile that suits a problem."""
    var tile = choose_tile(problem, multiprocessors)
    comptime for candidate in [NARROW, SMALL, WIDE]:
        if (
            tile.pixels == candidate.pixels
            and tile.filters == candidate.filters
        ):
            _run_tile[candidate](
                ctx, problem, activation, filter, epilogue, output, operands
            )


def _run_tile[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    tile: DirectTile,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    operands: Operands,
) raises:
    """Enqueues the implicit GEMM with a tile, and the loads that the operands
    allow."""
    var vector_output = (
        operands.aligned and problem.group_filters() % VECTOR == 0
    )
    if operands.aligned and problem.group_channels() % VECTOR == 0:
        convolve_direct[tile, VECTOR](
            ctx, problem, activation, filter, epilogue, output, vector_output
        )
    else:
        convolve_direct[tile, 1](
            ctx, problem, activation, filter, epilogue, output, vector_output
        )
