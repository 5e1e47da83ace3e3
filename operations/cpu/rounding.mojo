"""Sums rounded to an output's type."""

from std.memory import bitcast


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
