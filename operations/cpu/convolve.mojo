"""From a problem to a launch, on the CPU."""

from ..conv.access import ActivationSource, OutputTarget
from ..conv.fields import CPU_KERNELS, LAYOUT_PACKED
from ..conv.known import KnownProblem
from ..conv.memory import HostBuffer
from ..conv.operands import Arguments
from ..conv.packing import pack_filter
from ..conv.plans import PlanKey, keep_plan, kept_plan
from ..conv.problem import ConvProblem
from ..conv.registry import Device
from ..conv.trace import is_traced, trace_choice
from .pool import Pool
from .registry import CpuRegistry


def convolve[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    P: Pool,
    //,
    *,
    known: KnownProblem,
    scaled: Bool,
](
    arguments: Arguments[Source, Output, bias_type, residual_type],
    problem: ConvProblem,
    layout: Int,
    requested: Int,
    mut pool: P,
) raises:
    """Runs a validated problem, packing its filter first if it is not packed.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        P: The pool's type.
        known: What is known of the problem: which kernels to compile.
        scaled: Whether each filter has a scale.

    Args:
        arguments: The operands.
        problem: The convolution.
        layout: The `LAYOUT_*` code of the filter.
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
        pool: The threads that run it.

    Raises:
        If the requested kernel, or every one, cannot take the problem.
    """
    comptime Kernels = CpuRegistry[P]
    comptime assert (
        Kernels.codes() == CPU_KERNELS
    ), "the registry's order is not that of CPU_KERNELS in _fields.py"
    comptime kernels = Kernels.needed(
        type_of(arguments).types(scaled), 0, known
    )
    # Products of float32 are never rounded to tf32 here.
    var operands = arguments.operands(exact=True)
    var device = Device(0, pool.threads())
    var key = PlanKey(problem, operands, device, requested, kernels)
    var planned = kept_plan(key)
    if not planned:
        var kernel = Kernels.choose(
            requested, problem, operands, device, kernels
        )
        if is_traced():
            trace_choice(
                problem,
                operands.types,
                kernel,
                Kernels.explain(requested, kernel, problem, operands, device),
            )
        if problem.gemm_m() == 0 or problem.filters == 0:
            return
        planned = Kernels.plan(kernel, problem, operands, device)
        keep_plan(key, planned.value())
    comptime launch = Kernels.launch[
        Source,
        Output,
        bias_type,
        residual_type,
        capability=0,
        kernels=kernels,
        known=known.filter(),
        scaled=scaled,
    ]
    if layout == LAYOUT_PACKED:
        launch(planned.value(), problem, arguments, pool)
        return
    var packed = HostBuffer[Source.dtype](problem.packed_length())
    pack_filter(problem, layout, arguments.filter, packed.elements)
    var with_packed = arguments
    with_packed.filter = packed.elements.as_imm()
    launch(planned.value(), problem, with_packed, pool)
    _ = packed^
