"""Writes the dp4a kernel for the emulator, as PTX, into the folder that is the
first argument; needs no GPU.

    emit_dp4a FOLDER PROBLEM...

A problem is the output (`float32`, `bfloat16`, `float16`, or `int8`, which work
behind the kernel stores), the tile (`PLANNED`: what the plan takes), the
alignment of the operands in bytes, and the numbers of `ConvProblem.of_numbers`,
joined by an x. For each kernel a file of the output, the tile and the accesses,
and for each problem a line of what its launch passes: the file's name, blocks
along x and y, threads, bytes of shared memory, then the epilogue's parameters
(bare; with scale, bias, ReLU and residual), the output and the geometry, as
hexadecimal bytes. Pointers of the epilogue are `SCALE_AT`, `BIAS_AT` and
`RESIDUAL_AT`, the output's is `OUTPUT_AT`, for the reader to replace.
"""

from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryActivation, MemoryOutput, OutputTarget
from operations.conv.fields import INTERLEAVED
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.generic.dp4a import Dp4aKernel
from operations.nvidia.generic.dp4a_launch import ACCESSES, Dp4a
from operations.nvidia.generic.dp4a_tile import TILES

comptime OUTPUTS = [DType.float32, DType.bfloat16, DType.float16, DType.int8]
"""Of the outputs."""

comptime PLANNED = 9
"""In the place of a tile."""

comptime OUTPUT_AT = 0x4444000000000000

comptime TARGET = get_gpu_target["sm_90a"]()


@fieldwise_init
struct RoundedOutput(OutputTarget):
    """An output that is stored as int8 by its index, and not by its offset, as
    the graph compiler stores it."""

    comptime dtype = DType.float32
    comptime computes = False
    comptime stores = True

    var elements: Writes[DType.int8]
    var planes: Int
    var rows: Int
    var columns: Int

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """Nothing that may be written."""
        return self.elements.unsafe_bitcast[Float32]()

    @always_inline
    def store[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
        value: SIMD[Self.dtype, width],
    ):
        var plane = n * self.planes + at[0]
        var pixel = (plane * self.rows + at[1]) * self.columns + at[2]
        var steps = round(value).clamp(-128, 127).cast[DType.int8]()
        self.elements.unsafe_store[alignment=alignment](
            pixel * INTERLEAVED + filter, steps
        )


def name_of(result: DType, tile: Int, accesses: Int) -> String:
    """The name of a kernel's file."""
    return String(t"{result}-{tile}-{accesses}")


def emitted(result: DType, tile: Int, accesses: Int) -> Bool:
    """Whether a kernel is written: all of float32, some of others."""
    return result == DType.float32 or tile + accesses == 2


def write[Output: OutputTarget, tile: Int, accesses: Int](name: String) raises:
    """Writes a kernel."""
    comptime kernel = Dp4aKernel[
        MemoryActivation[DType.int8, INTERLEAVED],
        Output,
        DType.float32,
        Output.dtype,
        TILES[tile],
        ACCESSES[accesses].filters,
        ACCESSES[accesses].pixels,
    ].run
    var info = compile_info[kernel, emission_kind="asm", target=TARGET]()
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def describe[result: DType](words: List[Int]) raises:
    """Prints the line of a problem."""
    comptime given = DType.float32 if result == DType.int8 else result
    comptime types = OperandTypes.unfused(
        DType.int8, given, interleaved=INTERLEAVED
    )
    var numbers = List[Int]()
    for i in range(2, len(words)):
        numbers.append(words[i])
    var problem = ConvProblem.of_numbers(numbers)
    var operands = Operands.bare(types)
    operands.alignment = words[1]
    var device = Device(80, 108)
    var refusal = Dp4a.refusal(problem, operands, device)
    if refusal:
        raise Error(refusal.value())
    var plan = Dp4a.plan(problem, operands, device)
    if words[0] != PLANNED:
        plan.tile = words[0]
    var tile = materialize[TILES]()[plan.tile]
    var blocks, rows = plan.grid()
    var elements = Writes[DType.int8](unsafe_from_address=OUTPUT_AT)
    var output = bytes_of(
        MemoryOutput(elements.unsafe_bitcast[Scalar[given]]())
    )
    if result == DType.int8:
        output = bytes_of(
            RoundedOutput(
                elements,
                problem.filters // INTERLEAVED,
                problem.output[1],
                problem.output[2],
            )
        )
    print(
        name_of(result, plan.tile, plan.accesses),
        blocks,
        rows,
        tile.threads(),
        tile.shared_bytes(),
        bytes_of(epilogue_of[given](False)),
        bytes_of(epilogue_of[given](True)),
        output,
        bytes_of(plan.geometry),
    )


def main() raises:
    comptime for result in OUTPUTS:
        comptime for tile in range(len(TILES)):
            comptime for accesses in range(len(ACCESSES)):
                comptime if emitted(result, tile, accesses):
                    var name = name_of(result, tile, accesses)
                    comptime if result == DType.int8:
                        write[RoundedOutput, tile, accesses](name)
                    else:
                        write[MemoryOutput[result], tile, accesses](name)
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(1, len(words)):
            numbers.append(Int(String(words[j])))
        comptime for result in OUTPUTS:
            if String(words[0]) == String(result):
                describe[result](numbers)
