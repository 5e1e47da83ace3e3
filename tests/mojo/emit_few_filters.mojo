"""Writes the kernels for few filters for the emulator, as PTX, into the folder
that is the first argument; needs no GPU.

    emit_few_filters FOLDER PROBLEM...

A problem is the input's type, the output's, 1 if the graph's work `AddPlace` is
fused behind it or 0, warps along h, along w and along the channels, 1 if a
warp's multiplies are neighbours along h or 0, the chunks of a slice and the
stages (all 0: what the plan takes), and the numbers of `ConvProblem.of_numbers`,
joined by an x. For each kernel a file of its types and its filters, and for each
problem a line: the file's name and what its launch passes: tiles, threads,
bytes of shared memory, 1 if window rows are joined, how outputs are stored, then
the epilogue's parameters (bare; with scale, bias, ReLU and residual), the output
and the geometry, as hexadecimal bytes. Or the word refused, and why. Pointers
are `SCALE_AT`, `BIAS_AT`, `RESIDUAL_AT` and `OUTPUT_AT`, for the reader to
replace.
"""

from add_place import AddPlace
from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import (
    ComputedOutput,
    MemoryActivation,
    MemoryOutput,
    OutputTarget,
)
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.few_filters.kernel import WindowKernel
from operations.nvidia.few_filters.launch import FewFilters
from operations.nvidia.few_filters.model import window_geometry
from operations.nvidia.few_filters.tile import TILES, Tiling

comptime OUTPUT_AT = 0x4444000000000000


comptime INPUTS = [
    DType.bfloat16,
    DType.bfloat16,
    DType.float16,
    DType.float32,
]
"""Of activation and filter."""

comptime OUTPUTS = [
    DType.bfloat16,
    DType.float32,
    DType.float16,
    DType.float32,
]
"""Of output and residual."""


def name_of(input: DType, output: DType, placed: Bool, filters: Int) -> String:
    """The name of a kernel's file."""
    return String(t"{input}-{output}-{Int(placed)}-{filters}")


def write[
    input: DType, Output: OutputTarget, placed: Bool, index: Int
](folder: String) raises:
    """Writes a kernel."""
    comptime kernel = WindowKernel[
        MemoryActivation[input],
        Output,
        DType.float32,
        Output.dtype,
        TILES[index],
    ].run
    comptime target = get_gpu_target["sm_90a"]()
    comptime filters = TILES[index].filters
    var info = compile_info[kernel, emission_kind="asm", target=target]()
    var name = name_of(input, Output.dtype, placed, filters)
    with open(String(t"{folder}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def describe[
    input: DType, output: DType
](placed: Bool, words: List[Int]) raises:
    """Prints the line of a problem."""
    var numbers = List[Int]()
    for i in range(6, len(words)):
        numbers.append(words[i])
    var problem = ConvProblem.of_numbers(numbers)
    var operands = Operands.bare(
        OperandTypes.unfused(input, output, fused_output=placed)
    )
    var device = Device(80, 4)
    var refusal = FewFilters.refusal(problem, operands, device)
    if refusal:
        print("refused", refusal.value())
        return
    var plan = FewFilters.plan(problem, operands, device)
    if words[0] != 0:
        var tiling = Tiling(
            words[0],
            words[1],
            words[2],
            words[3] == 1,
            words[4],
            words[5],
        )
        plan.geometry = window_geometry(problem, operands, tiling)
        plan.warps = tiling.warps()
    var data = Writes[output](unsafe_from_address=OUTPUT_AT)
    print(
        name_of(input, output, placed, materialize[TILES]()[plan.tile].filters),
        plan.geometry.tiles,
        32 * plan.warps,
        plan.geometry.shared_bytes,
        plan.geometry.joined,
        plan.geometry.stores,
        bytes_of(epilogue_of[output](False)),
        bytes_of(epilogue_of[output](True)),
        bytes_of(
            ComputedOutput[output, 5, AddPlace](data, AddPlace(1))
        ) if placed else bytes_of(MemoryOutput[output](data)),
        bytes_of(plan.geometry),
    )


def main() raises:
    var folder = String(argv()[1])
    comptime for types in range(len(INPUTS)):
        comptime input = INPUTS[types]
        comptime output = OUTPUTS[types]
        comptime for index in range(len(TILES)):
            write[input, MemoryOutput[output], False, index](folder)
            comptime if types == 0:
                comptime Output = ComputedOutput[output, 5, AddPlace]
                write[input, Output, True, index](folder)
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(3, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for types in range(len(INPUTS)):
            comptime input = INPUTS[types]
            comptime output = OUTPUTS[types]
            if String(words[0]) == String(input) and String(words[1]) == String(
                output
            ):
                describe[input, output](String(words[2]) == "1", numbers)
