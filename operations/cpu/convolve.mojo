"""A convolution on the CPU: the filter's layout, the plan that is kept, the
launch."""

from ..conv.access import ActivationSource, OutputTarget
from ..conv.fields import LAYOUT_PACKED
from ..conv.known import UNKNOWN_FILTER
from ..conv.memory import HostBuffer
from ..conv.operands import Arguments, Operands, OperandTypes
from ..conv.packing import pack_filter
from ..conv.plans import PlanKey, keep_plan, kept_plan
from ..conv.problem import ConvProblem
from ..conv.registry import Device, Planned
from ..conv.trace import is_traced, trace_choice
from .pool import Pool
from .registry import CpuRegistry, check_registry


def convolve[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    P: Pool,
    //,
    kernels: Int,
    scaled: Bool,
](
    mut pool: P,
    problem: ConvProblem,
    arguments: Arguments[Source, Output, bias_type, residual_type],
    *,
    layout: Int,
    requested: Int,
) raises:
    """Runs a convolution, packing its filter first if it is not packed.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        P: The pool's type.
        kernels: Which kernels to compile, a bit each.
        scaled: Whether each filter has a scale.

    Args:
        pool: The threads that run it.
        problem: The convolution, valid.
        arguments: Its operands.
        layout: The filter's `LAYOUT_*` code.
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why.
    """
    comptime types = type_of(arguments).types(scaled)
    check_registry()
    var planned = plan_convolution[types, kernels](
        pool, problem, arguments.operands(exact=True), requested
    )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    comptime launch = CpuRegistry[P].launch[
        capability=0, kernels=kernels, known=UNKNOWN_FILTER, scaled=scaled
    ]
    if layout == LAYOUT_PACKED:
        launch(planned, problem, arguments, pool)
        return
    var memory = HostBuffer[Source.dtype](problem.packed_length())
    pack_filter(problem, layout, arguments.filter, memory.elements)
    var packed = arguments
    packed.filter = memory.elements.as_imm()
    launch(planned, problem, packed, pool)
    _ = memory^


def plan_convolution[
    P: Pool, //, types: OperandTypes, kernels: Int
](
    pool: P, problem: ConvProblem, operands: Operands, requested: Int
) raises -> Planned:
    """The plan of a convolution: the one that the process keeps, or a new one,
    which it keeps from then on.

    Parameters:
        P: The pool's type.
        types: Of the operands.
        kernels: Which kernels the op is compiled with, a bit each.

    Args:
        pool: The threads that will run it.
        problem: The convolution, valid.
        operands: Its operands.
        requested: A `KERNEL_*` code.

    Returns:
        The plan; of a problem without outputs, one that cannot be launched.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why.
    """
    comptime Kernels = CpuRegistry[P]
    var device = Device(0, pool.threads())
    var key = PlanKey(problem, operands, device, requested, kernels)
    var kept = kept_plan(key)
    if kept:
        return kept.value()
    var kernel = Kernels.choose[types, kernels](
        requested, problem, operands, device
    )
    if is_traced():
        trace_choice(
            problem,
            types,
            kernel,
            Kernels.explain[types, kernels](
                kernel, requested, problem, operands, device
            ),
        )
    if problem.gemm_m() == 0 or problem.filters == 0:
        return Planned(kernel, 0)
    var planned = Kernels.plan[types, kernels](
        kernel, problem, operands, device
    )
    keep_plan(key, planned)
    return planned
