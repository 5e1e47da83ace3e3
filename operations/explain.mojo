"""The kernel that would run a convolution, without running it: on the op's
device, or on a GPU that need not be here."""

from std.sys.info import size_of

from .conv.fields import INTERLEAVED
from .conv.interleave import ANY_BLOCK, activation_layout
from .conv.operands import Device, Operands, OperandTypes
from .conv.problem import ConvProblem
from .cpu.registry import CPU_REGISTRY
from .nvidia.legality import check_type
from .nvidia.patches import merged_patches
from .nvidia.registry import GPU_REGISTRY
from .nvidia.summed_output import kernel_types


@fieldwise_init
struct Answer(Copyable, Movable):
    """The choice of a registry."""

    var kernel: Int
    """A `KERNEL_*` code."""
    var reason: String
    """For people: a sentence without its full stop."""


def explain[
    dtype: DType
](
    problem: ConvProblem,
    *,
    requested: Int,
    exact: Bool,
    fused_output: Bool,
    interleaved: Bool,
    device: Device,
) raises -> Answer:
    """Asks the registry of a device.

    Parameters:
        dtype: Of activation and filter, which beside uint8 is int8; of the
            output too, but on a GPU beside int8 and 8-bit floats it is
            bfloat16.

    Args:
        problem: The convolution, valid.
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice to it.
        exact: Whether products of float32 must not be rounded to tf32.
        fused_output: Whether something stands behind the op that the graph
            compiler fuses with it: elementwise work, or the graph's end.
        interleaved: Whether activation and output are, on a GPU and of int8 as
            NC/4HW4, on a CPU in any layout.
        device: The device.

    Returns:
        The choice for an op with nothing in front of it and no operand of its
        epilogue, its operands where MAX allocates them: at multiples of 16
        bytes.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    if interleaved and device.capability != 0 and dtype != DType.int8:
        raise Error(
            t"layout: {activation_layout(INTERLEAVED)} takes int8 on a GPU;"
            t" here {dtype}"
        )
    if device.capability == 0:
        if interleaved:
            if problem.groups != 1 or problem.input[0] != 1:
                raise Error(
                    t"layout: an interleaved one takes two spatial dimensions"
                    t" and one group; here {problem}"
                )
            comptime blocks = OperandTypes.unfused(
                dtype, dtype, interleaved=ANY_BLOCK
            )
            return _asked_cpu[blocks](problem, requested, exact, device)
        comptime types = OperandTypes.unfused(dtype, dtype)
        return _asked_cpu[types](problem, requested, exact, device)
    if device.units < 1:
        raise Error(
            t"multiprocessors: {device.units} is not positive; a GPU has at"
            t" least 1"
        )
    comptime wide = size_of[dtype]() == 1 and dtype != DType.uint8
    comptime out_type = DType.bfloat16 if wide else dtype
    # What is fused behind decides which candidates there are, the layout which
    # kernels.
    comptime for fused in [False, True]:
        if fused != fused_output:
            continue
        comptime if dtype == DType.int8:
            if interleaved:
                comptime blocks = OperandTypes.unfused(
                    dtype,
                    out_type,
                    fused_output=fused,
                    interleaved=INTERLEAVED,
                )
                return _asked[blocks](problem, requested, exact, device)
        comptime types = kernel_types(
            OperandTypes.unfused(dtype, out_type, fused_output=fused)
        )
        return _asked[types](problem, requested, exact, device)
    raise Error("unreachable: fused_output is either")


def _asked_cpu[
    types: OperandTypes
](
    problem: ConvProblem, requested: Int, exact: Bool, device: Device
) raises -> Answer:
    """The choice of a CPU's registry for operands without an epilogue."""
    var operands = Operands.bare(types, exact=exact)
    var planned = CPU_REGISTRY.plan[types](requested, problem, operands, device)
    return Answer(
        planned.kernel,
        CPU_REGISTRY.explain[types](
            planned, requested, problem, operands, device
        ),
    )


def _asked[
    types: OperandTypes
](
    problem: ConvProblem, requested: Int, exact: Bool, device: Device
) raises -> Answer:
    """The choice of a GPU's registry for operands without an epilogue."""
    check_type(types, device.capability)
    var operands = Operands.bare(types, exact=exact)
    var merged = merged_patches(problem, types, requested)
    var planned = GPU_REGISTRY.plan[types](requested, merged, operands, device)
    return Answer(
        planned.kernel,
        GPU_REGISTRY.explain[types](
            planned, requested, merged, operands, device
        ),
    )
