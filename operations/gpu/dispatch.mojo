"""Problem -> kernel, on a GPU: the Hopper kernel where there is one and it can,
else a general one. Every refusal has its reason."""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.collections import Optional
from std.math import ceildiv

from ..conv.access import ActivationSource, OutputTarget
from ..conv.config import kernel_name
from ..conv.epilogue import Epilogue
from ..conv.fields import (
    KERNEL_AUTO,
    KERNEL_DEPTHWISE,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_SM90,
    KERNEL_STEM,
    LAYOUT_KRSC,
)
from ..conv.memory import Reads
from ..conv.problem import ConvProblem
from ..sm90 import stem_launch
from ..sm90.dispatch import choose as choose_sm90
from ..sm90.dispatch import convolve as convolve_sm90
from ..sm90.stem_geometry import MAX_CHANNELS
from . import depthwise_launch
from .direct import NARROW, SMALL, VECTOR, WIDE, DirectTile
from .direct import convolve as convolve_direct
from .geometry import geometry_refusal
from .grouped import convolve as convolve_grouped
from .hopper import is_hopper
from .packing import pack_filter
from .reference import convolve as convolve_reference
from .trace import is_traced, trace

comptime ALL_KERNELS = -1
"""What an op is compiled with unless it is told: bit `k` stands for the kernel
of code `k`."""

comptime ALIGNMENT = 16
"""Bytes of which the copy engine takes addresses to be multiples, and that a
thread accesses at once."""

comptime MIN_TILE_FILTERS = 8
"""Filters of a group from which on a tile of the implicit GEMM is filled
better than the grouped kernel's lanes."""


@fieldwise_init
struct Operands(ImplicitlyCopyable, Movable):
    """What beside the problem decides whether a kernel can take it."""

    var fused_input: Bool
    """Whether the activation is computed by what stands before the op."""
    var aligned: Bool
    """Whether the addresses of all operands that lie in memory are multiples
    of `ALIGNMENT`."""
    var fused_output: Bool
    """Whether the graph compiler fused something behind the output."""


def operands_of[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
) -> Operands:
    """Looks at the operands.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.

    Args:
        activation: The activation.
        filter: The filter in `LAYOUT_KRSC`.
        epilogue: The epilogue.
        output: The output.
    """
    var addresses = Int(filter)
    comptime if not Source.fused:
        addresses |= Int(activation.data())
    comptime if not Output.stores:
        addresses |= Int(output.data())
    if epilogue.has_scale:
        addresses |= Int(epilogue.scale)
    if epilogue.has_bias:
        addresses |= Int(epilogue.bias)
    if epilogue.has_residual:
        addresses |= Int(epilogue.residual)
    return Operands(
        fused_input=Source.fused,
        aligned=addresses % ALIGNMENT == 0,
        fused_output=Output.computes or Output.stores,
    )


def has_sm90_types[in_type: DType, out_type: DType]() -> Bool:
    """Whether the Hopper kernels are built for these types.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
    """
    return in_type.is_half_float() and out_type.is_half_float()


def _hopper_refusal[
    in_type: DType, out_type: DType, hopper: Bool
](kernel: Int, operands: Operands) -> Optional[String]:
    """Why no Hopper kernel can take a problem with these types and operands."""
    var name = kernel_name(kernel)
    comptime if not hopper:
        return String(
            t"{name} runs on compute capability 9.0 only (H100, H200)"
        )
    elif not has_sm90_types[in_type, out_type]():
        return String(
            t"{name} takes and gives bfloat16 or float16; here {in_type} and"
            t" {out_type}"
        )
    else:
        if operands.fused_input:
            return String(
                t"{name} reads the activation from memory, but here other work"
                t" is fused in front of it"
            )
        return _alignment_refusal(name, operands)


def _alignment_refusal(
    name: StaticString, operands: Operands
) -> Optional[String]:
    """Why a kernel that takes aligned operands cannot take these."""
    if operands.aligned:
        return None
    return String(
        t"{name} takes operands at multiples of {ALIGNMENT} bytes; here one"
        t" is not"
    )


def has_kernel(kernels: Int, kernel: Int) -> Bool:
    """Whether an op is compiled with a kernel.

    Args:
        kernels: A bit for each.
        kernel: A `KERNEL_*` code.
    """
    return (kernels >> kernel) & 1 == 1


def can_implement[
    in_type: DType, out_type: DType, hopper: Bool
](
    kernel: Int, problem: ConvProblem, operands: Operands, multiprocessors: Int
) -> Optional[String]:
    """Why a kernel cannot take a problem on a GPU, or None.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
        hopper: Whether the GPU has compute capability 9.0.

    Args:
        kernel: A `KERNEL_*` code.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.
    """
    if kernel == KERNEL_REFERENCE:
        return None
    if kernel == KERNEL_IMPLICIT_GEMM or kernel == KERNEL_GROUPED:
        return geometry_refusal(problem)
    if kernel == KERNEL_DEPTHWISE:
        var refusal = _alignment_refusal(kernel_name(kernel), operands)
        if refusal:
            return refusal
        return depthwise_launch.can_implement[in_type](problem)
    if kernel == KERNEL_SM90 or kernel == KERNEL_STEM:
        var refusal = _hopper_refusal[in_type, out_type, hopper](
            kernel, operands
        )
        if refusal:
            return refusal
        comptime if has_sm90_types[in_type, out_type]():
            if kernel == KERNEL_STEM:
                return stem_launch.can_implement[in_type, out_type](problem)
            # Choosing asks for the tiles of at least one output.
            if problem.gemm_m() == 0 or problem.filters == 0:
                return None
            var choice = choose_sm90[in_type, out_type](
                problem, multiprocessors, operands.fused_output
            )
            if choice.index < 0:
                return choice.refusal
        return None
    return String(
        t"{kernel_name(kernel)} is a kernel of CPUs; a GPU has reference,"
        t" implicit_gemm, depthwise, grouped, sm90 and stem"
    )


def choose_kernel[
    in_type: DType, out_type: DType, hopper: Bool, kernels: Int
](
    requested: Int,
    problem: ConvProblem,
    operands: Operands,
    multiprocessors: Int,
) raises -> Int:
    """The kernel that runs a problem on a GPU.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
        hopper: Whether the GPU has compute capability 9.0.
        kernels: Which kernels there are, a bit each.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.

    Returns:
        A `KERNEL_*` code.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    if requested != KERNEL_AUTO:
        var refusal = can_implement[in_type, out_type, hopper](
            requested, problem, operands, multiprocessors
        )
        if refusal:
            raise Error(
                t"config: {kernel_name(requested)} cannot take this"
                t" convolution: {refusal.value()}"
            )
        if not has_kernel(kernels, requested):
            raise Error(
                t"config: the op was compiled without {kernel_name(requested)}"
            )
        return requested
    # A refusal costs time to write: only what may well be taken is asked.
    comptime half = hopper and has_sm90_types[in_type, out_type]()
    comptime if half and has_kernel(kernels, KERNEL_STEM):
        if problem.groups == 1 and problem.channels <= MAX_CHANNELS:
            if not can_implement[in_type, out_type, hopper](
                KERNEL_STEM, problem, operands, multiprocessors
            ):
                return KERNEL_STEM
    comptime if has_kernel(kernels, KERNEL_DEPTHWISE):
        if problem.group_channels() == 1:
            if not can_implement[in_type, out_type, hopper](
                KERNEL_DEPTHWISE, problem, operands, multiprocessors
            ):
                return KERNEL_DEPTHWISE
    comptime if half and has_kernel(kernels, KERNEL_SM90):
        if not can_implement[in_type, out_type, hopper](
            KERNEL_SM90, problem, operands, multiprocessors
        ):
            return KERNEL_SM90
    var refusal = geometry_refusal(problem)
    if refusal:
        raise Error(t"no kernel takes this convolution: {refusal.value()}")
    comptime if has_kernel(kernels, KERNEL_GROUPED):
        if (
            not has_kernel(kernels, KERNEL_IMPLICIT_GEMM)
            or problem.groups > 1
            and problem.group_filters() < MIN_TILE_FILTERS
        ):
            return KERNEL_GROUPED
    if not has_kernel(kernels, KERNEL_IMPLICIT_GEMM):
        raise Error("config: the op was compiled for one kernel; name it")
    return KERNEL_IMPLICIT_GEMM


def explain_choice[
    in_type: DType, out_type: DType, hopper: Bool
](
    kernel: Int,
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

    Args:
        kernel: What it returned.
        requested: What it was asked for.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.

    Returns:
        A sentence without its full stop.
    """
    if requested != KERNEL_AUTO:
        return "asked for by config="
    comptime if hopper and has_sm90_types[in_type, out_type]():
        if kernel == KERNEL_SM90:
            return String(
                choose_sm90[in_type, out_type](
                    problem, multiprocessors, operands.fused_output
                )
            )
        if kernel == KERNEL_STEM:
            return stem_launch.explain_stem[out_type](problem, multiprocessors)
    if kernel == KERNEL_DEPTHWISE:
        return depthwise_launch.explain_depthwise[in_type, out_type, hopper](
            problem, multiprocessors
        )
    var refusal = can_implement[in_type, out_type, hopper](
        KERNEL_SM90, problem, operands, multiprocessors
    ).or_else(String())
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
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    layout: Int,
    requested: Int,
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
) raises:
    """Enqueues a validated problem; brings its filter into the kernels' layout
    first, if it has another.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        kernels: Which kernels to compile, a bit each.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution.
        activation: The activation.
        filter: The filter in device memory.
        layout: Its `LAYOUT_*` code.
        requested: A `KERNEL_*` code.
        epilogue: The epilogue, its operands in device memory.
        output: The output.

    Raises:
        If the requested kernel cannot take the problem, or the filter is
        packed for a CPU; what the driver refused.
    """
    if layout == LAYOUT_KRSC:
        _run[kernels](
            ctx, problem, activation, filter, requested, epilogue, output
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
    _run[kernels](
        ctx, problem, activation, data.as_imm(), requested, epilogue, output
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
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Source,
    filter: Reads[Source.dtype],
    requested: Int,
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
) raises:
    """Chooses a kernel and enqueues it."""
    comptime hopper = is_hopper()
    comptime in_type = Source.dtype
    comptime out_type = Output.dtype
    var operands = operands_of(activation, filter, epilogue, output)
    var multiprocessors = ctx.get_attribute(
        DeviceAttribute.MULTIPROCESSOR_COUNT
    )
    var kernel = choose_kernel[in_type, out_type, hopper, kernels](
        requested, problem, operands, multiprocessors
    )
    if is_traced():
        var why = explain_choice[in_type, out_type, hopper](
            kernel, requested, problem, operands, multiprocessors
        )
        trace(
            String(
                t"maxconv: {problem}, {in_type} -> {out_type}:"
                t" {kernel_name(kernel)}: {why}"
            )
        )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    comptime if hopper and not Source.fused and has_sm90_types[
        in_type, out_type
    ]():
        comptime if has_kernel(kernels, KERNEL_SM90):
            if kernel == KERNEL_SM90:
                convolve_sm90(
                    ctx, problem, activation.data(), filter, epilogue, output
                )
                return
        comptime if has_kernel(kernels, KERNEL_STEM):
            if kernel == KERNEL_STEM:
                stem_launch.convolve(
                    ctx, problem, activation, filter, epilogue, output
                )
                return
    comptime if has_kernel(kernels, KERNEL_DEPTHWISE):
        if kernel == KERNEL_DEPTHWISE:
            depthwise_launch.convolve(
                ctx, problem, activation, filter, epilogue, output
            )
            return
    comptime if has_kernel(kernels, KERNEL_GROUPED):
        if kernel == KERNEL_GROUPED:
            convolve_grouped(ctx, problem, activation, filter, epilogue, output)
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
