"""Writes the PTX of the GPU's kernels for few input channels and for depthwise
convolutions, one file a configuration, into the folder that is the only
argument; needs no GPU.

Prints a line a configuration: its file's name, the threads of a block, blocks
of a multiprocessor that its registers must allow, and its description.
"""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.gpu import depthwise_geometry, depthwise_strips
from operations.gpu.depthwise import DepthwiseKernel
from operations.gpu.depthwise_strip_kernel import StripKernel
from operations.sm90 import diagonal_plan, stem
from operations.sm90.diagonal import DiagonalKernel
from operations.sm90.diagonal_plan import (
    DIAGONAL_CANDIDATES,
    diagonal_candidate,
)
from operations.sm90.stem import StemKernel
from operations.sm90.stem_geometry import STEM_CANDIDATES, stem_candidate

comptime TYPE = DType.bfloat16
"""Of the operands."""


def write(name: String, ptx: String) raises:
    """Writes a file of PTX."""
    with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
        file.write(ptx)


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    comptime for index in range(STEM_CANDIDATES):
        comptime config = stem_candidate(index)
        comptime kernel = StemKernel[
            TYPE, DType.float32, TYPE, MemoryOutput[TYPE], config
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        write(String(t"stem{index}"), String(info.asm))
        print(String(t"stem{index}"), stem.THREADS, 1, config)
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime config = diagonal_candidate(index)
        comptime kernel = DiagonalKernel[
            TYPE, DType.float32, MemoryOutput[TYPE], config
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        write(String(t"diagonal{index}"), String(info.asm))
        print(
            String(t"diagonal{index}"),
            config.threads(),
            config.resident(),
            config,
        )
    comptime for index in range(depthwise_strips.STRIP_CANDIDATES):
        comptime config = depthwise_strips.strip_candidate[TYPE](index)
        comptime kernel = StripKernel[
            TYPE, DType.float32, TYPE, MemoryOutput[TYPE], config
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        write(String(t"strip{index}"), String(info.asm))
        print(
            String(t"strip{index}"),
            depthwise_strips.MAX_THREADS,
            config.resident(),
            config,
        )
    comptime for index in range(depthwise_geometry.DEPTHWISE_CANDIDATES):
        comptime config = depthwise_geometry.depthwise_candidate[TYPE](index)
        comptime kernel = DepthwiseKernel[
            MemoryActivation[TYPE],
            DType.float32,
            TYPE,
            MemoryOutput[TYPE],
            config,
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        write(String(t"depthwise{index}"), String(info.asm))
        print(
            String(t"depthwise{index}"),
            depthwise_geometry.THREADS,
            depthwise_geometry.RESIDENT,
            config,
        )
