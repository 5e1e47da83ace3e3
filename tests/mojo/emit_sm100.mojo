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
begins: the candidate, pixel, filter and group, and of its part of the sum the
first step and how many there are.
Parameters and geometry come as hexadecimal bytes, in which pointers are
`OUTPUT`, `BIAS_AT` and `SCALE_AT`, for the reader to replace.
"""

from max.gpu.host import get_gpu_target
from sm100_outputs import OUTPUT, Placed, Plain, TestOutput
from std.collections import Optional
from std.compile import compile_info
from std.memory import Pointer
from std.sys import argv, is_defined
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.epilogue import Activation, Epilogue
from operations.conv.memory import Reads, Writes
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm100.candidates import CANDIDATES, SHARED, candidate
from operations.nvidia.sm100.config import Conv2dConfig
from operations.nvidia.sm100.kernel import NUM_THREADS, Conv2dFpropKernel
from operations.nvidia.sm100.lambdas import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
    FusedWork,
)
from operations.nvidia.sm100.mma import instruction_descriptor
from operations.nvidia.sm100.scheduler import ClusterPlace, tile_of
from operations.nvidia.tma.operands import (
    activation_view,
    activation_walk,
    filter_view,
    output_view,
)

comptime BIAS_AT = 0x2222000000000000
comptime SCALE_AT = 0x3333000000000000


def number(index: Int) raises -> Int:
    """An argument behind the mode."""
    return Int(argv()[3 + index])


def problem_of() raises -> ConvProblem:
    """The problem that the arguments describe."""
    return ConvProblem.of_numbers([number(i) for i in range(PROBLEM_NUMBERS)])


def epilogue_of[
    bias_type: DType, out_type: DType
]() raises -> Epilogue[bias_type, out_type]:
    """The epilogue that the arguments describe."""
    return Epilogue[bias_type, out_type](
        has_bias=number(PROBLEM_NUMBERS) != 0,
        has_residual=number(PROBLEM_NUMBERS + 2) != 0,
        has_scale=number(PROBLEM_NUMBERS + 1) != 0,
        scale=Reads[DType.float32](unsafe_from_address=SCALE_AT),
        bias=Reads[bias_type](unsafe_from_address=BIAS_AT),
        residual=Reads[out_type](unsafe_from_address=16),
        beta=Float32(Float64(argv()[3 + PROBLEM_NUMBERS + 5])),
        activation=Activation(number(PROBLEM_NUMBERS + 3), 0.5, 2.0),
        final_activation=Activation(number(PROBLEM_NUMBERS + 4), 0.5, 2.0),
    )


def hexadecimal[T: AnyType](value: T) -> String:
    """A value's bytes, as hexadecimal digits."""
    comptime digits = "0123456789abcdef"
    var bytes = Pointer(to=value).unsafe_bitcast[UInt8]()
    var text = String()
    for i in range(size_of[T]()):
        var byte = Int(bytes.unsafe_offset(i)[])
        text += digits[byte=byte >> 4]
        text += digits[byte=byte & 15]
    return text


def listed[size: Int](values: IndexList[size]) -> String:
    """Numbers with commas."""
    var text = String(values[0])
    for i in range(1, size):
        text += String(t",{values[i]}")
    return text


def print_walk[rank: Int](traversal: Traversal):
    """What the activation's descriptor is made of."""
    var view = activation_view[rank](traversal)
    var box = activation_walk[rank - 2](traversal, 0)
    print(
        (
            t"act_extents={listed(view.extents)} act_steps={listed(view.steps)}"
            t" lower={listed(box.lower)} upper={listed(box.upper)}"
            t" strides={listed(box.stride)}"
        ),
        end=" ",
    )


@fieldwise_init
struct Emitted[
    act_type: DType,
    filter_type: DType,
    Output: TestOutput,
    bias_type: DType,
    config: Conv2dConfig[act_type, filter_type, Output.dtype],
    residual: Bool,
    register_based: Bool,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
]:
    """A kernel, and its entry with or without a residual."""

    comptime Kernel = Conv2dFpropKernel[
        Self.act_type,
        Self.filter_type,
        Self.Output,
        Self.bias_type,
        Self.config,
        elementwise_lambda_fn=Self.elementwise_lambda_fn,
        elementwise_compute_lambda_fn=Self.elementwise_compute_lambda_fn,
        register_based_epilogue=Self.register_based,
    ]

    @staticmethod
    def write[
        declaration: TrivialRegisterPassable,
        //,
        kernel: declaration,
        arch: StaticString,
    ](name: String) raises -> Int:
        """Writes an entry as PTX; returns how many values it captures."""
        var info = compile_info[
            kernel, emission_kind="asm", target=get_gpu_target[arch]()
        ]()
        with open(String(t"{argv()[1]}/{name}.ptx"), "w") as file:
            file.write(String(info.asm))
        return info.num_captures

    @staticmethod
    def describe(name: String, captures: Int):
        """Prints what the configuration says about the kernel."""
        comptime Kernel = Self.Kernel
        comptime chosen = Self.config
        comptime computes = Bool(Self.elementwise_compute_lambda_fn)
        comptime stores = Bool(Self.elementwise_lambda_fn)
        var instruction = instruction_descriptor[
            Self.act_type, Self.filter_type
        ](chosen.mma_shape[0], chosen.mma_shape[1])
        print(
            t"name={name} act={Self.act_type} filter={Self.filter_type}"
            t" out={Self.Output.dtype} bias={Self.bias_type}"
            t" residual={Int(Self.residual)} computes="
            t"{Int(Kernel.Work.computes)} stores={Int(Kernel.Work.stores)}"
            t" lambda_computes={Int(computes)}"
            t" lambda_stores={Int(stores)}"
            t" captures={captures}"
            t" registers={Int(Self.register_based)} threads={NUM_THREADS}"
            t" shared={chosen.shared_bytes()} group={chosen.cta_group}"
            t" cluster_m={chosen.cluster_shape[0]}"
            t" cluster_n={chosen.cluster_shape[1]} parts={chosen.split_k()}"
            t" tile_m={chosen.mma_shape[0]} tile_n={chosen.mma_shape[1]}"
            t" k_group={chosen.k_group_size}"
            t" stages={chosen.num_pipeline_stages}"
            t" accumulators={chosen.num_accum_pipeline_stages}"
            t" answers={chosen.num_clc_pipeline_stages}"
            t" outputs={chosen.num_output_stages}"
            t" residuals={chosen.num_epi_load_stages}"
            t" subtile={chosen.output_tile_shape[1]}"
            t" row={chosen.output_row_bytes()}"
            t" act_box={chosen.act_tile_dim0()}"
            t" filter_box={chosen.filter_tile_dim0()}"
            t" swizzle={chosen.block_swizzle_size}"
            t" input_releases={Kernel.input_consumer_arv_count}"
            t" accum_releases={Kernel.accum_pipeline_consumer_arv_count}"
            t" clc_releases={Kernel.clc_consumer_arv_count[Self.residual]()}"
            t" exchange_arrivals={Kernel.exchange_producer_arv_count}"
            t" exchange_releases={Kernel.exchange_consumer_arv_count}"
            t" dealloc_arrivals={Kernel.tmem_dealloc_arv_count}"
            t" barriers={chosen.num_barriers()}"
            t" instruction={instruction}"
            t" refusal={chosen.refusal()}"
        )

    @staticmethod
    def emit[arch: StaticString = "sm_100a"](name: String) raises:
        """Does what the mode says."""
        if argv()[2] == "compile":
            var captures: Int
            comptime if Self.residual:
                captures = Self.write[Self.Kernel.run_with_residual, arch](name)
            else:
                captures = Self.write[Self.Kernel.run, arch](name)
            Self.describe(name, captures)
            return
        var problem = problem_of()
        var traversal = Traversal(problem)
        var epilogue = epilogue_of[Self.bias_type, Self.Output.dtype]()
        var params = Self.Kernel.Params(
            problem, epilogue, Self.Output.of(problem)
        )
        var filter = filter_view(problem)
        var output = output_view(problem)
        print(
            (
                t"name={name} blocks={Self.config.blocks(traversal)}"
                t" filter_extents={listed(filter.extents)}"
                t" filter_steps={listed(filter.steps)}"
                t" out_extents={listed(output.extents)}"
                t" out_steps={listed(output.steps)}"
            ),
            end=" ",
        )
        if traversal.rank == 3:
            print_walk[3](traversal)
        elif traversal.rank == 4:
            print_walk[4](traversal)
        elif traversal.rank == 5:
            print_walk[5](traversal)
        print(
            t"params={hexadecimal(params)}"
            t" geometry={hexadecimal(Self.config.geometry(traversal))}"
            t" refusal={Self.config.can_implement(problem).or_else(String())}"
        )


def emit_type[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
    bias_type: DType,
    *indices: Int,
](name: String) raises:
    """Configurations of a type."""
    comptime for index in indices:
        comptime config = candidate[act_type, filter_type, out_type](index)
        Emitted[
            act_type,
            filter_type,
            Plain[out_type],
            bias_type,
            config,
            False,
            True,
        ].emit(String(t"{name}-{index}"))


def emit_typed[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
    bias_type: DType,
    index: Int,
](name: String) raises:
    """A candidate of a type; every second one with a residual."""
    Emitted[
        act_type,
        filter_type,
        Plain[out_type],
        bias_type,
        candidate[act_type, filter_type, out_type](index),
        index % 2 == 0,
        True,
    ].emit(String(t"{name}-{index}"))


def emit_every() raises:
    """For every candidate: a residual, every type, and every kind of fused
    work, in registers and after shared memory; every second one of these with a
    residual."""
    comptime Type = DType.bfloat16
    comptime for index in range(CANDIDATES):
        comptime config = candidate[Type, Type, Type](index)
        Emitted[Type, Type, Plain[Type], Type, config, True, True].emit(
            String(t"residual-{index}")
        )
        comptime for stored in [False, True]:
            comptime for rows in [False, True]:
                Emitted[
                    Type,
                    Type,
                    Placed[Type, stored],
                    Type,
                    config,
                    (index + Int(stored) + Int(rows)) % 2 == 0,
                    not rows,
                ].emit(
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
    Emitted[
        Type,
        Type,
        Plain[Type],
        Type,
        candidate[Type, Type, Type](index),
        residual,
        register_based,
        Optional[ElementwiseLambda](transposed),
        compute,
    ].emit(String(t"lambda-{'both' if computes else 'stores'}-{index}"))


def emit_placed[
    index: Int, residual: Bool, register_based: Bool
](name: String) raises:
    """A candidate with `placed` behind it."""
    comptime Type = DType.bfloat16
    Emitted[
        Type,
        Type,
        Plain[Type],
        Type,
        candidate[Type, Type, Type](index),
        residual,
        register_based,
        None,
        Optional[ElementwiseComputeLambda](placed),
    ].emit(name)


def emit_all() raises:
    """Every candidate, every type, every kind of fused work."""
    comptime Type = DType.bfloat16
    comptime for index in range(CANDIDATES):
        comptime config = candidate[Type, Type, Type](index)
        Emitted[Type, Type, Plain[Type], Type, config, False, True].emit(
            String(t"plain-{index}")
        )
    # A tile that four blocks share.
    Emitted[
        Type,
        Type,
        Plain[Type],
        Type,
        candidate[Type, Type, Type](SHARED),
        True,
        True,
    ].emit(String(t"residual-{SHARED}"))
    comptime for index in range(2):
        comptime config = candidate[Type, Type, Type](index)
        Emitted[Type, Type, Plain[Type], Type, config, True, True].emit(
            String(t"residual-{index}")
        )
        # In registers on one block, after shared memory on a pair, and the
        # other way round.
        Emitted[
            Type,
            Type,
            Placed[Type, False],
            Type,
            config,
            index == 1,
            index == 0,
        ].emit(String(t"computes-{index}"))
        Emitted[
            Type,
            Type,
            Placed[Type, True],
            Type,
            config,
            index == 0,
            index == 1,
        ].emit(String(t"stores-{index}"))
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
    # The last one's tiles two blocks share.
    emit_type[DType.int8, DType.int8, DType.float16, DType.float32, 0, 1, 8](
        "int8"
    )
    emit_placed[0, False, True]("lambda-computes-0")
    emit_placed[2, True, False]("lambda-computes-2")
    var output = Writes[Type](unsafe_from_address=OUTPUT)
    emit_lambdas[1, False, True, False](output, 0)
    emit_lambdas[0, True, False, True](output, 0)
    Emitted[
        Type,
        Type,
        Plain[Type],
        Type,
        candidate[Type, Type, Type](1),
        True,
        True,
    ].emit["sm_103a"]("sm103")


def print_refusals():
    """Why configurations cannot be built, a line each."""
    comptime Type = DType.bfloat16
    comptime Config = Conv2dConfig[Type, Type, Type]
    var one = Config.default_1sm()
    var two = Config.default_2sm()
    var wrong = one
    wrong.cta_group = 3
    print(wrong.refusal())
    wrong = one
    wrong.mma_shape[0] = 64
    print(wrong.refusal())
    print(Config.pipelined(264).refusal())
    print(Config.pipelined(144, cta_group=2).refusal())
    wrong = one
    wrong.mma_shape[2] = 32
    print(wrong.refusal())
    wrong = two
    wrong.block_tile_shape[1] = 256
    print(wrong.refusal())
    wrong = one
    wrong.block_tile_shape[2] = 128
    print(wrong.refusal())
    print(Config.pipelined(128, output_filters=48).refusal())
    print(Config.pipelined(128, output_filters=128).refusal())
    print(Config.pipelined(128, cta_group=2, cluster_m=3).refusal())
    print(Config.pipelined(128, cluster_m=4, cluster_n=4).refusal())
    print(Config.pipelined(48, cluster_m=4).refusal())
    print(Config.pipelined(64, cluster_k=4).refusal())
    print(Config.pipelined(128, k_group_size=7).refusal())
    wrong = one
    wrong.num_pipeline_stages = 7
    print(wrong.refusal())
    wrong = Config.pipelined(256)
    wrong.num_accum_pipeline_stages = 3
    print(wrong.refusal())
    wrong = one
    wrong.num_output_stages = 1
    print(wrong.refusal())
    wrong = one
    wrong.num_clc_pipeline_stages = 30
    print(wrong.refusal())
    print(Conv2dConfig[Type, DType.float16, Type].default_1sm().refusal())
    print(Conv2dConfig[Type, Type, DType.int8].default_1sm().refusal())
    comptime compute = Optional[ElementwiseComputeLambda](placed)
    print(FusedWork[Placed[Type, True], Type, None, compute].refusal())


def print_tiles() raises:
    """What each block of the grid computes, a line each."""
    comptime Type = DType.bfloat16
    var traversal = Traversal(problem_of())
    comptime for index in range(CANDIDATES):
        comptime config = candidate[Type, Type, Type](index)
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
