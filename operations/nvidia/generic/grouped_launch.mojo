"""Runs groups of few channels on a GPU: the diagonal kernel where it takes them,
on Hopper's tensor cores, otherwise the general kernel."""

from max.gpu.host import DeviceContext

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.known import UNKNOWN_FILTER, KnownFilter
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from ..sm90.diagonal.launch import convolve as convolve_diagonal
from ..sm90.diagonal.launch import has_diagonal_types
from ..sm90.diagonal.plan import choose_diagonal
from ..config import Operands, is_hopper
from .grouped import convolve as convolve_general


def diagonal_of[
    in_type: DType, out_type: DType, hopper: Bool
](problem: ConvProblem, operands: Operands) -> Int:
    """The diagonal kernel's candidate that runs a problem, or -1 if it is the
    general kernel that does.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of output and residual.
        hopper: Whether the GPU has compute capability 9.0.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    comptime if hopper and has_diagonal_types[in_type, out_type, out_type]():
        if operands.aligned and not operands.fused_input:
            return choose_diagonal(problem)
    return -1


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
    operands: Operands,
) raises:
    """Enqueues a convolution.

    Parameters:
        Source: How the activation is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.
        known: What is known of the filter: the configurations that may be for
            it are compiled.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output;
            `geometry_refusal` has agreed.
        activation: The activation.
        filter: `[K, T, R, S, C / groups]` in device memory.
        epilogue: The epilogue, its operands in device memory.
        output: The output.
        operands: What is known of them.

    Raises:
        If the diagonal kernel's configuration was not compiled; what the driver
        refused.
    """
    comptime out_type = type_of(output).dtype
    comptime if (
        is_hopper()
        and not Source.fused
        and has_diagonal_types[Source.dtype, residual_type, out_type]()
    ):
        var found = diagonal_of[Source.dtype, out_type, True](problem, operands)
        if found >= 0:
            convolve_diagonal[known=known](
                ctx,
                problem,
                found,
                activation.data(),
                filter,
                rebind[Epilogue[bias_type, out_type]](epilogue),
                output,
            )
            return
    convolve_general(ctx, problem, activation, filter, epilogue, output)
