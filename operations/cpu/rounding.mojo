"""Sums rounded to an output's type."""

from std.memory import bitcast
from std.utils.numerics import max_finite, min_finite

from ..conv.quantization import Quantization


@always_inline
def rounded[
    width: Int, //, dtype: DType
](value: SIMD[DType.float32, width]) -> SIMD[dtype, width]:
    """Values rounded to nearest, ties to even; NaN stays NaN.

    The compiler converts to bfloat16 an element after the other where it does
    not know of an instruction, and of a virtual machine's CPU it knows little.

    Parameters:
        width: How many.
        dtype: Of the result.

    Args:
        value: The values.
    """
    comptime if dtype == DType.bfloat16:
        var bits = bitcast[DType.uint32, width](value)
        var nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # A carry would make another number of a NaN.
        var quiet = bits | 0x400000
        var kept = value.eq(value).select(nearest, quiet)
        return bitcast[dtype, width]((kept >> 16).cast[DType.uint16]())
    else:
        return value.cast[dtype]()


comptime _ROUNDER = Float32(3 << 22)
"""1.5 * 2^23: a sum with it has no fraction bits, and its low bits are the integer
that small numbers are rounded to, ties to even."""


@fieldwise_init
struct Steps(ImplicitlyCopyable, Movable):
    """How values become integers of 8 bits: see quantization.mojo. The limits are
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
        return Steps(
            factor,
            max(low * factor, min_finite[dtype]().cast[DType.float32]() - zero),
            min(
                high * factor, max_finite[dtype]().cast[DType.float32]() - zero
            ),
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
