"""Which kernel a convolution would run on, without running it: on the device
that is asked, or on a GPU that need not be here."""

from std.sys.info import size_of

from .conv.operands import Operands as CpuOperands
from .conv.operands import OperandTypes
from .conv.problem import ConvProblem
from .conv.registry import Device
from .cpu.registry import CPU_REGISTRY
from .nvidia.config import (
    Operands,
    is_blackwell_capability,
    is_hopper_capability,
)
from .nvidia.dispatch import ALL_KERNELS
from .nvidia.dispatch import choose_kernel as choose_gpu
from .nvidia.dispatch import explain_choice as explain_gpu


@fieldwise_init
struct Answer(Copyable, Movable):
    """What dispatch chooses."""

    var kernel: Int
    """A `KERNEL_*` code."""
    var reason: String
    """For people: a sentence without its full stop."""


def explain_on_cpu[
    dtype: DType
](requested: Int, problem: ConvProblem, threads: Int) raises -> Answer:
    """Asks the registry of CPUs.

    Parameters:
        dtype: Of activation, filter and output.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice to it.
        problem: The convolution, valid.
        threads: How many threads there are.

    Returns:
        The choice for an op that nothing is fused in front of.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    comptime types = OperandTypes.unfused(dtype, dtype)
    var operands = CpuOperands.bare(types, exact=True)
    var device = Device(0, threads)
    var kernel = CPU_REGISTRY.choose[types](requested, problem, operands, device)
    return Answer(
        kernel,
        CPU_REGISTRY.explain[types](
            kernel, requested, problem, operands, device
        ),
    )


def explain_on_gpu[
    dtype: DType, hopper: Bool, blackwell: Bool
](
    requested: Int,
    problem: ConvProblem,
    exact: Bool,
    fused_output: Bool,
    multiprocessors: Int,
) raises -> Answer:
    """Asks the dispatch of GPUs.

    Parameters:
        dtype: Of activation and filter; of the output too, but where it has 8
            bits the output is bfloat16.
        hopper: Whether the GPU has compute capability 9.0.
        blackwell: Whether it has compute capability 10.0 or 10.3.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice to it.
        problem: The convolution, valid.
        exact: Whether products of float32 must not be rounded to tf32.
        fused_output: Whether something stands behind the op that the graph
            compiler fuses with it: elementwise work, or the graph's end.
        multiprocessors: Of the GPU.

    Returns:
        The choice for an op with nothing in front of it and no operand of its
        epilogue, its operands where MAX allocates them: at multiples of 16
        bytes.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    comptime out_type = DType.bfloat16 if size_of[dtype]() == 1 else dtype
    var operands = Operands(
        fused_input=False,
        aligned=True,
        fused_output=fused_output,
        exact=exact,
    )
    var chosen = choose_gpu[dtype, out_type, hopper, blackwell, ALL_KERNELS](
        requested, problem, operands, multiprocessors
    )
    return Answer(
        chosen.kernel,
        explain_gpu[dtype, out_type, hopper, blackwell](
            chosen, requested, problem, operands, multiprocessors
        ),
    )


def explain_on_other_gpu[
    dtype: DType
](
    requested: Int,
    problem: ConvProblem,
    exact: Bool,
    fused_output: Bool,
    capability: Int,
    multiprocessors: Int,
) raises -> Answer:
    """Asks the dispatch of GPUs for one that need not be here.

    Parameters:
        dtype: As in `explain_on_gpu`.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice to it.
        problem: The convolution, valid.
        exact: Whether products of float32 must not be rounded to tf32.
        fused_output: As in `explain_on_gpu`.
        capability: The GPU's compute capability times ten.
        multiprocessors: Of the GPU.

    Returns:
        As `explain_on_gpu`.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    if multiprocessors < 1:
        raise Error(
            t"multiprocessors: {multiprocessors} is not positive; a GPU has at"
            t" least 1"
        )
    if is_hopper_capability(capability):
        return explain_on_gpu[dtype, True, False](
            requested, problem, exact, fused_output, multiprocessors
        )
    if is_blackwell_capability(capability):
        return explain_on_gpu[dtype, False, True](
            requested, problem, exact, fused_output, multiprocessors
        )
    return explain_on_gpu[dtype, False, False](
        requested, problem, exact, fused_output, multiprocessors
    )
