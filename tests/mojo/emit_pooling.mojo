"""Writes the pooling kernels for the emulator, as PTX, into the folder that is
the first argument; needs no GPU.

    emit_pooling FOLDER PROBLEM...

A problem is `largest` or `mean`, the type, 1 if means do not count the padding or 0, 1
for ceil mode or 0, and batch, channels, and three numbers each of input, window,
stride, dilation, padding before and after, all joined by an x. For each problem
a line of what its launch passes: the name of the kernel's file, blocks, threads,
the geometry as hexadecimal bytes, and the output's extents.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import MemoryOutput
from operations.conv.known import UNKNOWN
from operations.conv.pooling import PoolProblem
from operations.conv.problem import ConvProblem
from operations.nvidia.generic.depthwise_geometry import THREADS
from operations.nvidia.generic.pooling import PoolKernel
from operations.nvidia.generic.pooling_launch import (
    has_row_kernel,
    plan_pool,
    pool_refusal,
    vector_width,
)

comptime TYPES = [DType.bfloat16, DType.float32]

comptime WINDOWS = [(0, 0), (3, 2), (2, 1), (5, 1)]
"""Taps and stride along w that the kernel knows."""


def write_kernel[
    dtype: DType, average: Bool, width: Int, taps: Int, stride: Int
](name: String) raises:
    """Writes a kernel's PTX."""
    comptime kernel = PoolKernel[
        dtype, average, MemoryOutput[dtype], width, taps, stride
    ].run
    comptime target = get_gpu_target["sm_90a"]()
    var info = compile_info[kernel, emission_kind="asm", target=target]()
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def describe[
    dtype: DType, average: Bool
](words: List[String], numbers: List[Int]) raises:
    """Prints a problem's line, and writes its kernel."""
    var window = ConvProblem.of_numbers(numbers)
    var pooling = PoolProblem.of_window(
        window, ceil=words[3] == "1", counts_padding=words[2] == "0"
    )
    var refusal = pool_refusal(pooling)
    if refusal:
        raise Error(refusal.value())
    comptime widest = vector_width(dtype, UNKNOWN)
    var width = widest if window.channels % widest == 0 else 1
    var plan = plan_pool(pooling, width=width)
    var kind = "mean" if average else "largest"
    var known = 0
    comptime for i in range(1, len(WINDOWS)):
        comptime taps, stride = WINDOWS[i]
        comptime assert has_row_kernel(taps, stride)
        if (
            window.filter[2] == taps
            and window.stride[2] == stride
            and window.dilation[2] == 1
        ):
            known = i
    comptime for i in range(len(WINDOWS)):
        comptime for compiled in [1, widest]:
            comptime taps, stride = WINDOWS[i]
            if known == i and width == compiled:
                var name = String(t"{kind}-{dtype}-{compiled}-{taps}-{stride}")
                write_kernel[dtype, average, compiled, taps, stride](name)
                var output = pooling.window.output
                print(
                    name,
                    plan.blocks,
                    THREADS,
                    bytes_of(plan.geometry),
                    String(t"{output[0]}x{output[1]}x{output[2]}"),
                )


def main() raises:
    for i in range(2, len(argv())):
        var words = List[String]()
        for word in String(argv()[i]).split("x"):
            words.append(String(word))
        # A depthwise convolution, in the order of `of_numbers`.
        var numbers: List[Int] = [Int(words[4])]
        for _ in range(3):
            numbers.append(Int(words[5]))
        for j in range(6, len(words)):
            numbers.append(Int(words[j]))
        comptime for dtype in TYPES:
            comptime for average in [False, True]:
                if (
                    words[1] == String(dtype)
                    and (words[0] == "mean") == average
                ):
                    describe[dtype, average](words, numbers)
