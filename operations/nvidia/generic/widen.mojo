"""Values of 8 and 16 bits in float32, in few instructions."""

from std.memory import bitcast
from std.sys.intrinsics import llvm_intrinsic

comptime _EXPONENT = Int32(0x4B000000)
"""The bits of 2 ** 23, a float32 whose last place is 1."""


@always_inline
def widen[
    dtype: DType, width: SIMDLength
](value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """The values in float32, at a fraction of a conversion's instructions: of
    bfloat16 one each, of int8 two, which run at full rate.

    Parameters:
        dtype: Of the values.
        width: How many.

    Args:
        value: The values.
    """
    comptime if dtype == DType.bfloat16 and Int(width) % 2 == 0:
        return _widen_pairs(value)
    elif dtype == DType.int8 and Int(width) % 4 == 0:
        return _widen_bytes(value)
    else:
        return value.cast[DType.float32]()


@always_inline
def _widen_pairs[
    dtype: DType, width: SIMDLength
](value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """Of bfloat16: the upper halves of float32."""
    comptime pairs = Int(width) // 2
    var bits = bitcast[DType.uint32, pairs](value)
    var result = SIMD[DType.uint32, width](0)
    comptime for i in range(pairs):
        result[2 * i] = bits[i] << 16
        result[2 * i + 1] = bits[i] & 0xFFFF0000
    return bitcast[DType.float32, width](result)


@always_inline
def _widen_bytes[
    dtype: DType, width: SIMDLength
](value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """Of int8: a byte plus 128 in the last places of 2 ** 23, from which
    2 ** 23 + 128 are taken again."""
    comptime words = Int(width) // 4
    var bits = bitcast[DType.int32, words](value)
    var result = SIMD[DType.int32, width](0)
    comptime for i in range(words):
        var unsigned = bits[i] ^ Int32(-0x7F7F7F80)
        comptime for j in range(4):
            # Byte j of the first, bytes 0, 0 and 3 of the second (PTX ISA,
            # "prmt").
            result[4 * i + j] = llvm_intrinsic["llvm.nvvm.prmt", Int32](
                unsigned, _EXPONENT, Int32(0x7440 + j)
            )
    return bitcast[DType.float32, width](result) - Float32(8388736)
