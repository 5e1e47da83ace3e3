"""Writes the Hopper stem kernel for the emulator, as PTX, into the folder that
is the first argument; needs no GPU.

    emit_stem FOLDER PROBLEM...

A problem is the type of activation, filter and output, 1 if the graph's work
`AddPlace` is fused behind it or 0, the index of a configuration or -1 for the
plan's, rows and columns of a tile or 0 for the plan's, and the numbers of `ConvProblem.of_numbers`, joined by an x. For each
kernel a file of its type and configuration, and for each problem a line: the
file's name and what its launch passes: blocks, threads, bytes of shared memory,
tiles, staged quads of a tile, then the epilogue's parameters (bare; with scale, bias, ReLU and
residual), the output and the geometry, as hexadecimal bytes. Or the word
refused, and why. Pointers are `SCALE_AT`, `BIAS_AT`, `RESIDUAL_AT` and
`OUTPUT_AT`, for the reader to replace.
"""

from add_place import AddPlace
from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import ComputedOutput, MemoryOutput, OutputTarget
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm90.stem.geometry import STEM_CANDIDATES, stem_candidate
from operations.nvidia.sm90.stem.kernel import StemKernel
from operations.nvidia.sm90.stem.launch import Stem
from operations.nvidia.sm90.stem.tiling import StemTiling, stem_geometry

comptime OUTPUT_AT = 0x4444000000000000

comptime TYPES = [DType.bfloat16, DType.float16]

comptime MULTIPROCESSORS = 4


def name_of(dtype: DType, placed: Bool, index: Int) -> String:
    """The name of a kernel's file."""
    return String(t"{dtype}-{Int(placed)}-{index}")


def write[
    dtype: DType, Output: OutputTarget, placed: Bool, index: Int
](folder: String) raises:
    """Writes a kernel."""
    comptime kernel = StemKernel[
        dtype, DType.float32, dtype, Output, stem_candidate(index)
    ].run
    comptime target = get_gpu_target["sm_90a"]()
    var info = compile_info[kernel, emission_kind="asm", target=target]()
    with open(
        String(t"{folder}/{name_of(dtype, placed, index)}.ptx"), "w"
    ) as file:
        file.write(String(info.asm))


def describe[dtype: DType](placed: Bool, words: List[Int]) raises:
    """Prints the line of a problem."""
    var numbers = List[Int]()
    for i in range(3, len(words)):
        numbers.append(words[i])
    var problem = ConvProblem.of_numbers(numbers)
    var operands = Operands.bare(
        OperandTypes.unfused(dtype, dtype, fused_output=placed)
    )
    var device = Device(90, MULTIPROCESSORS)
    var refusal = Stem.refusal(problem, operands, device)
    if refusal:
        print("refused", refusal.value())
        return
    var plan = Stem.plan(problem, operands, device)
    if words[0] >= 0:
        plan.candidate = words[0]
        var config = stem_candidate(plan.candidate)
        plan.tiling = StemTiling(config, problem)
        plan.tiling.choose_pixels(config, problem, dtype, MULTIPROCESSORS)
    if words[1] > 0:
        plan.tiling.cut_pixels(problem, words[1], words[2])
    if words[0] >= 0 or words[1] > 0:
        plan.geometry = stem_geometry(problem, plan.tiling)
        plan.blocks = plan.tiling.blocks(
            stem_candidate(plan.candidate), MULTIPROCESSORS
        )
    var data = Writes[dtype](unsafe_from_address=OUTPUT_AT)
    print(
        name_of(dtype, placed, plan.candidate),
        plan.blocks,
        stem_candidate(plan.candidate).threads(),
        plan.tiling.shared_bytes(),
        plan.tiling.tiles,
        plan.tiling.stage_quads,
        bytes_of(epilogue_of[dtype](False)),
        bytes_of(epilogue_of[dtype](True)),
        bytes_of(
            ComputedOutput[dtype, 5, AddPlace](data, AddPlace(1))
        ) if placed else bytes_of(MemoryOutput[dtype](data)),
        bytes_of(plan.geometry),
    )


def main() raises:
    var folder = String(argv()[1])
    comptime for types in range(len(TYPES)):
        comptime dtype = TYPES[types]
        comptime for index in range(STEM_CANDIDATES):
            write[dtype, MemoryOutput[dtype], False, index](folder)
            comptime if types == 0:
                comptime Output = ComputedOutput[dtype, 5, AddPlace]
                write[dtype, Output, True, index](folder)
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(2, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for types in range(len(TYPES)):
            comptime dtype = TYPES[types]
            if String(words[0]) == String(dtype):
                describe[dtype](String(words[1]) == "1", numbers)
