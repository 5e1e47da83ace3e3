"""Writes kernels that the emulator runs, as PTX, into the folder that is the
first argument; needs no GPU.

    emit_emulated FOLDER HEIGHT WIDTH CHANNELS FILTERS BIAS

`add.ptx` adds vectors, `sums.ptx` sums rows by shuffles and shared memory. For
each candidate of the Hopper kernel in `EMULATED` a file of its index, and a
line of what its launch passes for one image, a 3x3 filter and a padding of 1,
then a line for a filter of one tap, `POINTWISE` times the height and the
filters, on `MULTIPROCESSORS`, and one for 3x3 with `NARROW` channels. Then, for
each candidate of `RELAYED`, a line for the filter of one tap, on one
multiprocessor, in relays. Then, for each candidate of `ROW_STORES`, lines for
each number of `ODD` filters, 3x3 and `POINTWISE` times the height: plain, with a
residual, of which `BETA` times is added, and with SiLU too. Then, for each of
`GATHERED`, a line for each of `GATHERED_CHANNELS` and `GATHERED_FILTERS`: plain,
with a residual, with SiLU too;
and of the last one, plain, a line for each of `SPLITS`; before it the same lines of
`DIRECT_GATHER`, of `DIRECT_CHANNELS`. Then lines of `ENDED`, bare
and with SiLU and a residual. Then `PAIRED`, and a line for a filter of one tap,
`POINTWISE` times the height and the filters, and one for that height alone. Then
`SPLIT`, and a line for each number of blocks
that share a tile of `SPLITS`, 3x3. At last `UPSAMPLED` and its line, an image that is
enlarged: its filters are those of four pixels. A line is its kind, index, threads, bytes of shared memory,
blocks, blocks of a cluster, 1 if it keeps its filters, pixels of an activation
load and of an output box, filters of a filter load, the upper corner of the
traversal along w, filters at whose multiples a store's box ends, then the
epilogue's parameters, the geometry and that of gathering, as hexadecimal bytes. Pointers are `OUTPUT`, `BIAS_AT` and
`RESIDUAL_AT`, for the reader to replace.
"""

from max.gpu import block_dim, block_idx, thread_idx
from hexadecimal import bytes_of
from max.gpu.host import get_gpu_target
from max.gpu.primitives import block
from std.compile import compile_info
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.access import MemoryOutput, OutputTarget
from operations.conv.depth_to_space import DepthToSpace, DepthToSpaceOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    GEOMETRY_BLOCK_D,
    GEOMETRY_CROP_D,
    GEOMETRY_LENGTH,
)
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem, Geometry
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.relays import MOST_RELAYS, Relays
from operations.nvidia.sm90.gemm.candidates import CANDIDATES, candidate
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.epilogue.params import EpilogueParams
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.gather import GatherGeometry
from operations.nvidia.sm90.gemm.grid import Grid
from operations.nvidia.sm90.gemm.kernel import ConvKernel
from operations.tuning_sm90 import gemm_config

comptime EMULATED = [4, 5]
"""Candidates: a block alone, and two that share loads."""

comptime RELAYED = [15]
"""Whose blocks run in relays."""

comptime ROW_STORES = [31, 33, 30]
"""Candidates whose threads store rows of what TMA loads: whole ones, a warp's
filters, and the same of tiles without a halo."""

comptime GATHERED = [26, 27, 29]
"""Candidates whose threads load: of whole tiles, in turns, by one consumer."""

comptime GATHERED_CHANNELS = [13, 70, 131]
"""Less than a row of a stage, and two and three slices; pixels that begin at
multiples of 2 and of 4 bytes."""

comptime GATHERED_FILTERS = [71, 64, 129]
"""Of the same convolutions."""

comptime DIRECT_GATHER = [35]
"""Candidates whose threads load straight into the rings."""

comptime DIRECT_CHANNELS = [12, 68, 132]
"""As `GATHERED_CHANNELS`, of pixels that begin at multiples of 8 bytes."""

comptime ENDED = [12, 17]
"""Candidates whose tiles end within a sub-tile of filters: a block alone, and two
that share filters. The convolution has two tiles along the filters."""

comptime SMALL = [18, 19]
"""Candidates whose sub-tiles have 16 pixels. The convolution has a tile and a
half along the filters."""

comptime PAIRED = CANDIDATES
"""Behind the table: ping-pong tiles in clusters that share filters, of which threads
store rows. The convolution of one tap has an odd number of tiles for two
clusters."""

comptime SPLIT = [9, 20, 21, 22]
"""Candidates whose blocks share a tile's sum; no other case's. The consumers
share its filters, its pixels, and its filters; there is one. The rings serve the
exchange of the second and third."""

comptime SPLITS = [2, 3, 5]
"""How many of them: the last are more than there are sub-tiles of some."""

comptime UPSAMPLED = 7
"""A candidate that stores pixels of an enlarged image; no other case's."""

comptime ODD = [5, 13, 60, 71, 129]
"""Filters that are no whole pieces of 16 bytes: less than one, of one tile, of
two, of three; 60 are halves of pieces."""

comptime POINTWISE = 3
"""Of the convolution of one tap: several tiles along both dimensions."""

comptime NARROW = 24
"""Channels that do not fill a row of a stage."""

comptime MULTIPROCESSORS = 5
"""That it runs on."""

comptime OUTPUT = 0x1111000000000000
comptime BIAS_AT = 0x2222000000000000
comptime RESIDUAL_AT = 0x3333000000000000
comptime BETA = 2
"""What residuals are multiplied with."""
comptime THREADS = 128
"""Of a block of `sums`."""

comptime Dtype = DType.bfloat16


def add(
    a: Reads[DType.float32],
    b: Reads[DType.float32],
    sum: Writes[DType.float32],
    length: Int32,
):
    """Adds two vectors."""
    var i = block_idx.x * block_dim.x + thread_idx.x
    if i < Int(length):
        sum[i] = a[i] + b[i]


def sums(
    values: Reads[DType.float32], totals: Writes[DType.float32], length: Int32
):
    """A block sums one row."""
    var total = Float32(0)
    for i in range(Int(thread_idx.x), Int(length), THREADS):
        total += values[Int(block_idx.x) * Int(length) + i]
    var whole = block.sum[block_size=THREADS, broadcast=False](total)
    if thread_idx.x == 0:
        totals[Int(block_idx.x)] = whole


def config_of(index: Int) -> Sm90Config:
    """The configuration of a row of the table, or of `PAIRED`."""
    if index < CANDIDATES:
        return candidate(index)
    # Tile, cluster, consumers, ping-pong of filters by pixels, halo, stages.
    var numbers: List[Int] = [64, 64, 2, 1, 1, 2, 0, 1, 8, 12, 12, 0, 0, 0]
    # Sub-tile, buffers, fragment; in place, and in whole rows.
    numbers.extend([32, 2, 2, 8, 1, 0, 0, 1])
    return gemm_config(numbers)


def write(folder: String, name: String, text: String) raises:
    """Writes a PTX file."""
    with open(String(t"{folder}/{name}.ptx"), "w") as file:
        file.write(text)


def problem_of(
    height: Int, width: Int, channels: Int, filters: Int, taps: Int
) raises -> ConvProblem:
    """One image, a filter of `taps` along both axes, the output's size the
    input's, or of two taps one more."""
    var more = Int(taps == 2)
    var problem = ConvProblem(
        spatial_rank=2,
        batch=1,
        channels=channels,
        filters=filters,
        groups=1,
        input=IndexList[SPATIAL](1, height, width),
        filter=IndexList[SPATIAL](1, taps, taps),
        output=IndexList[SPATIAL](1, height + more, width + more),
        stride=IndexList[SPATIAL](fill=1),
        dilation=IndexList[SPATIAL](fill=1),
        pad_before=IndexList[SPATIAL](0, taps // 2, taps // 2),
        pad_after=IndexList[SPATIAL](0, taps // 2, taps // 2),
    )
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return problem


def in_memory() -> MemoryOutput[Dtype]:
    """The output of a candidate."""
    return MemoryOutput[Dtype](Writes[Dtype](unsafe_from_address=OUTPUT))


def enlarged(
    problem: ConvProblem,
) raises -> DepthToSpaceOutput[MemoryOutput[Dtype]]:
    """The output of a convolution of an image that is enlarged twice, with a
    filter of 3x3 and a padding of 1."""
    var values = Array[Int64, GEOMETRY_LENGTH](fill=0)
    values[GEOMETRY_BLOCK_D] = 1
    for axis in range(1, SPATIAL):
        values[GEOMETRY_BLOCK_D + axis] = 2
        values[GEOMETRY_CROP_D + axis] = 1
    var geometry = Geometry(
        Reads[DType.int64](unsafe_from_address=Int(Pointer(to=values))),
        GEOMETRY_LENGTH,
    )
    _ = values^
    var shape = IndexList[4](
        1, 2 * problem.input[1], 2 * problem.input[2], problem.filters // 4
    )
    return DepthToSpaceOutput(
        in_memory(), DepthToSpace(geometry, problem, shape)
    )


def emit_kernel[index: Int, Output: OutputTarget]() raises:
    """Writes a candidate."""
    comptime Kernel = ConvKernel[
        Dtype, Output, ConvVisitor[Dtype], config_of(index)
    ]
    comptime target = get_gpu_target["sm_90a"]()
    comptime if config_of(index).gathers():
        var info = compile_info[
            Kernel.run_gathered, emission_kind="asm", target=target
        ]()
        write(String(argv()[1]), String(index), String(info.asm))
    else:
        var info = compile_info[
            Kernel.run, emission_kind="asm", target=target
        ]()
        write(String(argv()[1]), String(index), String(info.asm))


def print_launch[
    index: Int, Output: OutputTarget
](
    kind: StaticString,
    problem: ConvProblem,
    output: Output,
    has_bias: Bool,
    multiprocessors: Int,
    split_k: Int = 1,
    has_residual: Bool = False,
    activation: Int = ACTIVATION_NONE,
    relays: Int = 1,
) raises:
    """Prints what a candidate's launch passes; of several relays, with one stage
    of loads less under way."""
    comptime config = config_of(index)
    comptime Kernel = ConvKernel[Dtype, Output, ConvVisitor[Dtype], config]
    var none = Activation(ACTIVATION_NONE, 0, 0)
    var epilogue = Epilogue[Dtype, Dtype](
        has_bias=has_bias,
        has_residual=has_residual,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=Reads[Dtype](unsafe_from_address=BIAS_AT),
        residual=Reads[Dtype](unsafe_from_address=16),
        beta=BETA,
        activation=Activation(activation, 0, 0),
        final_activation=none,
    )
    var params = Kernel.Params(
        problem,
        ConvVisitor[Dtype].of(epilogue),
        output,
        Reads[Output.dtype](unsafe_from_address=RESIDUAL_AT),
    )
    var traversal = Traversal(problem, Dtype)
    var grid = Grid.of(config, traversal, multiprocessors, split_k)
    var geometry = grid.geometry(config, traversal)
    if split_k > 1:
        geometry.split(config.halo, split_k)
    if relays > 1:
        geometry.relays = Relays(grid.waves(), most=relays)
        geometry.idle_stages = 2
    print(
        kind,
        index,
        config.threads(),
        Kernel.shared_bytes(),
        grid.clusters * config.cluster_size() * split_k,
        config.cluster_size() * split_k,
        Int(grid.keeps_filters),
        config.act_tile_dim0(),
        config.epilogue.pixels(size_of[Dtype]()),
        config.filter_tile_dim0(),
        traversal.upper(2, config.halo),
        config.group_filters(problem.filters),
        bytes_of(params),
        bytes_of(geometry),
        bytes_of(GatherGeometry.of(traversal)),
    )


def emit_fused[
    index: Int, Output: OutputTarget
](
    kind: StaticString, problem: ConvProblem, output: Output, has_bias: Bool
) raises:
    """Writes a candidate, and prints what its launches pass: bare, and with SiLU
    and a residual."""
    emit_kernel[index, Output]()
    print_fused[index](kind, problem, output, has_bias)


def print_fused[
    index: Int, Output: OutputTarget
](
    kind: StaticString,
    problem: ConvProblem,
    output: Output,
    has_bias: Bool,
    split_k: Int = 1,
) raises:
    """Prints what a candidate's launches pass: bare, and with SiLU and a residual.
    """
    for silu in [False, True]:
        print_launch[index](
            kind,
            problem,
            output,
            has_bias,
            MULTIPROCESSORS,
            split_k,
            has_residual=silu,
            activation=ACTIVATION_SILU if silu else ACTIVATION_NONE,
        )


def main() raises:
    comptime target = get_gpu_target["sm_90a"]()
    var folder = String(argv()[1])
    var added = compile_info[add, emission_kind="asm", target=target]()
    write(folder, "add", String(added.asm))
    var summed = compile_info[sums, emission_kind="asm", target=target]()
    write(folder, "sums", String(summed.asm))
    var height = Int(argv()[2])
    var width = Int(argv()[3])
    var channels = Int(argv()[4])
    var filters = Int(argv()[5])
    var has_bias = Int(argv()[6]) != 0
    var problem = problem_of(height, width, channels, filters, 3)
    var pointwise = problem_of(
        POINTWISE * height, width, channels, POINTWISE * filters, 1
    )
    var tall = problem_of(POINTWISE * height, width, channels, filters, 3)
    var narrow = problem_of(height, width, NARROW, filters, 3)
    var upsampled = problem_of(height, width, channels, filters, 2)
    var output = in_memory()
    comptime Output = type_of(output)
    comptime for i in range(len(EMULATED)):
        comptime index = materialize[EMULATED]()[i]
        comptime units = config_of(index).cluster_size()
        emit_kernel[index, Output]()
        print_launch[index]("same", problem, output, has_bias, units)
        print_launch[index](
            "pointwise", pointwise, output, has_bias, MULTIPROCESSORS
        )
        print_launch[index]("narrow", narrow, output, has_bias, units)
    comptime for i in range(len(RELAYED)):
        comptime index = materialize[RELAYED]()[i]
        emit_kernel[index, Output]()
        print_launch[index](
            "relayed", pointwise, output, has_bias, 1, relays=MOST_RELAYS
        )
    comptime for i in range(len(ROW_STORES)):
        comptime index = materialize[ROW_STORES]()[i]
        emit_kernel[index, Output]()
        for odd in materialize[ODD]():
            for way in range(3):
                print_launch[index](
                    "odd",
                    problem_of(POINTWISE * height, width, channels, odd, 3),
                    output,
                    has_bias,
                    MULTIPROCESSORS,
                    has_residual=way > 0,
                    activation=(
                        ACTIVATION_SILU if way == 2 else ACTIVATION_NONE
                    ),
                )
    comptime for i in range(len(GATHERED)):
        comptime index = materialize[GATHERED]()[i]
        emit_kernel[index, Output]()
        for way in range(3):
            print_launch[index](
                "gathered",
                problem_of(
                    POINTWISE * height,
                    width,
                    materialize[GATHERED_CHANNELS]()[way],
                    materialize[GATHERED_FILTERS]()[way],
                    3,
                ),
                output,
                has_bias,
                MULTIPROCESSORS,
                has_residual=way > 0,
                activation=ACTIVATION_SILU if way == 2 else ACTIVATION_NONE,
            )
    comptime for i in range(len(DIRECT_GATHER)):
        comptime index = materialize[DIRECT_GATHER]()[i]
        emit_kernel[index, Output]()
        for way in range(3):
            print_launch[index](
                "direct",
                problem_of(
                    POINTWISE * height,
                    width,
                    materialize[DIRECT_CHANNELS]()[way],
                    materialize[GATHERED_FILTERS]()[way],
                    3,
                ),
                output,
                has_bias,
                MULTIPROCESSORS,
                has_residual=way > 0,
                activation=ACTIVATION_SILU if way == 2 else ACTIVATION_NONE,
            )
        comptime for i in range(len(SPLITS)):
            comptime count = materialize[SPLITS]()[i]
            print_launch[index](
                "direct-split",
                problem_of(
                    height,
                    width,
                    materialize[DIRECT_CHANNELS]()[2],
                    filters,
                    3,
                ),
                output,
                has_bias,
                MULTIPROCESSORS,
                count,
            )
    comptime shared = materialize[GATHERED]()[2]
    comptime for i in range(len(SPLITS)):
        comptime count = materialize[SPLITS]()[i]
        print_launch[shared](
            "gathered-split",
            problem_of(
                height, width, materialize[GATHERED_CHANNELS]()[2], filters, 3
            ),
            output,
            has_bias,
            MULTIPROCESSORS,
            count,
        )
    comptime for i in range(len(ENDED)):
        comptime index = materialize[ENDED]()[i]
        comptime filters = 2 * config_of(index).block_tile_shape[1]
        emit_fused[index](
            "ended",
            problem_of(POINTWISE * height, width, channels, filters, 3),
            output,
            has_bias,
        )
    comptime for i in range(len(SMALL)):
        comptime index = materialize[SMALL]()[i]
        comptime filters = config_of(index).block_tile_shape[1] * 3 // 2
        emit_fused[index](
            "small",
            problem_of(POINTWISE * height, width, channels, filters, 3),
            output,
            has_bias,
        )
    emit_kernel[PAIRED, Output]()
    for more in [POINTWISE, 1]:
        print_launch[PAIRED](
            "paired",
            problem_of(POINTWISE * height, width, channels, more * filters, 1),
            output,
            has_bias,
            MULTIPROCESSORS,
        )
    comptime for i in range(len(SPLIT)):
        comptime index = materialize[SPLIT]()[i]
        emit_kernel[index, Output]()
        comptime for j in range(len(SPLITS)):
            comptime count = materialize[SPLITS]()[j]
            print_fused[index]("split", tall, output, has_bias, count)
    var large = enlarged(upsampled)
    emit_kernel[UPSAMPLED, type_of(large)]()
    print_launch[UPSAMPLED](
        "upsampled", upsampled, large, has_bias, MULTIPROCESSORS
    )
