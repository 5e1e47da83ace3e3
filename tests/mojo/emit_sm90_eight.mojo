"""Writes Hopper's implicit GEMM of 8-bit inputs for the emulator, as PTX, into
the folder that is the first argument; needs no GPU.

    emit_sm90_eight FOLDER HEIGHT WIDTH CHANNELS FILTERS

For each of `TYPES` and each candidate of `EMULATED` a file of both, and a line
of what its launch passes for one image, a 3x3 filter and a padding of 1, then
one with `NARROW` channels; of candidates whose blocks share a tile, shared by
`SPLIT`. A line is the file's name, then what a line of emit_emulated.mojo has
behind its index.
"""

from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import ACTIVATION_NONE
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm90.gemm.candidates import candidate
from operations.nvidia.sm90.gemm.grid import Grid
from operations.nvidia.sm90.gemm.kernel import ConvKernel

comptime TYPES = [DType.int8, DType.float8_e5m2, DType.float8_e4m3fn]
comptime OUT = DType.bfloat16
"""Of the output and the bias."""

comptime EMULATED = [4, 8, 6]
"""A tile of its own, one that blocks share, one whose threads store."""

comptime NARROW = 48
"""Channels that do not fill a row of a stage."""

comptime SPLIT = 2
"""Blocks that share a tile, where they may."""

comptime OUTPUT = 0x1111000000000000
comptime BIAS_AT = 0x2222000000000000


def problem_of(
    height: Int, width: Int, channels: Int, filters: Int
) raises -> ConvProblem:
    """One image, a filter of 3x3, the output's size the input's."""
    var problem = ConvProblem(
        spatial_rank=2,
        batch=1,
        channels=channels,
        filters=filters,
        groups=1,
        input=IndexList[SPATIAL](1, height, width),
        filter=IndexList[SPATIAL](1, 3, 3),
        output=IndexList[SPATIAL](1, height, width),
        stride=IndexList[SPATIAL](fill=1),
        dilation=IndexList[SPATIAL](fill=1),
        pad_before=IndexList[SPATIAL](0, 1, 1),
        pad_after=IndexList[SPATIAL](0, 1, 1),
    )
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return problem


def print_launch[
    dtype: DType, index: Int
](name: String, problem: ConvProblem) raises:
    """Prints what a candidate's launch passes."""
    comptime config = candidate(index)
    comptime Kernel = ConvKernel[
        dtype, MemoryOutput[OUT], ConvVisitor[OUT], config
    ]
    var none = Activation(ACTIVATION_NONE, 0, 0)
    var epilogue = Epilogue[OUT, OUT](
        has_bias=True,
        has_residual=False,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=Reads[OUT](unsafe_from_address=BIAS_AT),
        residual=Reads[OUT](unsafe_from_address=16),
        beta=1,
        activation=none,
        final_activation=none,
    )
    var params = Kernel.Params(
        problem,
        ConvVisitor[OUT].of(epilogue),
        MemoryOutput[OUT](Writes[OUT](unsafe_from_address=OUTPUT)),
    )
    var traversal = Traversal(problem, dtype)
    comptime split = SPLIT if config.splits() else 1
    var grid = Grid.of(config, traversal, config.cluster_size() * split, split)
    var geometry = grid.geometry(config, traversal)
    comptime if split > 1:
        geometry.split(config.halo, split)
    print(
        name,
        config.threads(),
        Kernel.shared_bytes(),
        grid.clusters * config.cluster_size() * split,
        config.cluster_size() * split,
        Int(grid.keeps_filters),
        config.act_tile_dim0(),
        config.epilogue.pixels(size_of[OUT]()),
        config.filter_tile_dim0(),
        traversal.upper(2, config.halo),
        problem.filters,
        bytes_of(params),
        bytes_of(geometry),
    )


def main() raises:
    var height = Int(argv()[2])
    var width = Int(argv()[3])
    var channels = Int(argv()[4])
    var filters = Int(argv()[5])
    comptime for dtype in TYPES:
        comptime for index in EMULATED:
            comptime Kernel = ConvKernel[
                dtype, MemoryOutput[OUT], ConvVisitor[OUT], candidate(index)
            ]
            var info = compile_info[
                Kernel.run,
                emission_kind="asm",
                target=get_gpu_target["sm_90a"](),
            ]()
            var name = String(t"{dtype}-{index}")
            with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
                file.write(String(info.asm))
            print_launch[dtype, index](
                name, problem_of(height, width, channels, filters)
            )
            print_launch[dtype, index](
                name, problem_of(height, width, NARROW, filters)
            )
