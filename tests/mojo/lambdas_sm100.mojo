"""The Blackwell kernel with functions behind it, by its launcher: a program to
be compiled, as there is no such GPU. With `-D FUSED` the output has work of the
graph compiler's behind it too, which must not compile."""

from max.gpu.host import DeviceContext
from sm100_outputs import OUTPUT, Placed, Plain, TestOutput
from std.collections import Optional
from std.sys import argv, is_defined
from std.utils import IndexList

from operations.conv.epilogue import Activation, Epilogue
from operations.conv.memory import Reads, Writes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm100.candidates import candidate
from operations.nvidia.sm100.config import GemmTypes
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
)
from operations.nvidia.sm100.launch import GemmOperands, launch_gemm
from operations.nvidia.sm100.plan import GemmPlan
from operations.nvidia.stream import Stream

comptime Type = DType.bfloat16


def doubled[
    dtype: DType, width: SIMDLength, *, alignment: Int = 1
](at: IndexList[2], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """A function without captures."""
    return value + value


def launch[Output: TestOutput](problem: ConvProblem) raises:
    """Launches with both functions; one captures a pointer and a number."""
    var memory = Writes[Type](unsafe_from_address=OUTPUT)
    var filters = problem.filters

    @__parameter
    @always_inline
    @__copy_capture(memory, filters)
    def save[
        dtype: DType, width: SIMDLength, *, alignment: Int = 1
    ](at: IndexList[2], value: SIMD[dtype, width]):
        memory.unsafe_store(at[0] * filters + at[1], value.cast[Type]())

    var operand = Reads[Type](unsafe_from_address=16)
    var residual = Reads[Output.dtype](unsafe_from_address=16)
    var epilogue = Epilogue[Type, Output.dtype](
        has_bias=False,
        has_residual=False,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=operand,
        residual=residual,
        beta=0,
        activation=Activation(0, 0, 0),
        final_activation=Activation(0, 0, 0),
    )
    comptime config = candidate(GemmTypes(Type, Type, Output.dtype), 0)
    var queue = Stream(DeviceContext())
    launch_gemm[
        config,
        elementwise_lambda_fn=Optional[ElementwiseLambda](save),
        elementwise_compute_lambda_fn=Optional[ElementwiseComputeLambda](
            doubled
        ),
    ](
        GemmPlan(config, problem),
        problem,
        GemmOperands(operand, operand, residual, Output.of(problem)),
        ConvVisitor[Type].of(epilogue),
        queue,
    )


def main() raises:
    var problem = ConvProblem.of_numbers(
        [Int(argument) for argument in argv()[1:]]
    )
    comptime if is_defined["FUSED"]():
        launch[Placed[Type, False]](problem)
    else:
        launch[Plain[Type]](problem)
