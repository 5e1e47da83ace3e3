"""What the spaces of the CPU's kernels share: whether a kernel takes a problem,
its cuts, and what follows from tasks."""

from std.collections import Optional
from std.math import ceildiv

from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .conv.kernel import built_refusal
from .cpu.kernel import CpuKernel
from .cpu.named import NumberedCut
from .tuning_space import Counts, Values


def kernel_refusal[
    Kernel: CpuKernel
](problem: ConvProblem, operands: Operands, device: Device) -> Optional[String]:
    """Why a kernel cannot take a problem, its types and the CPU included, or
    None.

    Parameters:
        Kernel: The kernel.

    Args:
        problem: The convolution.
        operands: Its operands.
        device: The CPU.
    """
    var refusal = built_refusal[Kernel](operands.types)
    return refusal if refusal else Kernel.refusal(problem, operands, device)


def cut_of[Cut: NumberedCut](values: Values) -> Cut:
    """The cut of a configuration's numbers.

    Parameters:
        Cut: The cut's type, whose fields are the configuration's.

    Args:
        values: The numbers.
    """
    var numbers = List[Int]()
    for place in range(len(Cut.fields())):
        numbers.append(Int(values[unsafe_offset=place]))
    return Cut.of_numbers(numbers)


def equal_parts(extent: Int) -> List[Int]:
    """The sizes of equal parts that things can be cut into, the largest first.

    Args:
        extent: How many things there are.
    """
    var sizes = List[Int]()
    var parts = 1
    while parts <= extent:
        var size = ceildiv(extent, parts)
        sizes.append(size)
        # The next number of parts that makes them smaller.
        parts = ceildiv(extent, size - 1) if size > 1 else extent + 1
    return sizes^


def write_task_counts(counts: Counts, tasks: Int, threads: Int):
    """Writes how many tasks there are, how many times all threads take one, and
    which share of the threads' time that is.

    Args:
        counts: Where to: three numbers.
        tasks: How many there are.
        threads: That run them.
    """
    var waves = ceildiv(tasks, threads)
    counts[unsafe_offset=0] = Float64(tasks)
    counts[unsafe_offset=1] = Float64(waves)
    counts[unsafe_offset=2] = Float64(tasks) / Float64(waves * threads)
