"""A convolution on the CPU: the filter's layout, the plan that is kept, the
launch."""

from ..conv.access import ActivationSource, OutputTarget
from ..conv.fields import LAYOUT_PACKED
from ..conv.known import UNKNOWN_FILTER
from ..conv.memory import HostBuffer
from ..conv.operands import Arguments, Device
from ..conv.packing import pack_filter
from ..conv.problem import ConvProblem
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
    var planned = CpuRegistry[P].find_plan[types, kernels](
        requested,
        problem,
        arguments.operands(exact=True),
        Device(0, pool.threads()),
    )
    if not problem.has_outputs():
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
