"""Writes the GEMV kernel for the emulator, as PTX, into the folder that is the
first argument; needs no GPU.

    emit_gemv FOLDER PROBLEM...

A problem is the input's type, pixels, channels, filters, and 1 if the operands
are aligned or 0, joined by an x. For each kernel a file of the input's type,
pixels and channels of a load, and for each problem a line of what its launch
passes: the file's name, blocks, threads, then the epilogue's parameters (bare;
with scale, bias, ReLU and residual) and the geometry, as hexadecimal bytes.
Pointers of the epilogue are `SCALE_AT`, `BIAS_AT` and `RESIDUAL_AT`, for the
reader to replace.
"""

from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.fields import COPY_BYTES
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.generic.gemv import LOAD_BYTES, GemvKernel
from operations.nvidia.generic.gemv_launch import ROWS, Gemv

comptime TYPES = [
    DType.bfloat16,
    DType.float32,
    DType.float8_e4m3fn,
    DType.int8,
]
"""Of activation and filter. The output is bfloat16, or float32 as they are."""


def output_of(dtype: DType) -> DType:
    """The output's type."""
    return dtype if dtype == DType.float32 else DType.bfloat16


def describe[dtype: DType](words: List[Int]) raises:
    """Prints the line of a problem."""
    comptime types = OperandTypes.unfused(dtype, output_of(dtype))
    var one = IndexList[SPATIAL](fill=1)
    var none = IndexList[SPATIAL](fill=0)
    # Along w, and in two images where they can be.
    var batch = 2 if words[0] % 2 == 0 else 1
    var size = IndexList[SPATIAL](1, 1, words[0] // batch)
    var problem = ConvProblem(
        spatial_rank=2,
        batch=batch,
        channels=words[1],
        filters=words[2],
        groups=1,
        input=size,
        filter=one,
        output=size,
        stride=one,
        dilation=one,
        pad_before=none,
        pad_after=none,
    )
    var operands = Operands.bare(types)
    operands.alignment = COPY_BYTES if words[3] == 1 else 1
    var device = Device(90, 132)
    if not Gemv.suits(problem, operands, device):
        raise Error(t"gemv does not suit {problem}")
    var refusal = Gemv.refusal(problem, operands, device)
    if refusal:
        raise Error(refusal.value())
    var plan = Gemv.plan(problem, operands, device)
    print(
        String(t"{dtype}-{materialize[ROWS]()[plan.rows]}-{plan.width}"),
        plan.blocks,
        plan.threads,
        bytes_of(epilogue_of[output_of(dtype)](False)),
        bytes_of(epilogue_of[output_of(dtype)](True)),
        bytes_of(plan.geometry),
    )


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    comptime for dtype in TYPES:
        comptime for rows in ROWS:
            comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
                comptime kernel = GemvKernel[
                    MemoryActivation[dtype],
                    MemoryOutput[output_of(dtype)],
                    DType.float32,
                    output_of(dtype),
                    rows,
                    width,
                ].run
                var info = compile_info[
                    kernel, emission_kind="asm", target=target
                ]()
                var name = String(t"{dtype}-{rows}-{width}")
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
