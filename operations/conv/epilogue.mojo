"""The epilogue contract, shared by every target.

Of an accumulator value `v` of output element `[n, ..., k]` the epilogue makes

    final_activation(activation(scale[k] * v + bias[k])
                     + beta * (residual[n, ..., k] - residual_zero_point))

in float32, rounds it once to the output's type, passes it to what the graph
compiler fused behind the op, and stores it.
"""

from std.collections import Optional
from std.math import exp, tanh
from std.sys._assembly import inlined_assembly
from std.sys.info import is_gpu, is_nvidia_gpu, size_of
from std.utils import IndexList, StaticTuple

from .device_value import DeviceValue
from .memory import CACHE_LINE, Reads
from .fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_HARD_SIGMOID,
    ACTIVATION_HARD_SWISH,
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SIGMOID,
    ACTIVATION_SILU,
    GEOMETRY_ACTIVATION,
    GEOMETRY_FINAL_ACTIVATION,
    GEOMETRY_HAS_BIAS,
    GEOMETRY_HAS_RESIDUAL,
    GEOMETRY_RESIDUAL_ZERO_POINT,
    SCALAR_ACTIVATION_P0,
    SCALAR_ACTIVATION_P1,
    SCALAR_BETA,
    SCALAR_FINAL_P0,
    SCALAR_FINAL_P1,
    SCALARS_LENGTH,
)
from .problem import ConvProblem, Geometry

comptime SQRT_TWO_OVER_PI = Float32(0.79788456080286535588)


@always_inline
def _quotient[
    width: Int
](v: SIMD[DType.float32, width], divisor: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """`v / divisor`; on a GPU through the reciprocal instruction, which is
    within an ulp and needs no call for each lane."""
    comptime if is_nvidia_gpu():
        var result = v
        comptime for i in range(width):
            result[i] *= inlined_assembly[
                "rcp.approx.ftz.f32 $0, $1;",
                Float32,
                constraints="=f,f",
                has_side_effect=False,
            ](divisor[i])
        return result
    else:
        return v / divisor


@always_inline
def _with_nan[
    width: Int
](v: SIMD[DType.float32, width], result: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """A function's values, NaN where its arguments are: the standard library's
    `exp` and `tanh` clamp them on a CPU."""
    comptime if is_gpu():
        return result
    return v.eq(v).select(result, v)


@always_inline
def clamped[
    width: Int
](v: SIMD[DType.float32, width], low: Float32, high: Float32) -> SIMD[
    DType.float32, width
]:
    """Values within limits; NaN stays NaN.

    Parameters:
        width: Lanes.

    Args:
        v: The values.
        low: The lower limit.
        high: The upper limit.
    """
    comptime Vector = SIMD[DType.float32, width]
    # Comparisons rather than min and max, which lose NaN.
    var raised = v.lt(low).select(Vector(low), v)
    return raised.gt(high).select(Vector(high), raised)


comptime ERF_BOUND = Float32(5.6)
"""Where erf(v / sqrt(2)) is 1 in float32, and `ERF_NUMERATOR`'s quotient too."""

comptime ERF_NUMERATOR = [
    Float32(4.341187158349858e-08),
    Float32(1.3107306501944398e-05),
    Float32(0.000376517997970535),
    Float32(0.009589046975986235),
    Float32(0.07136899531959268),
    Float32(0.7978840812442317),
]
"""Of powers of v^2, the highest first: `v` times it over `ERF_DENOMINATOR` is
erf(v / sqrt(2)) for values up to `ERF_BOUND`, fitted to within 5.8e-8, relative
to 1 / v."""

comptime ERF_DENOMINATOR = [
    Float32(1.182166429022148e-06),
    Float32(8.026189727830367e-05),
    Float32(0.0019932570377721877),
    Float32(0.029707912825266185),
    Float32(0.25611143704905354),
    Float32(1.0),
]


@always_inline
def _polynomial[
    width: Int, //, coefficients: Array[Float32, _]
](x: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """The value of a polynomial whose highest coefficient comes first."""
    comptime highest = coefficients[0]
    var value = SIMD[DType.float32, width](highest)
    comptime for i in range(1, len(coefficients)):
        comptime next = coefficients[i]
        value = value.fma(x, SIMD[DType.float32, width](next))
    return value


@always_inline
def _gelu[
    width: Int
](v: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """`v * (1 + erf(v / sqrt(2))) / 2`, in float32 within 1.6e-7 of it for
    values up to 1 and 1.6e-7 of the value above."""
    var x = clamped(v, -ERF_BOUND, ERF_BOUND)
    var square = x * x
    var erf = x * _quotient(
        _polynomial[ERF_NUMERATOR](square), _polynomial[ERF_DENOMINATOR](square)
    )
    var half = v * 0.5
    return half.fma(clamped(erf, -1, 1), half)


@fieldwise_init
struct Activation(DeviceValue, ImplicitlyCopyable, Movable):
    """One elementwise function, chosen at run time by its `ACTIVATION_*` code.
    """

    var code: Int
    var p0: Float32
    var p1: Float32

    @always_inline
    def apply[
        width: Int
    ](self, v: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
        """The function of every lane.

        Parameters:
            width: Lanes.

        Args:
            v: The values.

        Returns:
            The function's values; `v` for `ACTIVATION_NONE`.
        """
        if self.code == ACTIVATION_NONE:
            return v
        # Comparisons rather than min and max: NaN stays NaN, as in PyTorch.
        if self.code == ACTIVATION_RELU:
            return v.lt(0).select(SIMD[DType.float32, width](0), v)
        if self.code == ACTIVATION_CLAMP:
            return clamped(v, self.p0, self.p1)
        if self.code == ACTIVATION_LEAKY_RELU:
            return v.gt(0).select(v, v * self.p0)
        return self._smooth[width](v)

    @always_inline
    def _smooth[
        width: Int
    ](self, v: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
        """The functions that are neither linear nor made of comparisons."""
        if self.code == ACTIVATION_SIGMOID:
            return _with_nan(
                v, _quotient(SIMD[DType.float32, width](1), 1 + exp(-v))
            )
        if self.code == ACTIVATION_SILU:
            return _quotient(v, 1 + exp(-v))
        if (
            self.code == ACTIVATION_HARD_SWISH
            or self.code == ACTIVATION_HARD_SIGMOID
        ):
            var ramp = clamped(v + 3, 0, 6) * Float32(1.0 / 6.0)
            return ramp * v if self.code == ACTIVATION_HARD_SWISH else ramp
        if self.code == ACTIVATION_GELU:
            return _gelu(v)
        if self.code == ACTIVATION_GELU_TANH:
            var cubic = v + 0.044715 * v * v * v
            return 0.5 * v * (1 + tanh(SQRT_TWO_OVER_PI * cubic))
        return _with_nan(v, tanh(v))


struct Epilogue[bias_type: DType, residual_type: DType](
    DeviceValue, ImplicitlyCopyable, Movable
):
    """What happens to an accumulator before the store, except for what the
    graph compiler fused. It is a kernel's argument on every target.

    `scale` and `bias` have one value a filter, `residual` the output's shape in
    row-major order, all in the kernel's memory; each is read only if its flag
    is set."""

    var has_bias: Bool
    var has_residual: Bool
    var has_scale: Bool
    var scale: Reads[DType.float32]
    var bias: Reads[Self.bias_type]
    var residual: Reads[Self.residual_type]
    var beta: Float32
    var activation: Activation
    var final_activation: Activation
    var residual_zero_point: StaticTuple[
        Float32, 1 if Self.residual_type.is_integral() else 0
    ]
    """Of a residual of integers; of another there is none."""

    def __init__(
        out self,
        *,
        has_bias: Bool,
        has_residual: Bool,
        has_scale: Bool,
        scale: Reads[DType.float32],
        bias: Reads[Self.bias_type],
        residual: Reads[Self.residual_type],
        beta: Float32,
        activation: Activation,
        final_activation: Activation,
        residual_zero_point: Float32 = 0,
    ):
        """Gathers the fields.

        Args:
            has_bias: See the fields, like the others.
            has_residual: The same.
            has_scale: The same.
            scale: The same.
            bias: The same.
            residual: The same.
            beta: The same.
            activation: The same.
            final_activation: The same.
            residual_zero_point: The same.
        """
        self.has_bias = has_bias
        self.has_residual = has_residual
        self.has_scale = has_scale
        self.scale = scale
        self.bias = bias
        self.residual = residual
        self.beta = beta
        self.activation = activation
        self.final_activation = final_activation
        self.residual_zero_point = {fill = residual_zero_point}

    def __init__(
        out self,
        geometry: Geometry,
        scalars: Reads[DType.float32],
        bias: Reads[Self.bias_type],
        residual: Reads[Self.residual_type],
        scale: Optional[Reads[DType.float32]] = None,
    ):
        """Reads the epilogue off the op's operands.

        Args:
            geometry: The decoded geometry operand.
            scalars: `SCALARS_LENGTH` values in host memory.
            bias: One value a filter, or nothing that may be read.
            residual: The residual, or nothing that may be read.
            scale: One value a filter, if the op has a scale.
        """
        self.has_bias = geometry[GEOMETRY_HAS_BIAS] != 0
        self.has_residual = geometry[GEOMETRY_HAS_RESIDUAL] != 0
        self.has_scale = Bool(scale)
        self.scale = scale.or_else(
            Reads[DType.float32](unsafe_from_address=CACHE_LINE)
        )
        self.bias = bias
        self.residual = residual
        self.beta = scalars[unsafe_offset=SCALAR_BETA]
        self.activation = Activation(
            geometry[GEOMETRY_ACTIVATION],
            scalars[unsafe_offset=SCALAR_ACTIVATION_P0],
            scalars[unsafe_offset=SCALAR_ACTIVATION_P1],
        )
        self.final_activation = Activation(
            geometry[GEOMETRY_FINAL_ACTIVATION],
            scalars[unsafe_offset=SCALAR_FINAL_P0],
            scalars[unsafe_offset=SCALAR_FINAL_P1],
        )
        self.residual_zero_point = {
            fill = Float32(geometry[GEOMETRY_RESIDUAL_ZERO_POINT])
        }

    @staticmethod
    def identity() -> Self:
        """The epilogue that changes nothing."""
        # Nothing at this address is read.
        comptime nowhere = CACHE_LINE
        var none = Activation(ACTIVATION_NONE, 0, 0)
        return Self(
            has_bias=False,
            has_residual=False,
            has_scale=False,
            scale=Reads[DType.float32](unsafe_from_address=nowhere),
            bias=Reads[Self.bias_type](unsafe_from_address=nowhere),
            residual=Reads[Self.residual_type](unsafe_from_address=nowhere),
            beta=0,
            activation=none,
            final_activation=none,
        )

    def is_identity(self) -> Bool:
        """Whether `apply` returns what it is given."""
        return not (
            self.has_scale
            or self.has_bias
            or self.has_residual
            or self.activation.code != ACTIVATION_NONE
            or self.final_activation.code != ACTIVATION_NONE
        )

    @always_inline
    def apply[
        width: Int, alignment: Int = 1
    ](self, v: SIMD[DType.float32, width], filter: Int, offset: Int) -> SIMD[
        DType.float32, width
    ]:
        """The epilogue of `width` neighbouring filters of one pixel.

        Parameters:
            width: How many filters.
            alignment: Elements of which `filter` and `offset` are multiples,
                and the operands' addresses too. A GPU reads as many at once.

        Args:
            v: Their accumulators.
            filter: The first filter.
            offset: The first element's row-major offset in the output.

        Returns:
            The values to round and store.
        """
        return self.finish[width](
            self.scaled[width, alignment](v, filter),
            self.load_bias[width, alignment](filter),
            self.load_residual[width, alignment](offset),
        )

    @always_inline
    def stored[
        sum_type: DType, //, dtype: DType, width: Int, alignment: Int = 1
    ](self, sums: SIMD[sum_type, width], filter: Int, offset: Int) -> SIMD[
        dtype, width
    ]:
        """`apply` of sums, rounded to the output's type; an output of int32
        takes them as they are.

        Parameters:
            sum_type: Of the sums.
            dtype: Of the output.
            width: How many filters.
            alignment: As for `apply`.

        Args:
            sums: The accumulators.
            filter: As for `apply`.
            offset: As for `apply`.
        """
        comptime if dtype == DType.int32:
            return sums.cast[dtype]()
        else:
            return self.apply[width, alignment](
                sums.cast[DType.float32](), filter, offset
            ).cast[dtype]()

    @always_inline
    def scaled[
        width: Int, alignment: Int = 1
    ](self, v: SIMD[DType.float32, width], filter: Int) -> SIMD[
        DType.float32, width
    ]:
        """Accumulators of neighbouring filters, each times its filter's scale.

        Parameters:
            width: How many filters.
            alignment: Elements of which offsets and addresses are multiples.

        Args:
            v: The accumulators.
            filter: The first filter.
        """
        if not self.has_scale:
            return v
        comptime bytes = alignment * size_of[DType.float32]()
        return v * self.scale.unsafe_load[width=width, alignment=bytes](filter)

    @always_inline
    def load_bias[
        width: Int, alignment: Int = 1
    ](self, filter: Int) -> SIMD[DType.float32, width]:
        """The bias of neighbouring filters, or zeros.

        Parameters:
            width: How many filters.
            alignment: Elements of which offsets and addresses are multiples.

        Args:
            filter: The first filter.
        """
        if not self.has_bias:
            return 0
        comptime bytes = alignment * size_of[Self.bias_type]()
        return self.bias.unsafe_load[width=width, alignment=bytes](filter).cast[
            DType.float32
        ]()

    @always_inline
    def load_residual[
        width: Int, alignment: Int = 1
    ](self, offset: Int) -> SIMD[Self.residual_type, width]:
        """The residual of neighbouring filters of one pixel, or zeros.

        Parameters:
            width: How many filters.
            alignment: Elements of which offsets and addresses are multiples.

        Args:
            offset: The first element's row-major offset in the output.
        """
        if not self.has_residual:
            return 0
        comptime bytes = alignment * size_of[Self.residual_type]()
        return self.residual.unsafe_load[width=width, alignment=bytes](offset)

    @always_inline
    def finish[
        width: Int
    ](
        self,
        v: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
        residual: SIMD[Self.residual_type, width],
    ) -> SIMD[DType.float32, width]:
        """`apply` for operands that have been loaded.

        Parameters:
            width: How many values, of whichever filters and pixels.

        Args:
            v: Their accumulators, `scaled`.
            bias: What `load_bias` returned for each.
            residual: What `load_residual` returned for each.

        Returns:
            The values to round and store.
        """
        var result = v
        if self.has_bias:
            result += bias
        result = self.activation.apply[width](result)
        return self.add_residual[width](result, residual)

    @always_inline
    def add_residual[
        width: Int
    ](
        self,
        v: SIMD[DType.float32, width],
        residual: SIMD[Self.residual_type, width],
    ) -> SIMD[DType.float32, width]:
        """The steps of `finish` behind the activation.

        Parameters:
            width: How many values, of whichever filters and pixels.

        Args:
            v: The activated values.
            residual: What `load_residual` returned for each.

        Returns:
            The values to round and store.
        """
        var result = v
        if self.has_residual:
            result = self.real_residual(residual).fma(
                SIMD[DType.float32, width](self.beta), result
            )
        return self.final_activation.apply[width](result)

    @always_inline
    def real_residual[
        width: Int, //
    ](self, residual: SIMD[Self.residual_type, width]) -> SIMD[
        DType.float32, width
    ]:
        """Elements of the residual, less its zero point.

        Parameters:
            width: How many.

        Args:
            residual: As they are stored.
        """
        var values = residual.cast[DType.float32]()
        comptime if Self.residual_type.is_integral():
            values -= self.residual_zero_point[0]
        return values


def validate_scale(problem: ConvProblem, scale: Int, scaled: Bool) raises:
    """Checks the scale's length.

    Args:
        problem: The convolution.
        scale: The scale operand's length.
        scaled: Whether the op is compiled with a scale.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    if not scaled:
        if scale == 0:
            return
        raise Error(
            t"scale: {scale} elements, but the op is compiled without a scale;"
            t" none are allowed"
        )
    if scale != problem.filters:
        raise Error(
            t"scale: {scale} elements, but there are {problem.filters} filters"
        )


def validate_operands[
    rank: Int
](
    problem: ConvProblem,
    geometry: Geometry,
    scalars: Int,
    bias: Int,
    residual_shape: IndexList[rank],
    out_shape: IndexList[rank],
) raises:
    """Checks the epilogue's operands against the problem.

    Args:
        problem: The convolution.
        geometry: The decoded geometry operand.
        scalars: The scalars operand's length.
        bias: The bias operand's length.
        residual_shape: The residual operand's shape.
        out_shape: The output's shape.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    if scalars != SCALARS_LENGTH:
        raise Error(
            t"scalars: {scalars} values, but this op takes {SCALARS_LENGTH};"
            t" the Python package and operations/ are of different versions"
        )
    if geometry[GEOMETRY_HAS_BIAS] != 0 and bias != problem.filters:
        raise Error(
            t"bias: {bias} elements, but there are {problem.filters} filters"
        )
    if geometry[GEOMETRY_HAS_RESIDUAL] != 0 and residual_shape != out_shape:
        raise Error(
            t"residual: shape {residual_shape} must equal the output's shape"
            t" {out_shape}"
        )
