"""Describes the GPU's kernels for few input channels, for depthwise convolutions,
for groups of few channels and for few pixels, and writes the PTX of those that `maxconv inspect` leaves out for
sm_90a, one file a configuration, into the folder that is the only argument;
needs no GPU.

Prints a line a configuration: its file's name, the threads of a block, blocks
of a multiprocessor that its registers must allow, and its description.
"""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv

from operations.conv.access import MemoryOutput
from operations.nvidia.generic import depthwise_geometry, depthwise_strips
from operations.nvidia.generic import gemv, gemv_launch
from operations.nvidia.generic.depthwise_strip_kernel import StripKernel
from operations.nvidia.sm90.diagonal import plan as diagonal_plan
from operations.nvidia.sm90.diagonal import slabs
from operations.nvidia.sm90.stem import geometry as stem_geometry

comptime TYPE = DType.bfloat16
"""Of the operands."""


def describe_others():
    """Describes what `maxconv inspect` writes, by the names of its files."""
    for index in range(stem_geometry.STEM_CANDIDATES):
        var config = stem_geometry.stem_candidate(index)
        print(
            String(t"stem-{index}"), config.threads(), config.resident, config
        )
    for index in range(diagonal_plan.DIAGONAL_CANDIDATES):
        var config = diagonal_plan.diagonal_candidate(index)
        print(
            String(t"diagonal-{index}"),
            config.max_threads(),
            config.resident(),
            config,
        )
        if config.group_chunks > 1:
            print(String(t"slabs-{index}"), slabs.SLAB_THREADS, 1, config)
    for index in range(depthwise_geometry.DEPTHWISE_CANDIDATES):
        var config = depthwise_geometry.depthwise_candidate(TYPE, index)
        print(
            String(t"depthwise-{index}"),
            depthwise_geometry.THREADS,
            depthwise_geometry.RESIDENT,
            config,
        )
    for rows in materialize[gemv_launch.ROWS]():
        for loads in ["gemv-vector", "gemv"]:
            print(String(t"{loads}-{rows}"), gemv.THREADS, gemv.RESIDENT, rows)


def main() raises:
    describe_others()
    comptime target = get_gpu_target["sm_90a"]()
    comptime for index in range(depthwise_strips.STRIP_CANDIDATES):
        comptime config = depthwise_strips.strip_candidate(TYPE, index)
        comptime kernel = StripKernel[
            TYPE, DType.float32, TYPE, MemoryOutput[TYPE], config
        ].run
        var info = compile_info[kernel, emission_kind="asm", target=target]()
        var name = String(t"depthwise-strip-{index}")
        with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
            file.write(String(info.asm))
        print(name, depthwise_strips.MAX_THREADS, config.resident(), config)
