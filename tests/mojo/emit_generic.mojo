"""Writes the kernels on CUDA cores, and the stem's, for the emulator, as PTX,
into the folder that is the first argument; needs no GPU.

    emit_generic FOLDER PROBLEM...

A problem is a kernel, a type of activation and filter, and the numbers of
`ConvProblem.of_numbers`, joined by an x. For each a line of what its launch passes: the name of the kernel's file,
blocks, threads, bytes of shared memory, then the epilogue's parameters (bare;
with scale, bias, ReLU and residual) and the geometry, as hexadecimal bytes, and
what comes behind it, or -1. Pointers of the epilogue are `SCALE_AT`, `BIAS_AT`
and `RESIDUAL_AT`, for the reader to replace. The rest is bfloat16.
"""

from fused_epilogue import epilogue_of
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.math import ceildiv
from std.sys import argv

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.generic import depthwise_geometry, rows
from operations.nvidia.generic import grouped as grouped_kernel
from operations.nvidia.generic.depthwise import DepthwiseKernel
from operations.nvidia.generic.depthwise_launch import Depthwise
from operations.nvidia.generic.depthwise_strip_kernel import StripKernel
from operations.nvidia.generic.depthwise_strips import (
    STRIP_CANDIDATES,
    StripGeometry,
    strip_candidate,
)
from operations.nvidia.generic.grouped import PIXELS, GroupedKernel
from operations.nvidia.generic.grouped_launch import Grouped
from operations.nvidia.generic.implicit_gemm import VECTOR, DirectKernel
from operations.nvidia.generic.implicit_gemm_launch import TILES, ImplicitGemm
from operations.nvidia.inspect import GpuKernel
from operations.nvidia.sm90.stem import kernel as stem
from operations.nvidia.sm90.stem.geometry import stem_candidate
from operations.nvidia.sm90.stem.launch import STEM_CANDIDATES, Stem

comptime TYPES = [DType.bfloat16, DType.int8, DType.float8_e4m3fn]
"""Of activation and filter."""

comptime OUT_TYPE = DType.bfloat16
comptime TARGET = get_gpu_target["sm_90a"]()
comptime Output = MemoryOutput[OUT_TYPE]


def write[
    declaration: TrivialRegisterPassable, //, kernel: declaration
](name: String) raises:
    """Writes a kernel."""
    var info = compile_info[kernel, emission_kind="asm", target=TARGET]()
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(String(info.asm))


def plan_of[
    Kernel: GpuKernel, dtype: DType
](problem: ConvProblem, device: Device) raises -> Kernel.Plan:
    """The plan of a kernel that takes the problem."""
    var types = OperandTypes.unfused(dtype, OUT_TYPE)
    var refusal = Kernel.type_refusal(types)
    if not refusal:
        refusal = Kernel.refusal(problem, Operands.bare(types), device)
    if refusal:
        raise Error(refusal.value())
    return Kernel.plan(problem, Operands.bare(types), device)


def describe(
    name: String,
    blocks: Int,
    threads: Int,
    shared_bytes: Int,
    geometry: String,
    behind: Int = -1,
):
    """Prints a problem's line."""
    print(
        name,
        blocks,
        threads,
        shared_bytes,
        bytes_of(epilogue_of[OUT_TYPE](False)),
        bytes_of(epilogue_of[OUT_TYPE](True)),
        geometry,
        behind,
    )


def depthwise[dtype: DType](problem: ConvProblem) raises:
    """Writes and describes the depthwise kernel of any filter."""
    var plan = plan_of[Depthwise, dtype](problem, Device(90, 132))
    ref geometry = plan.geometry
    comptime for index in range(depthwise_geometry.DEPTHWISE_CANDIDATES):
        if plan.candidate == index:
            var name = String(t"depthwise-{dtype}-{index}")
            comptime config = depthwise_geometry.depthwise_candidate(
                dtype, index
            )
            write[
                DepthwiseKernel[
                    MemoryActivation[dtype],
                    DType.float32,
                    OUT_TYPE,
                    Output,
                    config,
                ].run
            ](name)
            describe(
                name,
                ceildiv(Int(geometry.items), Int(geometry.block_items))
                * Int(geometry.slabs.value),
                depthwise_geometry.THREADS,
                plan.filter_bytes,
                bytes_of(geometry),
            )


def strips[dtype: DType](problem: ConvProblem) raises:
    """Writes and describes the strip kernel, as other GPUs have it."""
    var plan = plan_of[Depthwise, dtype](problem, Device(80, 4))
    comptime for index in range(STRIP_CANDIDATES):
        if plan.strip == index:
            var name = String(t"strips-{dtype}-{index}")
            comptime config = strip_candidate(dtype, index)
            write[
                StripKernel[dtype, DType.float32, OUT_TYPE, Output, config].run
            ](name)
            describe(
                name,
                plan.strips.blocks,
                plan.strips.threads(),
                plan.strips.shared_bytes,
                bytes_of(StripGeometry.of(problem, plan.strips)),
            )


def grouped[dtype: DType](problem: ConvProblem) raises:
    """Writes and describes the kernel for groups of few filters."""
    var plan = plan_of[Grouped, dtype](problem, Device(90, 132))
    comptime for width in [1, grouped_kernel.VECTOR]:
        if plan.vector_loads == (width > 1):
            var name = String(t"grouped-{dtype}-{width}")
            write[
                GroupedKernel[
                    MemoryActivation[dtype],
                    Output,
                    DType.float32,
                    OUT_TYPE,
                    width,
                ].run
            ](name)
            describe(
                name,
                plan.blocks,
                rows.THREADS,
                rows.Rows[PIXELS].bytes(),
                bytes_of(plan.geometry),
            )


def implicit_gemm[dtype: DType](problem: ConvProblem) raises:
    """Writes and describes the implicit GEMM on CUDA cores."""
    var plan = plan_of[ImplicitGemm, dtype](problem, Device(90, 4))
    comptime for index in range(len(TILES)):
        comptime for width in [1, VECTOR]:
            if plan.tile == index and plan.vector_loads == (width > 1):
                comptime tile = TILES[index]
                var name = String(t"implicit_gemm-{dtype}-{index}-{width}")
                write[
                    DirectKernel[
                        MemoryActivation[dtype],
                        Output,
                        DType.float32,
                        OUT_TYPE,
                        tile,
                        width,
                    ].run
                ](name)
                describe(
                    name,
                    plan.blocks,
                    rows.THREADS,
                    tile.staged_bytes() + rows.Rows[tile.pixels].bytes(),
                    bytes_of(plan.geometry),
                    Int(plan.vector_stores),
                )


def few_channels(problem: ConvProblem) raises:
    """Writes and describes the stem's kernel."""
    var plan = plan_of[Stem, OUT_TYPE](problem, Device(90, 132))
    comptime for index in range(STEM_CANDIDATES):
        if plan.candidate == index:
            var name = String(t"stem-{index}")
            comptime config = stem_candidate(index)
            write[
                stem.StemKernel[
                    OUT_TYPE, DType.float32, OUT_TYPE, Output, config
                ].run
            ](name)
            describe(
                name,
                plan.blocks,
                config.threads(),
                plan.tiling.shared_bytes(),
                bytes_of(plan.geometry),
            )


def describe_problem[dtype: DType](kernel: String, problem: ConvProblem) raises:
    """Writes and describes the kernel of a problem."""
    if kernel == "depthwise":
        depthwise[dtype](problem)
    elif kernel == "strips":
        strips[dtype](problem)
    elif kernel == "grouped":
        grouped[dtype](problem)
    elif kernel == "implicit_gemm":
        implicit_gemm[dtype](problem)
    else:
        few_channels(problem)


def main() raises:
    for i in range(2, len(argv())):
        var words = String(argv()[i]).split("x")
        var numbers = List[Int]()
        for j in range(2, len(words)):
            numbers.append(Int(String(words[j])))
        var problem = ConvProblem.of_numbers(numbers)
        comptime for dtype in TYPES:
            if String(words[1]) == String(dtype):
                describe_problem[dtype](String(words[0]), problem)
