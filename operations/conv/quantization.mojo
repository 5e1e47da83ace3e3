"""Integers that stand for real numbers: zero points of activation, residual and
output, and the rounding of an output to 8 bits.

    v = scale * sum((x - zero_point) * filter), then the epilogue, whose residual
        is beta * (residual - residual_zero_point)
    y = clamp(round(v * output_factor) + output_zero_point)

`round` takes ties to even, and `clamp` keeps what the output's type holds. (As
ONNX's QuantizeLinear has it, and Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.)
"""

from std.math import isfinite
from std.utils.numerics import max_finite, min_finite

from .device_value import DeviceValue
from .fields import (
    GEOMETRY_OUTPUT_ZERO_POINT,
    GEOMETRY_RESIDUAL_ZERO_POINT,
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
    var residual_zero_point: Float32
    var output_zero_point: Float32
    var output_factor: Float32
    """Steps of the output in 1."""

    @staticmethod
    def none() -> Quantization:
        """Nothing of it."""
        return Quantization(0, 0, 0, 1)

    def __init__(out self, geometry: Geometry, scalars: Reads[DType.float32]):
        """Reads it off the op's operands.

        Args:
            geometry: The decoded geometry operand.
            scalars: `SCALARS_LENGTH` values in host memory.
        """
        self.zero_point = Int32(geometry[GEOMETRY_ZERO_POINT])
        self.residual_zero_point = Float32(
            geometry[GEOMETRY_RESIDUAL_ZERO_POINT]
        )
        self.output_zero_point = Float32(geometry[GEOMETRY_OUTPUT_ZERO_POINT])
        self.output_factor = scalars[unsafe_offset=SCALAR_OUTPUT_FACTOR]

    def refuse_on_gpu(self) raises:
        """Refuses what a GPU's kernels do not compute.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        if self.zero_point != 0:
            raise Error(
                t"zero_point: {self.zero_point} is not supported on a GPU; 0 is"
            )

    def validate[input: DType, output: DType](self) raises:
        """Checks that types hold what is asked of them.

        Parameters:
            input: Of the activation.
            output: Of residual and output.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        _validate_zero_point[input]("zero_point", Float32(self.zero_point))
        _validate_zero_point[output](
            "residual_zero_point", self.residual_zero_point
        )
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
