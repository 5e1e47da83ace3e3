"""Convolutions of the types that Arm has instructions for, to be compiled for an
Arm CPU and read: the program computes nothing of use."""

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Epilogue
from operations.conv.fields import KERNEL_AUTO, LAYOUT_PACKED
from operations.conv.memory import HostBuffer
from operations.conv.operands import Arguments
from operations.conv.problem import ConvProblem
from operations.conv.registry import ALL_KERNELS
from operations.cpu.convolve import convolve
from operations.cpu.pool import CpuContext, MaxPool


def run[dtype: DType](problem: ConvProblem, mut pool: MaxPool) raises:
    """Convolves zeros."""
    var x = HostBuffer[dtype](problem.gemm_m() * problem.channels)
    var filter = HostBuffer[dtype](problem.packed_length(dtype))
    var output = HostBuffer[DType.float32](problem.gemm_m() * problem.filters)
    convolve[ALL_KERNELS, False](
        pool,
        problem,
        Arguments(
            MemoryActivation(x.elements.as_imm()),
            filter.elements.as_imm(),
            Epilogue[DType.float32, DType.float32].identity(),
            MemoryOutput(output.elements),
        ),
        layout=LAYOUT_PACKED,
        requested=KERNEL_AUTO,
    )
    _ = x^
    _ = filter^
    _ = output^


def main() raises:
    var pool = MaxPool(CpuContext(api="cpu"))
    var numbers: List[Int] = [1, 16, 16, 1]
    numbers += [1, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    var problem = ConvProblem.of_numbers(numbers)
    run[DType.bfloat16](problem, pool)
    run[DType.int8](problem, pool)
    run[DType.uint8](problem, pool)
