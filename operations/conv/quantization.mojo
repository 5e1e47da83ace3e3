"""Integers that stand for real numbers: zero points of activation, residual and
output, and the rounding of an output to 8 bits.

    v = scale * sum((x - zero_point) * filter), then the epilogue, whose residual
        is beta * (residual - residual_zero_point)
    y = clamp(round(v * output_factor) + output_zero_point)

`round` takes ties to even, and `clamp` keeps what the output's type holds. (As
ONNX's QuantizeLinear has it, and Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.)
"""

from std.collections import Optional
from std.math import isfinite
from std.memory import bitcast
from std.utils.numerics import max_finite, min_finite

from .device_value import DeviceValue
from .fields import (
    GEOMETRY_OUTPUT_ZERO_POINT,
    GEOMETRY_ZERO_POINT,
    SCALAR_OUTPUT_FACTOR,
)
from .memory import Reads
from .problem import Geometry

comptime MAX_PRODUCT = 255 * 128
"""The largest product of an activation, less its zero point, and a filter."""

comptime EXACT_PRODUCTS = (1 << 24) // MAX_PRODUCT
"""Products whose sum float32 holds exactly, whatever they are."""

comptime MAX_PRODUCTS = ((1 << 31) - 1) // MAX_PRODUCT
"""Products whose sum int32 holds, whatever they are."""


def sums_refusal(products: Int) -> Optional[String]:
    """Why int32 does not hold every sum of integers, or None.

    Args:
        products: Of an output.
    """
    if products <= MAX_PRODUCTS:
        return None
    return String(
        t"int32 holds sums of {MAX_PRODUCTS} products whatever they are, but"
        t" here an output has {products}"
    )


def filter_dtype(dtype: DType) -> DType:
    """The type of the filter beside activations of a type.

    Args:
        dtype: Of the activation.

    Returns:
        int8 beside uint8; otherwise the activation's.
    """
    return DType.int8 if dtype == DType.uint8 else dtype


@fieldwise_init
struct Quantization(DeviceValue, ImplicitlyCopyable, Movable):
    """What the formula above needs, beside the epilogue."""

    var zero_point: Int32
    """Of the activation."""
    var output_zero_point: Float32
    var output_factor: Float32
    """Steps of the output in 1."""

    @staticmethod
    def none() -> Quantization:
        """Nothing of it."""
        return Quantization(0, 0, 1)

    def __init__(out self, geometry: Geometry, scalars: Reads[DType.float32]):
        """Reads it off the op's operands.

        Args:
            geometry: The decoded geometry operand.
            scalars: `SCALARS_LENGTH` values in host memory.
        """
        self.zero_point = Int32(geometry[GEOMETRY_ZERO_POINT])
        self.output_zero_point = Float32(geometry[GEOMETRY_OUTPUT_ZERO_POINT])
        self.output_factor = scalars[unsafe_offset=SCALAR_OUTPUT_FACTOR]

    def refuse_zero_point(self) raises:
        """Refuses what a kernel does not compute that is not given the sums of
        filters.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        if self.zero_point != 0:
            raise Error(
                t"zero_point: {self.zero_point} is not supported by what was"
                t" compiled for this GPU; 0 is"
            )

    def validate[
        input: DType, output: DType
    ](self, residual_zero_point: Float32) raises:
        """Checks that types hold what is asked of them.

        Parameters:
            input: Of the activation.
            output: Of residual and output.

        Args:
            residual_zero_point: Of the residual.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        _validate_zero_point[input]("zero_point", Float32(self.zero_point))
        _validate_zero_point[output]("residual_zero_point", residual_zero_point)
        _validate_zero_point[output]("out_zero_point", self.output_zero_point)
        var allowed = isfinite(self.output_factor) and self.output_factor > 0
        comptime if not output.is_integral():
            allowed = self.output_factor == 1
        if not allowed:
            raise Error(
                t"out_scale: 1 / {self.output_factor} is not allowed for an"
                t" output of {output}; positive numbers whose reciprocal is a"
                t" float32 are, and 1 alone for floats"
            )


comptime _ROUNDER = Float32(3 << 22)
"""1.5 * 2^23: a sum with it has no fraction bits, and its low bits are the integer
that small numbers are rounded to, ties to even."""


@fieldwise_init
struct Steps(DeviceValue, TrivialRegisterPassable):
    """How values become integers of 8 bits: the formula above. The limits are
    integers less the zero point, or those of an activation, whichever are
    narrower: nothing changes if numbers meet them before they are rounded."""

    var factor: Float32
    var low: Float32
    var high: Float32
    var zero_point: Int32

    @staticmethod
    def of[
        dtype: DType
    ](quantization: Quantization, low: Float32, high: Float32) -> Steps:
        """Those of an output.

        Parameters:
            dtype: Of the output.

        Args:
            quantization: Its factor and zero point.
            low: Limit of the values.
            high: The other one.
        """
        var zero = quantization.output_zero_point
        var factor = quantization.output_factor
        var least = min_finite[dtype]().cast[DType.float32]() - zero
        var most = max_finite[dtype]().cast[DType.float32]() - zero
        # An activation's limits may both lie beyond those of the type.
        return Steps(
            factor,
            min(max(low * factor, least), most),
            max(min(high * factor, most), least),
            zero.cast[DType.int32](),
        )

    @always_inline
    def apply[
        width: Int, //, dtype: DType
    ](self, value: SIMD[DType.float32, width]) -> SIMD[dtype, width]:
        """The integers; NaN becomes the least.

        Parameters:
            width: How many.
            dtype: Of the output.

        Args:
            value: The values.
        """
        comptime Vector = SIMD[DType.float32, width]
        var steps = value * self.factor
        steps = steps.gt(self.low).select(steps, Vector(self.low))
        steps = steps.lt(self.high).select(steps, Vector(self.high))
        comptime bits = bitcast[DType.int32, 1](_ROUNDER)
        var whole = bitcast[DType.int32, width](steps + _ROUNDER)
        return (whole + (self.zero_point - bits)).cast[dtype]()


def _validate_zero_point[dtype: DType](name: String, value: Float32) raises:
    """Checks that a type has an integer."""
    var low = Float32(0)
    var high = Float32(0)
    comptime if dtype.is_integral():
        low = min_finite[dtype]().cast[DType.float32]()
        high = max_finite[dtype]().cast[DType.float32]()
    if not low <= value <= high:
        raise Error(
            t"{name}: {value} is not allowed beside {dtype}; {low} to"
            t" {high} are"
        )
