"""The loops of the peak of every unit that the target's assembler knows, to be
compiled and read: the program computes nothing of use."""

from operations.conv.memory import HostBuffer
from operations.cpu.dot.amx import Amx
from operations.cpu.dot.arm import MatrixUnit
from operations.cpu.dot.mma import DotUnit
from operations.cpu.dot.vectors import Avx512Bf16, Avx512Vnni, AvxVnni
from operations.cpu.dot.widening import Widening
from operations.cpu.gemm.mma import Fma
from operations.cpu.unit import MultiplyUnit, tile_outputs
from std.sys import argv


def run[U: MultiplyUnit, dtype: DType](chunks: Int):
    """Multiplies."""
    var sums = HostBuffer[DType.float32](tile_outputs[U]())
    U.multiply_registers[dtype](chunks, sums.elements)
    print(U.instruction(dtype), sums.elements[unsafe_offset=0])
    _ = sums^


def run_each[U: DotUnit](chunks: Int):
    """Multiplies every type of a unit that the target has."""
    comptime if not U.build_refusal():
        comptime for dtype in [
            DType.bfloat16,
            DType.float16,
            DType.int8,
            DType.uint8,
        ]:
            comptime if U.feature(dtype):
                run[U, dtype](chunks)


def main():
    var chunks = len(argv())
    run[Fma, DType.float32](chunks)
    run_each[Amx](chunks)
    run_each[Avx512Bf16](chunks)
    run_each[Avx512Vnni](chunks)
    run_each[AvxVnni](chunks)
    run_each[MatrixUnit[emulated=False]](chunks)
    run_each[Widening](chunks)
