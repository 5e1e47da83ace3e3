"""Writes the implicit GEMM of `mma.sync` for the emulator, as PTX, into the
folder that is the first argument; needs no GPU.

    emit_sm80 FOLDER PROBLEM...

A problem is the input's type, the tile (`PLANNED`: what the plan takes), 1 if
the operands are aligned or 0, and the numbers of `ConvProblem.of_numbers`,
joined by an x. For each kernel a file of the input's type, the tile and whether
chunks are whole, and for each problem a line of what its launch passes: the
file's name, blocks, threads, bytes of shared memory, 1 if vectors are stored,
then the epilogue's parameters (bare; with scale, bias, ReLU and residual) and
the geometry, as hexadecimal bytes. Pointers of the epilogue are `SCALE_AT`,
`BIAS_AT` and `RESIDUAL_AT`, for the reader to replace.
"""

from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.fields import COPY_BYTES
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm80.geometry import MmaGeometry
from operations.nvidia.sm80.kernel import MmaKernel
from operations.nvidia.sm80.launch import Mma
from operations.nvidia.sm80.tile import TILES

comptime TYPES = [DType.bfloat16, DType.float16, DType.float32, DType.int8]
"""Of activation and filter."""

comptime PLANNED = 9
"""In the place of a tile."""


def output_of(dtype: DType) -> DType:
    """The output's type, and the residual's: the input's, of int8 float32."""
    return DType.float32 if dtype == DType.int8 else dtype


def name_of(dtype: DType, tile: Int, whole: Bool) -> String:
    """The name of a kernel's file."""
    return String(t"{dtype}-{tile}-{Int(whole)}")


def describe[dtype: DType](words: List[Int]) raises:
    """Prints the line of a problem."""
    comptime types = OperandTypes.unfused(dtype, output_of(dtype))
    var numbers = List[Int]()
    for i in range(2, len(words)):
        numbers.append(words[i])
    var problem = ConvProblem.of_numbers(numbers)
    var operands = Operands.bare(types)
    operands.alignment = COPY_BYTES if words[1] == 1 else 1
    var device = Device(80, 108)
    if not Mma.suits(problem, operands, device):
        raise Error(t"sm80 does not suit {problem}")
    var refusal = Mma.refusal(problem, operands, device)
    if refusal:
        raise Error(refusal.value())
    var plan = Mma.plan(problem, operands, device)
    if words[0] != PLANNED:
        plan.tile = words[0]
        plan.geometry = MmaGeometry(
            problem,
            materialize[TILES]()[plan.tile],
            words=plan.geometry.words != 0,
        )
    var tile = materialize[TILES]()[plan.tile]
    print(
        name_of(dtype, plan.tile, plan.whole),
        plan.geometry.tiles(),
        tile.threads(),
        tile.shared_bytes(),
        Int(plan.vector_stores),
        bytes_of(epilogue_of[output_of(dtype)](False)),
        bytes_of(epilogue_of[output_of(dtype)](True)),
        bytes_of(plan.geometry),
    )


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    comptime for dtype in TYPES:
        comptime for index in range(len(TILES)):
            comptime for whole in [False, True]:
                comptime kernel = MmaKernel[
                    MemoryActivation[dtype],
                    MemoryOutput[output_of(dtype)],
                    DType.float32,
                    output_of(dtype),
                    TILES[index],
                    whole,
                ].run
                var info = compile_info[
                    kernel, emission_kind="asm", target=target
                ]()
                var name = name_of(dtype, index, whole)
                with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
                    file.write(String(info.asm))
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(1, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for dtype in TYPES:
            if String(words[0]) == String(dtype):
                describe[dtype](numbers)
