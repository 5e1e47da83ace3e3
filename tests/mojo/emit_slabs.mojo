"""Writes the slab kernel for the emulator, as PTX, into the folder that is the
first argument; needs no GPU.

    emit_slabs FOLDER PROBLEM...

A problem is the multiprocessors to cut it for, 1 if the graph's work `AddPlace`
is fused behind it or 0, 1 if residuals have buffers of their own or 0, and the
numbers of `ConvProblem.of_numbers`, joined by an x. For each configuration two
files of its index, without and with that work, and for each problem a line: the
file's name and what its launch passes: blocks, threads, bytes of shared memory,
windows there, rows and columns of a window's box, its step along w, 1 if an H200
would take the kernel or 0, then the epilogue's parameters (bare; with scale, bias,
ReLU and residual; `unscaled_of`), the output and the geometry, as hexadecimal
bytes. Pointers are `SCALE_AT`, `BIAS_AT`, `RESIDUAL_AT` and `OUTPUT_AT`, for the
reader to replace.
"""

from add_place import AddPlace
from fused_epilogue import epilogue_of, unscaled_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import ComputedOutput, MemoryOutput, OutputTarget
from operations.conv.memory import Writes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm90.diagonal.plan import (
    DIAGONAL_CANDIDATES,
    DiagonalConfig,
    choose_diagonal,
    diagonal_candidate,
)
from operations.nvidia.sm90.diagonal.slab_kernel import SlabKernel
from operations.nvidia.sm90.diagonal.slabs import (
    SLAB_THREADS,
    SlabGeometry,
    SlabShape,
    SlabTiling,
)

comptime OUTPUT_AT = 0x4444000000000000

comptime Dtype = DType.bfloat16

comptime H200 = 132
"""Multiprocessors of a device that is asked whether a problem suits it."""


def write[
    Output: OutputTarget, config: DiagonalConfig
](folder: String, name: String) raises:
    """Writes a kernel."""
    comptime kernel = SlabKernel[Dtype, DType.float32, Output, config].run
    comptime target = get_gpu_target["sm_90a"]()
    var info = compile_info[kernel, emission_kind="asm", target=target]()
    with open(String(t"{folder}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def main() raises:
    var folder = String(argv()[1])
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime config = diagonal_candidate(index)
        comptime if config.group_chunks > 1:
            write[MemoryOutput[Dtype], config](folder, String(t"{index}-0"))
            comptime Placed = ComputedOutput[Dtype, 5, AddPlace]
            write[Placed, config](folder, String(t"{index}-1"))
    for i in range(2, len(argv())):
        var numbers = List[Int]()
        for word in String(argv()[i]).split("x"):
            numbers.append(Int(String(word)))
        var problem_numbers = List[Int]()
        for j in range(3, len(numbers)):
            problem_numbers.append(numbers[j])
        var problem = ConvProblem.of_numbers(problem_numbers)
        var index = choose_diagonal(problem)
        var config = diagonal_candidate(index)
        var tiling = SlabTiling(config, problem, numbers[0], numbers[2] == 1)
        var shape = SlabShape.of(config)
        var data = Writes[Dtype](unsafe_from_address=OUTPUT_AT)
        print(
            String(t"{index}-{numbers[1]}"),
            tiling.blocks(),
            SLAB_THREADS,
            tiling.shared_bytes,
            tiling.stages,
            shape.rows(),
            shape.columns() * shape.stride,
            shape.stride,
            Int(SlabTiling.suits(config, problem, H200)),
            bytes_of(epilogue_of[Dtype](False)),
            bytes_of(epilogue_of[Dtype](True)),
            bytes_of(unscaled_of[Dtype]()),
            bytes_of(
                ComputedOutput[Dtype, 5, AddPlace](data, AddPlace(1))
            ) if numbers[1]
            == 1 else bytes_of(MemoryOutput[Dtype](data)),
            bytes_of(SlabGeometry.of(problem, tiling)),
        )
