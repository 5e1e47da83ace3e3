"""A kernel of Blackwell's for tests: what it compiles to, what its configuration
says, and what a launch passes to it. Shared by the programs that emit them.

Parameters and geometry come as hexadecimal bytes, in which pointers are
`OUTPUT`, `BIAS_AT`, `SCALE_AT` and those of the program, for the reader to
replace.
"""

from max.gpu.host import get_gpu_target
from sm100_outputs import TestOutput
from std.collections import Optional
from std.compile import compile_info
from std.memory import Pointer
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.epilogue import Activation, Epilogue
from operations.conv.memory import Reads, Writes
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
)
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm100.config import Conv2dConfig
from operations.nvidia.sm100.kernel import NUM_THREADS, Conv2dFpropKernel
from operations.nvidia.sm100.layout import launch_shape, visitor_refusal
from operations.nvidia.sm100.mma import instruction_descriptor
from operations.nvidia.im2col.descriptors import (
    activation_view,
    activation_box,
    filter_view,
    output_view,
)

comptime BIAS_AT = 0x2222000000000000
comptime SCALE_AT = 0x3333000000000000
comptime WORKSPACE_AT = 0x4444000000000000


def word(index: Int) -> String:
    """An argument behind the mode; the mode `compile` has none, and whatever it
    needs of them is 0."""
    return "0" if argv()[2] == "compile" else String(argv()[3 + index])


def number(index: Int) raises -> Int:
    """A number behind the mode."""
    return Int(word(index))


def problem_of() raises -> ConvProblem:
    """The problem that the arguments describe."""
    return ConvProblem.of_numbers([number(i) for i in range(PROBLEM_NUMBERS)])


def epilogue_of[
    bias_type: DType, out_type: DType
](scaled: Bool) raises -> Epilogue[bias_type, out_type]:
    """The epilogue that the arguments describe, with a scale or without."""
    return Epilogue[bias_type, out_type](
        has_bias=number(PROBLEM_NUMBERS) != 0,
        has_residual=number(PROBLEM_NUMBERS + 2) != 0,
        has_scale=scaled,
        scale=Reads[DType.float32](unsafe_from_address=SCALE_AT),
        bias=Reads[bias_type](unsafe_from_address=BIAS_AT),
        residual=Reads[out_type](unsafe_from_address=16),
        beta=Float32(Float64(word(PROBLEM_NUMBERS + 5))),
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


def print_traversal[rank: Int](traversal: Traversal):
    """What the activation's descriptor is made of."""
    var view = activation_view[rank](traversal)
    var box = activation_box[rank - 2](traversal, 0)
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
    Output: TestOutput,
    Visitor: EpilogueVisitor,
    config: Conv2dConfig,
    residual: Bool,
    register_based: Bool,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
]:
    """A kernel, and its entry with or without a residual."""

    comptime Kernel = Conv2dFpropKernel[
        Self.Output,
        Self.Visitor,
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
    def describe(name: String, bias_type: DType, scaled: Bool, captures: Int):
        """Prints what the configuration says about the kernel."""
        comptime Kernel = Self.Kernel
        comptime chosen = Self.config
        comptime computes = Bool(Self.elementwise_compute_lambda_fn)
        comptime stores = Bool(Self.elementwise_lambda_fn)
        comptime instruction = instruction_descriptor(chosen)
        print(
            t"name={name} act={chosen.types.act} filter={chosen.types.filter}"
            t" out={Self.Output.dtype} bias={bias_type} scaled={Int(scaled)}"
            t" residual={Int(Self.residual)} computes="
            t"{Int(Kernel.Work.computes)} stores={Int(Kernel.Work.stores)}"
            t" lambda_computes={Int(computes)}"
            t" lambda_stores={Int(stores)}"
            t" captures={captures}"
            t" registers={Int(Self.register_based)} threads={NUM_THREADS}"
            t" shared={Kernel.shared_bytes()} group={chosen.cta_group}"
            t" cluster_m={chosen.cluster_shape[0]}"
            t" cluster_n={chosen.cluster_shape[1]} split_k={chosen.split_k()}"
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
    def emit[
        arch: StaticString = "sm_100a"
    ](
        name: String,
        visitor: Self.Visitor,
        bias_type: DType,
        scaled: Bool = False,
    ) raises:
        """Does what the mode says."""
        if argv()[2] == "compile":
            var captures: Int
            comptime if Self.residual:
                captures = Self.write[Self.Kernel.run_with_residual, arch](name)
            else:
                captures = Self.write[Self.Kernel.run, arch](name)
            Self.describe(name, bias_type, scaled, captures)
            return
        var problem = problem_of()
        var traversal = Self.config.traversal(problem)
        var shape = launch_shape(materialize[Self.config](), problem)
        var workspace = Writes[DType.float32](unsafe_from_address=WORKSPACE_AT)
        var params = Self.Kernel.Params(
            problem,
            visitor.prepared(shape, workspace),
            Self.Output.of(problem),
        )
        var filter = filter_view(problem)
        var output = output_view(problem, problem.group_filters())
        print(
            (
                t"name={name} blocks={Self.config.blocks(traversal)}"
                t" workspace={visitor.workspace_elements(shape)}"
                t" reducers={shape.reducers}"
                t" filter_extents={listed(filter.extents)}"
                t" filter_steps={listed(filter.steps)}"
                t" out_extents={listed(output.extents)}"
                t" out_steps={listed(output.steps)}"
            ),
            end=" ",
        )
        if traversal.rank == 3:
            print_traversal[3](traversal)
        elif traversal.rank == 4:
            print_traversal[4](traversal)
        elif traversal.rank == 5:
            print_traversal[5](traversal)
        var refusal = Self.config.problem_refusal(problem)
        if not refusal:
            refusal = visitor_refusal(
                visitor, materialize[Self.config](), problem
            )
        print(
            t"params={hexadecimal(params)}"
            t" geometry={hexadecimal(Self.config.geometry(traversal))}"
            t" refusal={refusal.or_else(String())}"
        )
