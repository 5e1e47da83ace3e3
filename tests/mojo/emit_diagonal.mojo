"""Writes the diagonal kernel for the emulator, as PTX, into the folder that is
the first argument; needs no GPU.

    emit_diagonal FOLDER PROBLEM...

A problem is taps, stride, batch, height, width, channels, padding, the
multiprocessors to cut it for and the channels of a group, joined by an x. For each configuration that is
emulated a file of its index, and for each problem a line of what its launch
passes: index, blocks, threads, bytes of shared memory, channels of a slab, columns of a load and of
an output box, images of an output box, output height and width, then the
epilogue's parameters (bare; with bias, ReLU and residual) and the geometry, as
hexadecimal bytes. The bias's pointer is `BIAS_AT`, for the reader to replace.
The last line is what an op says to the last problem that was compiled for other
filters.
"""

from hexadecimal import bytes_of
from max.gpu.host import DeviceContext, get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import ACTIVATION_NONE, ACTIVATION_RELU
from operations.conv.known import KnownFilter
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments, Device, Operands, OperandTypes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.stream import Stream
from operations.nvidia.sm90.diagonal.kernel import DiagonalKernel
from operations.nvidia.sm90.diagonal.geometry import DiagonalGeometry
from operations.nvidia.sm90.diagonal.launch import Diagonal
from operations.nvidia.sm90.diagonal.plan import (
    MATRIX,
    DIAGONAL_CANDIDATES,
    DiagonalTiling,
    choose_diagonal,
    diagonal_candidate,
)


comptime EMULATED = 3
"""Taps of the configurations."""

comptime BIAS_AT = 0x2222000000000000

comptime Dtype = DType.bfloat16


def problem_of(numbers: List[Int]) raises -> ConvProblem:
    """A grouped problem, of the numbers of an argument."""
    var taps = numbers[0]
    var stride = numbers[1]
    var padding = IndexList[SPATIAL](0, numbers[6], numbers[6])
    var problem = ConvProblem(
        spatial_rank=2,
        batch=numbers[2],
        channels=numbers[5],
        filters=numbers[5],
        groups=numbers[5] // numbers[8],
        input=IndexList[SPATIAL](1, numbers[3], numbers[4]),
        filter=IndexList[SPATIAL](1, taps, taps),
        output=IndexList[SPATIAL](fill=1),
        stride=IndexList[SPATIAL](1, stride, stride),
        dilation=IndexList[SPATIAL](fill=1),
        pad_before=padding,
        pad_after=padding,
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return problem


def epilogue_of(fused: Bool) -> Epilogue[DType.float32, Dtype]:
    """Nothing, or bias, ReLU and residual."""
    var none = Activation(ACTIVATION_NONE, 0, 0)
    return Epilogue[DType.float32, Dtype](
        has_bias=fused,
        has_residual=fused,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=Reads[DType.float32](unsafe_from_address=BIAS_AT),
        residual=Reads[Dtype](unsafe_from_address=16),
        beta=1,
        activation=Activation(ACTIVATION_RELU, 0, 0) if fused else none,
        final_activation=none,
    )


def refusal_of(problem: ConvProblem) -> String:
    """What an op says that was compiled for filters with a tap more."""
    comptime Output = MemoryOutput[Dtype]
    comptime types = OperandTypes.unfused(Dtype, Dtype)
    try:
        var stream = Stream(DeviceContext(api="cpu"))
        Diagonal.launch[
            known=KnownFilter(EMULATED + 1, 1, 1, False, False, True, True, 0),
            scaled=False,
        ](
            Diagonal.plan(problem, Operands.bare(types), Device(90, 132)),
            problem,
            Arguments(
                MemoryActivation[Dtype](Reads[Dtype](unsafe_from_address=16)),
                Reads[Dtype](unsafe_from_address=16),
                epilogue_of(False),
                Output(Writes[Dtype](unsafe_from_address=16)),
            ),
            stream,
        )
    except error:
        return String(error)
    return "nothing"


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime if diagonal_candidate(index).taps != EMULATED:
            continue
        comptime kernel = DiagonalKernel[
            Dtype,
            DType.float32,
            MemoryOutput[Dtype],
            diagonal_candidate(index),
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        with open(String(t"{argv()[1]}/{index}.ptx"), "w") as file:
            file.write(String(info.asm))
    for i in range(2, len(argv())):
        var numbers = List[Int]()
        for word in String(argv()[i]).split("x"):
            numbers.append(Int(String(word)))
        var problem = problem_of(numbers)
        var index = choose_diagonal(problem)
        var config = diagonal_candidate(index)
        var plan = DiagonalTiling(config, problem, numbers[7])
        print(
            index,
            plan.blocks,
            config.threads(plan.slab_warps),
            plan.shared_bytes(),
            plan.slab_warps * MATRIX,
            plan.staged_columns,
            plan.columns,
            plan.images,
            problem.output[1],
            problem.output[2],
            bytes_of(epilogue_of(False)),
            bytes_of(epilogue_of(True)),
            bytes_of(DiagonalGeometry.of(config, problem, plan)),
        )
        if i == len(argv()) - 1:
            print(refusal_of(problem))
