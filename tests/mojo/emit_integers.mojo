"""Writes what runs a convolution of uint8 with a zero point and an output of uint8
on Hopper for the emulator, as PTX, into the folder that is the first argument;
needs no GPU.

    emit_integers FOLDER HEIGHT WIDTH CHANNELS FILTERS ZERO_POINT

One image, a 3x3 filter, a padding of 1. First a line of the kernel that fills
the zero point's table: threads, bytes of shared memory, elements of the table,
then problem and classes as hexadecimal bytes. Then of each of `EMULATED` what
emit_sm90_eight.mojo has. Pointers are the `_AT` below, for the reader to
replace.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList
from std.utils.numerics import inf

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import ACTIVATION_NONE, ACTIVATION_RELU
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.conv.quantization import Quantization, Steps
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm90.gemm.candidates import candidate
from operations.nvidia.sm90.gemm.grid import Grid
from operations.nvidia.sm90.gemm.kernel import ConvKernel
from operations.nvidia.summed_output import SUM_TYPE, SummedOutput
from operations.nvidia.zero_point import (
    THREADS,
    OutputClasses,
    ZeroPointTable,
    fill_kernel,
    zero_point_elements,
)

comptime TYPE = DType.uint8
"""Of activation, residual and output."""

comptime EMULATED = [6]
"""A candidate whose threads store."""

comptime OUTPUT_AT = 0x1111000000000000
comptime BIAS_AT = 0x2222000000000000
comptime RESIDUAL_AT = 0x3333000000000000
comptime SCALE_AT = 0x4444000000000000
comptime TABLE_AT = 0x5555000000000000

comptime Output = SummedOutput[MemoryOutput[TYPE], DType.float32, TYPE, 0]
comptime Visitor = ConvVisitor[DType.float32]


def problem_of(
    height: Int, width: Int, channels: Int, filters: Int
) raises -> ConvProblem:
    """One image, a filter of 3x3, the output's size the input's."""
    # Extents of input and filter, stride, dilation, padding before and after.
    var numbers: List[Int] = [1, channels, filters, 1]
    for triple in [
        (1, height, width),
        (1, 3, 3),
        (1, 1, 1),
        (1, 1, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]:
        numbers.append(triple[0])
        numbers.append(triple[1])
        numbers.append(triple[2])
    return ConvProblem.of_numbers(numbers)


def output_of(problem: ConvProblem, quantization: Quantization) -> Output:
    """An output with scale, bias, ReLU and half a residual."""
    comptime infinity = inf[DType.float32]()
    return Output(
        MemoryOutput[TYPE](Writes[TYPE](unsafe_from_address=OUTPUT_AT)),
        Epilogue[DType.float32, TYPE](
            has_bias=True,
            has_residual=True,
            has_scale=True,
            scale=Reads[DType.float32](unsafe_from_address=SCALE_AT),
            bias=Reads[DType.float32](unsafe_from_address=BIAS_AT),
            residual=Reads[TYPE](unsafe_from_address=RESIDUAL_AT),
            beta=0.5,
            activation=Activation(ACTIVATION_RELU, 0, 0),
            final_activation=Activation(ACTIVATION_NONE, 0, 0),
            residual_zero_point=77,
        ),
        Steps.of[TYPE](quantization, -infinity, infinity),
        ZeroPointTable(
            Reads[DType.int32](unsafe_from_address=TABLE_AT),
            True,
            problem.filters,
            OutputClasses(problem),
        ),
    )


def print_launch[
    index: Int
](problem: ConvProblem, quantization: Quantization) raises:
    """Prints what a candidate's launch passes."""
    comptime config = candidate(index)
    comptime Kernel = ConvKernel[TYPE, Output, Visitor, config]
    var params = Kernel.Params(
        problem,
        Visitor.of(Epilogue[DType.float32, SUM_TYPE].identity()),
        output_of(problem, quantization),
    )
    var traversal = Traversal(problem, TYPE)
    var grid = Grid.of(config, traversal, config.cluster_size(), 1)
    print(
        String(t"integers-{index}"),
        config.threads(),
        Kernel.shared_bytes(),
        grid.clusters * config.cluster_size(),
        config.cluster_size(),
        Int(grid.keeps_filters),
        config.act_tile_dim0(),
        config.epilogue.pixels(size_of[SUM_TYPE]()),
        config.filter_tile_dim0(),
        traversal.upper(2, config.halo),
        problem.filters,
        bytes_of(params),
        bytes_of(grid.geometry(config, traversal)),
    )


def write[
    declaration: TrivialRegisterPassable, //, kernel: declaration
](name: String) raises:
    """Writes a kernel."""
    var info = compile_info[
        kernel, emission_kind="asm", target=get_gpu_target["sm_90a"]()
    ]()
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def main() raises:
    var numbers = List[Int]()
    for i in range(2, 7):
        numbers.append(Int(argv()[i]))
    var problem = problem_of(numbers[0], numbers[1], numbers[2], numbers[3])
    var quantization = Quantization(Int32(numbers[4]), 93, 2)
    write[fill_kernel]("table")
    print(
        THREADS,
        problem.taps() * size_of[DType.int32](),
        zero_point_elements(problem),
        bytes_of(problem),
        bytes_of(OutputClasses(problem)),
    )
    comptime for index in EMULATED:
        comptime config = candidate(index)
        write[ConvKernel[TYPE, Output, Visitor, config].run](
            String(t"integers-{index}")
        )
        print_launch[index](problem, quantization)
