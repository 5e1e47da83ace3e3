"""The Blackwell kernel with functions behind it, launched by its launcher; not
to be run without a GPU. `-D MISUSE=1` has an output without a function, `-D
MISUSE=2` one that nothing stores: neither must compile."""

from max.gpu.host import DeviceContext
from std.collections import Optional
from std.sys import argv, get_defined_int
from std.utils import IndexList

from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.memory import Reads, Writes
from operations.conv.problem import ConvProblem
from operations.sm100.candidates import candidate
from operations.sm100.lambdas import ElementwiseComputeLambda, ElementwiseLambda
from operations.sm100.launch import convolve

comptime Type = DType.bfloat16
comptime MISUSE = get_defined_int["MISUSE", 0]()


def doubled[
    dtype: DType, width: SIMDLength, *, alignment: Int = 1
](at: IndexList[2], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """A function without captures."""
    return value + value


def launch(
    problem: ConvProblem,
    epilogue: Epilogue[Type, Type],
    data: Reads[Type],
    output: Writes[Type],
) raises:
    """Launches all combinations."""
    var filters = problem.filters

    @__parameter
    @always_inline
    @__copy_capture(output, filters)
    def save[
        dtype: DType, width: SIMDLength, *, alignment: Int = 1
    ](at: IndexList[2], value: SIMD[dtype, width]):
        output.unsafe_store(at[0] * filters + at[1], value.cast[Type]())

    var ctx = DeviceContext()
    comptime config = candidate[Type, Type, Type](0)
    convolve[
        config,
        elementwise_compute_lambda_fn=Optional[ElementwiseComputeLambda](
            doubled
        ),
    ](ctx, problem, data, data, epilogue, MemoryOutput(output))
    convolve[
        config,
        elementwise_lambda_fn=Optional[ElementwiseLambda](save),
        elementwise_compute_lambda_fn=Optional[ElementwiseComputeLambda](
            doubled
        ),
    ](ctx, problem, data, data, epilogue, MemoryOutput(output))


def main() raises:
    var numbers = [Int(argument) for argument in argv()[1:]]
    launch(
        ConvProblem.of_numbers(numbers),
        Epilogue[Type, Type](
            has_bias=False,
            has_residual=False,
            has_scale=False,
            scale=Reads[DType.float32](unsafe_from_address=16),
            bias=Reads[Type](unsafe_from_address=16),
            residual=Reads[Type](unsafe_from_address=16),
            beta=0,
            activation=Activation(0, 0, 0),
            final_activation=Activation(0, 0, 0),
        ),
        Reads[Type](unsafe_from_address=16),
        Writes[Type](unsafe_from_address=16),
    )
