"""The Blackwell kernel without a GPU, for tests: what it compiles to, and what
a launch passes to it.

    emit_sm100 FOLDER compile
    emit_sm100 FOLDER refuse
    emit_sm100 FOLDER launch GEOMETRY... EPILOGUE...
    emit_sm100 FOLDER tiles GEOMETRY...

`compile` writes each kernel of `emit_all` as PTX, a file of its name, and
prints a line of `key=value` about its configuration; built with `-D EVERY`, it
is those of `emit_every`. `refuse` prints why
configurations that mean nothing are refused. `launch` prints, for each
kernel, what its launch passes for a problem: 22 numbers of a `ConvProblem`, in
its fields' order but for the output's extents, then whether there is a bias, a
scale, a residual, the codes of activation and final activation, and beta.
`tiles` prints, for each candidate, where each block of each cluster's work
begins: the candidate, pixel, filter and group, and of its share of the sum the
first step and how many there are.
Parameters and geometry come as hexadecimal bytes, in which pointers are
`OUTPUT`, `BIAS_AT` and `SCALE_AT`, for the reader to replace.
"""

from sm100_emitted import Emitted, epilogue_of, problem_of
from sm100_outputs import OUTPUT, Placed, Plain, TestOutput
from std.collections import Optional
from std.sys import argv, is_defined
from std.utils import IndexList

from operations.conv.memory import Writes
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
    FusedOutput,
)
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm100.candidates import CANDIDATES, SHARED, candidate
from operations.nvidia.sm100.config import Conv2dConfig, GemmTypes
from operations.nvidia.sm100.scheduler import ClusterPlace, tile_of


def emit_op[
    act_type: DType,
    filter_type: DType,
    Output: TestOutput,
    bias_type: DType,
    index: Int,
    residual: Bool,
    register_based: Bool,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
    *,
    scaled: Bool = False,
    arch: StaticString = "sm_100a",
](name: String) raises:
    """A candidate with an op's own epilogue."""
    comptime types = GemmTypes(act_type, filter_type, Output.dtype)
    comptime config = candidate(types, index)
    comptime Visitor = ConvVisitor[bias_type, scaled]
    Emitted[
        Output,
        Visitor,
        config,
        residual,
        register_based,
        elementwise_lambda_fn,
        elementwise_compute_lambda_fn,
    ].emit[arch](
        name,
        Visitor.of(epilogue_of[bias_type, Output.dtype](scaled)),
        bias_type,
        scaled,
    )


def emit_type[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
    bias_type: DType,
    *indices: Int,
    scaled: Bool = True,
](name: String) raises:
    """Configurations of a type."""
    comptime for index in indices:
        emit_op[
            act_type,
            filter_type,
            Plain[out_type],
            bias_type,
            index,
            False,
            True,
            scaled=scaled,
        ](String(t"{name}-{index}"))


def emit_typed[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
    bias_type: DType,
    index: Int,
](name: String) raises:
    """A candidate of a type; every second one with a residual."""
    emit_op[
        act_type,
        filter_type,
        Plain[out_type],
        bias_type,
        index,
        index % 2 == 0,
        True,
        scaled=True,
    ](String(t"{name}-{index}"))


def emit_every() raises:
    """For every candidate: a residual, every type, and every kind of fused
    work, in registers and after shared memory; every second one of these with a
    residual."""
    comptime Type = DType.bfloat16
    comptime for index in range(CANDIDATES):
        emit_op[Type, Type, Plain[Type], Type, index, True, True, scaled=True](
            String(t"residual-{index}")
        )
        comptime for stored in [False, True]:
            comptime for rows in [False, True]:
                emit_op[
                    Type,
                    Type,
                    Placed[Type, stored],
                    Type,
                    index,
                    (index + Int(stored) + Int(rows)) % 2 == 0,
                    not rows,
                    scaled=True,
                ](
                    String(
                        t"{'stores' if stored else 'computes'}"
                        t"{'-rows' if rows else ''}-{index}"
                    )
                )
        emit_typed[
            DType.float16, DType.float16, DType.float16, DType.float16, index
        ]("float16")
        emit_typed[
            DType.float32, DType.float32, DType.float32, DType.float32, index
        ]("float32")
        comptime act_type = (
            DType.float8_e5m2 if index % 2 == 1 else DType.float8_e4m3fn
        )
        emit_typed[
            act_type,
            DType.float8_e5m2,
            DType.bfloat16,
            DType.float32,
            index,
        ]("float8")
        emit_typed[DType.int8, DType.int8, DType.float16, DType.float32, index](
            "int8"
        )


def placed[
    dtype: DType, width: SIMDLength, *, alignment: Int = 1
](at: IndexList[2], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """A function behind the epilogue: adds the pixel modulo 5 and the filter
    modulo 3."""
    var result = value
    comptime for i in range(width):
        result[i] += Scalar[dtype](at[0] % 5 + (at[1] + i) % 3)
    return result


def emit_lambdas[
    index: Int, residual: Bool, register_based: Bool, computes: Bool
](output: Writes[DType.bfloat16], pixels: Int) raises:
    """A candidate with a function that stores to `[filter, pixel]`, alone or
    behind `placed`."""
    comptime Type = DType.bfloat16

    @__parameter
    @always_inline
    @__copy_capture(output, pixels)
    def transposed[
        dtype: DType, width: SIMDLength, *, alignment: Int = 1
    ](at: IndexList[2], value: SIMD[dtype, width]):
        comptime for i in range(width):
            output.unsafe_store(
                (at[1] + i) * pixels + at[0], value[i].cast[Type]()
            )

    comptime compute = Optional[ElementwiseComputeLambda](
        placed
    ) if computes else None
    emit_op[
        Type,
        Type,
        Plain[Type],
        Type,
        index,
        residual,
        register_based,
        Optional[ElementwiseLambda](transposed),
        compute,
    ](String(t"lambda-{'both' if computes else 'stores'}-{index}"))


def emit_placed[
    index: Int, residual: Bool, register_based: Bool
](name: String) raises:
    """A candidate with `placed` behind it."""
    comptime Type = DType.bfloat16
    emit_op[
        Type,
        Type,
        Plain[Type],
        Type,
        index,
        residual,
        register_based,
        None,
        Optional[ElementwiseComputeLambda](placed),
    ](name)


def emit_all() raises:
    """Every candidate, every type, every kind of fused work."""
    comptime Type = DType.bfloat16
    comptime for index in range(CANDIDATES):
        emit_op[Type, Type, Plain[Type], Type, index, False, True](
            String(t"plain-{index}")
        )
    # A tile that four blocks share.
    emit_op[
        Type,
        Type,
        Plain[Type],
        Type,
        SHARED,
        True,
        True,
        scaled=True,
    ](String(t"residual-{SHARED}"))
    comptime for index in range(2):
        emit_op[Type, Type, Plain[Type], Type, index, True, True, scaled=True](
            String(t"residual-{index}")
        )
        # In registers on one block, after shared memory on a pair, and the
        # other way round.
        emit_op[
            Type,
            Type,
            Placed[Type, False],
            Type,
            index,
            index == 1,
            index == 0,
        ](String(t"computes-{index}"))
        emit_op[
            Type,
            Type,
            Placed[Type, True],
            Type,
            index,
            index == 0,
            index == 1,
        ](String(t"stores-{index}"))
    emit_type[DType.float16, DType.float16, DType.float16, DType.float16, 0, 1](
        "float16"
    )
    emit_type[DType.float32, DType.float32, DType.float32, DType.float32, 0, 1](
        "float32"
    )
    emit_type[
        DType.float8_e4m3fn,
        DType.float8_e5m2,
        DType.bfloat16,
        DType.float32,
        0,
    ]("float8")
    emit_type[
        DType.float8_e5m2, DType.float8_e5m2, DType.bfloat16, DType.float32, 1
    ]("float8")
    # Of the last one tiles are shared by two blocks.
    emit_type[DType.int8, DType.int8, DType.float16, DType.float32, 0, 1](
        "int8"
    )
    emit_type[
        DType.int8, DType.int8, DType.float16, DType.float32, 8, scaled=False
    ]("int8")
    emit_placed[0, False, True]("lambda-computes-0")
    emit_placed[2, True, False]("lambda-computes-2")
    var output = Writes[Type](unsafe_from_address=OUTPUT)
    emit_lambdas[1, False, True, False](output, 0)
    emit_lambdas[0, True, False, True](output, 0)
    emit_op[
        Type,
        Type,
        Plain[Type],
        Type,
        1,
        True,
        True,
        arch="sm_103a",
    ]("sm103")


def print_refusals():
    """Why configurations cannot be built, a line each."""
    comptime Type = DType.bfloat16
    comptime Config = Conv2dConfig
    var types = GemmTypes(Type, Type, Type)
    var one = Config.default_1sm(types)
    var two = Config.default_2sm(types)
    var wrong = one
    wrong.cta_group = 3
    print(wrong.refusal())
    wrong = one
    wrong.mma_shape[0] = 64
    print(wrong.refusal())
    print(Config.pipelined(types, 264).refusal())
    print(Config.pipelined(types, 144, cta_group=2).refusal())
    wrong = one
    wrong.mma_shape[2] = 32
    print(wrong.refusal())
    wrong = two
    wrong.block_tile_shape[1] = 256
    print(wrong.refusal())
    wrong = one
    wrong.block_tile_shape[2] = 128
    print(wrong.refusal())
    wrong = one
    wrong.output_tile_shape[1] = 48
    print(wrong.refusal())
    wrong.output_tile_shape[1] = 128
    print(wrong.refusal())
    print(Config.pipelined(types, 128, cta_group=2, cluster_m=3).refusal())
    print(Config.pipelined(types, 128, cluster_m=4, cluster_n=4).refusal())
    print(Config.pipelined(types, 48, cluster_m=4).refusal())
    print(Config.pipelined(types, 64, cluster_k=4).refusal())
    print(Config.pipelined(types, 128, k_group_size=7).refusal())
    wrong = one
    wrong.num_pipeline_stages = 7
    print(wrong.refusal())
    wrong = Config.pipelined(types, 256)
    wrong.num_accum_pipeline_stages = 3
    print(wrong.refusal())
    wrong = one
    wrong.num_output_stages = 1
    print(wrong.refusal())
    wrong = one
    wrong.num_clc_pipeline_stages = 30
    print(wrong.refusal())
    print(GemmTypes(Type, DType.float16, Type).refusal())
    wrong = one
    wrong.types.out = DType.int8
    print(wrong.refusal())
    comptime compute = Optional[ElementwiseComputeLambda](placed)
    print(FusedOutput[Placed[Type, True], None, compute].refusal())


def print_tiles() raises:
    """What each block of the grid computes, a line each."""
    comptime Type = DType.bfloat16
    comptime types = GemmTypes(Type, Type, Type)
    var traversal = Traversal(problem_of(), Type)
    comptime for index in range(CANDIDATES):
        comptime config = candidate(types, index)
        var geometry = config.geometry(traversal)
        for work in range(geometry.tiles()):
            for rank in range(UInt32(config.cluster_size())):
                var place = ClusterPlace[config].of(rank)
                var tile = tile_of(geometry, place, work)
                print(
                    index,
                    tile.pixel,
                    tile.filter,
                    tile.group,
                    tile.first,
                    tile.rounds,
                )


def main() raises:
    if argv()[2] == "refuse":
        print_refusals()
    elif argv()[2] == "tiles":
        print_tiles()
    else:
        comptime if is_defined["EVERY"]():
            emit_every()
        else:
            emit_all()
