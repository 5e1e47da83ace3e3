"""Outputs that take a kernel's sums of integers: what is left of the formula of
conv/quantization.mojo is computed where values are stored, neighbouring filters
of one pixel at a time. A kernel that stores sums in int32 thereby takes zero
points, residuals of integers and outputs of integers."""

from std.utils import IndexList
from std.utils.numerics import inf

from ..conv.access import ActivationSource, OutputTarget
from ..conv.epilogue import Activation, Epilogue
from ..conv.memory import CACHE_LINE, Reads, Writes
from ..conv.operands import Arguments, OperandTypes
from ..conv.problem import SPATIAL
from ..conv.quantization import Steps
from .run_time import run_time
from .zero_point import ZeroPointTable

comptime SUM_TYPE = DType.int32
"""Of an output that takes sums."""


struct SummedOutput[
    Inner: OutputTarget, bias_type: DType, residual_type: DType, block: Int
](OutputTarget):
    """An output as a kernel sees it that stores sums.

    Parameters:
        Inner: The output.
        bias_type: Of the bias.
        residual_type: Of the residual.
        block: Channels of a block, whose number kernels then pass for the
            depth; 0 for channels last.
    """

    comptime dtype = SUM_TYPE
    comptime interleaved = Self.Inner.interleaved
    comptime computes = False
    comptime stores = True

    comptime Work = Epilogue[Self.bias_type, Self.residual_type]

    var inner: Self.Inner
    var has_bias: Bool
    """As in `Epilogue`, like all that follow."""
    var has_residual: Bool
    var has_scale: Bool
    var scale: Reads[DType.float32]
    var bias: Reads[Self.bias_type]
    var residual: Reads[Self.residual_type]
    var beta: Float32
    var residual_zero_point: Float32
    var activation: Int
    var activation_p0: Float32
    var activation_p1: Float32
    var final_activation: Int
    var final_p0: Float32
    var final_p1: Float32
    var steps: Steps
    """To an output of integers."""
    var zero_point: ZeroPointTable

    def __init__(
        out self,
        inner: Self.Inner,
        epilogue: Self.Work,
        steps: Steps,
        zero_point: ZeroPointTable,
    ):
        """Takes an output and what is made of the sums.

        Args:
            inner: The output.
            epilogue: What is made of them.
            steps: To an output of integers.
            zero_point: What the activation's takes from them.
        """
        self.inner = inner
        self.has_bias = epilogue.has_bias
        self.has_residual = epilogue.has_residual
        self.has_scale = epilogue.has_scale
        self.scale = epilogue.scale
        self.bias = epilogue.bias
        self.residual = epilogue.residual
        self.beta = epilogue.beta
        self.residual_zero_point = 0
        comptime if Self.residual_type.is_integral():
            self.residual_zero_point = epilogue.residual_zero_point[0]
        self.activation = epilogue.activation.code
        self.activation_p0 = epilogue.activation.p0
        self.activation_p1 = epilogue.activation.p1
        self.final_activation = epilogue.final_activation.code
        self.final_p0 = epilogue.final_activation.p0
        self.final_p1 = epilogue.final_activation.p1
        self.steps = steps
        self.zero_point = zero_point

    @always_inline
    def epilogue(self) -> Self.Work:
        """What is made of the sums. It is kept in pieces, as an output's fields
        are all trivial."""
        return Self.Work(
            has_bias=self.has_bias,
            has_residual=self.has_residual,
            has_scale=self.has_scale,
            scale=self.scale,
            bias=self.bias,
            residual=self.residual,
            beta=self.beta,
            activation=Activation(
                self.activation, self.activation_p0, self.activation_p1
            ),
            final_activation=Activation(
                self.final_activation, self.final_p0, self.final_p1
            ),
            residual_zero_point=self.residual_zero_point,
        )

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """Nothing that may be written."""
        return Writes[Self.dtype](unsafe_from_address=CACHE_LINE)

    def addresses(self) -> Int:
        var addresses = self.inner.addresses()
        if self.has_scale:
            addresses |= Int(self.scale)
        if self.has_bias:
            addresses |= Int(self.bias)
        if self.has_residual:
            addresses |= Int(self.residual)
        return addresses

    def batch_last(self) -> Bool:
        return self.inner.batch_last()

    @always_inline
    def store[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
        value: SIMD[Self.dtype, width],
    ):
        comptime Vector = SIMD[DType.float32, width]
        var pixel = at
        var k = filter
        comptime if Self.block > 0:
            k += at[0] * Self.block
            pixel[0] = 0
        var sums = value
        if self.zero_point.present:
            sums -= self.zero_point.load[width, alignment](pixel, k)
        # As a CPU's form of integers: one rounding for scale and bias.
        var work = self.epilogue()
        var v = sums.cast[DType.float32]().fma(
            work.scaled[width, alignment](Vector(1), k),
            work.load_bias[width, alignment](k),
        )
        # One copy of all formulas serves both activations.
        var activation = work.activation
        for step in range(run_time(2)):
            v = activation.apply[width](v)
            if step == 0:
                if work.has_residual:
                    v = work.real_residual(
                        work.load_residual[width, alignment](offset)
                    ).fma(Vector(work.beta), v)
                activation = work.final_activation
        comptime if Self.Inner.dtype.is_integral():
            self.inner.store[width, alignment](
                n, at, filter, offset, self.steps.apply[Self.Inner.dtype](v)
            )
        else:
            self.inner.store[width, alignment](
                n, at, filter, offset, v.cast[Self.Inner.dtype]()
            )


comptime SummedArguments[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
] = Arguments[
    Source,
    SummedOutput[Output, bias_type, residual_type, max(Source.interleaved, 0)],
    DType.float32,
    SUM_TYPE,
]
"""The operands of a call whose kernels store sums."""


def takes_sums(types: OperandTypes, centered: Bool) -> Bool:
    """Whether kernels store the sums of an op.

    Args:
        types: Of the op's operands.
        centered: Whether the activation has a zero point.
    """
    return types.input.is_integral() and (
        centered or types.output.is_integral() or types.input == DType.uint8
    )


def kernel_types(types: OperandTypes, centered: Bool = False) -> OperandTypes:
    """What kernels see of an op's types.

    Args:
        types: Of the op's operands.
        centered: Whether the activation has a zero point.
    """
    var result = types
    if takes_sums(types, centered):
        result.output = SUM_TYPE
        result.residual = SUM_TYPE
        result.fused_output = True
        result.scaled = False
    return result


def with_sums[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    //,
](
    arguments: Arguments[Source, Output, bias_type, residual_type],
    zero_point: ZeroPointTable,
) -> SummedArguments[Source, Output, bias_type, residual_type]:
    """The operands of a call for kernels that store sums.

    Parameters:
        Source: How the activation is reached.
        Output: How the output is reached.
        bias_type: Of the bias.
        residual_type: Of the residual.

    Args:
        arguments: Of the call.
        zero_point: What the activation's takes from them.
    """
    comptime infinity = inf[DType.float32]()
    var steps = Steps(1, 0, 0, 0)
    comptime if Output.dtype.is_integral():
        steps = Steps.of[Output.dtype](
            arguments.quantization, -infinity, infinity
        )
    comptime Call = SummedArguments[Source, Output, bias_type, residual_type]
    return Call(
        arguments.activation,
        arguments.filter,
        Epilogue[DType.float32, SUM_TYPE].identity(),
        Call.Output(arguments.output, arguments.epilogue, steps, zero_point),
    )
