"""Values of 16 bits in float32, in few instructions."""

from std.memory import bitcast


@always_inline
def widen[
    dtype: DType, width: SIMDLength
](value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """The values in float32; of a pair of bfloat16 one instruction each.

    Parameters:
        dtype: Of the values.
        width: How many.

    Args:
        value: The values.
    """
    comptime if dtype != DType.bfloat16 or Int(width) % 2 != 0:
        return value.cast[DType.float32]()
    else:
        comptime pairs = Int(width) // 2
        var bits = bitcast[DType.uint32, pairs](value)
        var result = SIMD[DType.uint32, width](0)
        comptime for i in range(pairs):
            result[2 * i] = bits[i] << 16
            result[2 * i + 1] = bits[i] & 0xFFFF0000
        return bitcast[DType.float32, width](result)
