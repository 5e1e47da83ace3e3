"""A convolution on a GPU: the filter's layout, the plan that is kept, the
launch."""

from max.gpu.host import DeviceContext

from ..conv.access import ActivationSource, OutputTarget
from ..conv.fields import LAYOUT_KRSC
from ..conv.known import KnownFilter
from ..conv.memory import Reads
from ..conv.operands import Arguments
from ..conv.plans import PlanKey, keep_plan, kept_plan
from ..conv.problem import ConvProblem
from ..conv.registry import Planned
from ..conv.trace import is_traced, trace_choice
from .device import device_of, target_capability
from .generic.packing import pack_filter
from .legality import check_type
from .registry import GPU_REGISTRY, check_registry
from .stream import Stream


def convolve[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    kernels: Int,
    known: KnownFilter,
    scaled: Bool,
](
    mut stream: Stream,
    problem: ConvProblem,
    arguments: Arguments[Source, Output, bias_type, residual_type],
    *,
    requested: Int,
    exact: Bool,
) raises:
    """Enqueues a convolution.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        kernels: Which kernels to compile, a bit each.
        known: What is known of the filter: which configurations to compile.
        scaled: Whether each filter has a scale.

    Args:
        stream: Where to run; nothing is waited for.
        problem: The convolution, valid.
        arguments: Its operands in device memory, the filter in `LAYOUT_KRSC`.
        requested: A `KERNEL_*` code.
        exact: Whether products of float32 must not be rounded to tf32.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why;
        what the driver refused.
    """
    comptime assert type_of(arguments).types(scaled).input == Source.dtype
    check_registry()
    var planned = plan_convolution[kernels, scaled](
        stream.ctx, problem, arguments, requested=requested, exact=exact
    )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    GPU_REGISTRY.launch[
        capability=target_capability(),
        kernels=kernels,
        known=known,
        scaled=scaled,
    ](planned, problem, arguments, stream)


def plan_convolution[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
    kernels: Int,
    scaled: Bool,
](
    ctx: DeviceContext,
    problem: ConvProblem,
    arguments: Arguments[Source, Output, bias_type, residual_type],
    *,
    requested: Int,
    exact: Bool,
) raises -> Planned:
    """The plan of a convolution: the one that the process keeps, or a new one,
    which it keeps from then on.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        kernels: Which kernels the op is compiled with, a bit each.
        scaled: Whether each filter has a scale.

    Args:
        ctx: The device.
        problem: The convolution, valid.
        arguments: Its operands.
        requested: A `KERNEL_*` code.
        exact: Whether products of float32 must not be rounded to tf32.

    Returns:
        The plan; of a problem without outputs, one that cannot be launched.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why.
    """
    comptime types = type_of(arguments).types(scaled)
    var operands = arguments.operands(exact=exact)
    var device = device_of(ctx)
    var key = PlanKey(problem, operands, device, requested, kernels)
    var kept = kept_plan(key)
    if kept:
        return kept.value()
    check_type(types, device.capability)
    var kernel = GPU_REGISTRY.choose[types, kernels](
        requested, problem, operands, device
    )
    if is_traced():
        trace_choice(
            problem,
            types,
            kernel,
            GPU_REGISTRY.explain[types, kernels](
                kernel, requested, problem, operands, device
            ),
        )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return Planned(kernel, 0)
    var planned = GPU_REGISTRY.plan[types, kernels](
        kernel, problem, operands, device
    )
    keep_plan(key, planned)
    return planned


def convolve_any_layout[
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
    arguments: Arguments[Source, Output, bias_type, residual_type],
    *,
    layout: Int,
    requested: Int,
    exact: Bool,
) raises:
    """Enqueues a convolution, and before it the transposition of a filter that
    is not in the kernels' layout.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        kernels: Which kernels to compile, a bit each.
        known: What is known of the filter.
        scaled: Whether each filter has a scale.

    Args:
        ctx: The device, in whose own queue to run; nothing is waited for.
        problem: The convolution, valid.
        arguments: Its operands in device memory.
        layout: The filter's `LAYOUT_*` code.
        requested: A `KERNEL_*` code.
        exact: Whether products of float32 must not be rounded to tf32.

    Raises:
        If the requested kernel, or every one, cannot take the problem, or the
        filter is packed for a CPU: why; what the driver refused.
    """
    comptime run = convolve[kernels, known, scaled]
    var stream = Stream(ctx)
    if layout == LAYOUT_KRSC:
        run(stream, problem, arguments, requested=requested, exact=exact)
        return
    var elements = problem.filter_length(LAYOUT_KRSC)
    var packed = ctx.enqueue_create_buffer[Source.dtype](max(1, elements))
    var data = (
        packed.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
    )
    if elements > 0:
        pack_filter(ctx, problem, layout, arguments.filter, data)
    var unpacked = arguments
    unpacked.filter = data.as_imm()
    run(stream, problem, unpacked, requested=requested, exact=exact)
    # Freed in the stream's order, after the kernel.
    _ = packed^
