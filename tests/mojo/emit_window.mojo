"""Writes the Hopper window kernel for the emulator, as PTX, into the folder that
is the first argument; needs no GPU.

    emit_window FOLDER PROBLEM...

A problem is the input's type, the output's, 1 if the graph's work `AddPlace` is
fused behind it or 0, 1 if a multiply's pixels are a square or 0, multiplies
along h and along w, parts and the bytes of a row (all 0: what the plan takes),
and the numbers of `ConvProblem.of_numbers`, joined by an x. For each kernel a
file of its types and its filters, and for each problem a line: the file's name
and what its launch passes: tiles, threads, bytes of shared memory, bytes of a
row, stages, 1 if neighbouring filters are stored at once, boxes along w, then
extents and box of the activation, its step along w, extents, steps and box of
the filter, each with commas, then the epilogue's parameters (bare; with scale,
bias, ReLU and residual; `unscaled_of`), the output and the geometry, as hexadecimal bytes. Or
the word refused, and why. Pointers are `SCALE_AT`, `BIAS_AT`, `RESIDUAL_AT` and
`OUTPUT_AT`, for the reader to replace.
"""

from add_place import AddPlace
from fused_epilogue import epilogue_of, unscaled_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import ComputedOutput, MemoryOutput, OutputTarget
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm90.window.kernel import WindowKernel
from operations.nvidia.sm90.window.launch import Window, WindowPlan
from operations.nvidia.sm90.window.maps import (
    activation_box,
    filter_box,
    filter_view,
)
from operations.nvidia.sm90.window.model import tiled
from operations.nvidia.sm90.window.tiling import (
    FEWEST_FILTERS,
    WIDTHS,
    Image,
    WindowTiling,
)

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


def joined(numbers: IndexList[5]) -> String:
    """Numbers with commas."""
    var text = String(numbers[0])
    for i in range(1, 5):
        text += String(t",{numbers[i]}")
    return text


def write[
    input: DType, Output: OutputTarget, placed: Bool, filters: Int
](folder: String) raises:
    """Writes a kernel."""
    comptime kernel = WindowKernel[
        input, DType.float32, Output.dtype, Output, filters
    ].run
    comptime target = get_gpu_target["sm_90a"]()
    var info = compile_info[kernel, emission_kind="asm", target=target]()
    var name = name_of(input, Output.dtype, placed, filters)
    with open(String(t"{folder}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def describe[
    input: DType, output: DType
](placed: Bool, words: List[Int]) raises:
    """Prints the line of a problem."""
    var numbers = List[Int]()
    for i in range(5, len(words)):
        numbers.append(words[i])
    var problem = ConvProblem.of_numbers(numbers)
    var operands = Operands.bare(
        OperandTypes.unfused(input, output, fused_output=placed)
    )
    var device = Device(90, 4)
    var refusal = Window.refusal(problem, operands, device)
    if refusal:
        print("refused", refusal.value())
        return
    var plan = Window.plan(problem, operands, device)
    if words[4] != 0:
        var tiling = WindowTiling(
            words[0] == 1, words[1], words[2], words[3], words[4]
        )
        var cut = tiled(problem, operands, device, tiling)
        if cut.seconds == Float64.MAX:
            raise Error(t"{tiling} does not run {problem}")
        plan = WindowPlan(problem, cut, device.units)
    ref geometry = plan.geometry
    var image = Image(problem)
    var view = filter_view(problem)
    var data = Writes[output](unsafe_from_address=OUTPUT_AT)
    print(
        name_of(input, output, placed, FEWEST_FILTERS << plan.width),
        geometry.tiles,
        plan.tiling.threads(),
        geometry.shared_bytes,
        plan.tiling.row_bytes,
        geometry.stages,
        geometry.together,
        geometry.boxes,
        joined(
            IndexList[5](
                problem.channels,
                image.width,
                image.height,
                image.depth,
                image.count,
            )
        ),
        joined(activation_box(geometry)),
        geometry.stride[2],
        joined(view.extents),
        joined(view.steps),
        joined(filter_box(problem, geometry)),
        bytes_of(epilogue_of[output](False)),
        bytes_of(epilogue_of[output](True)),
        bytes_of(unscaled_of[output]()),
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
        comptime for width in range(WIDTHS):
            comptime filters = FEWEST_FILTERS << width
            write[input, MemoryOutput[output], False, filters](folder)
            comptime if types == 0:
                comptime Output = ComputedOutput[output, 5, AddPlace]
                write[input, Output, True, filters](folder)
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
