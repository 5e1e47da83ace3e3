"""Sums rounded to an output's type."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly


@always_inline
def nearest_bits[
    width: Int, //
](value: SIMD[DType.float32, width]) -> SIMD[DType.uint32, width]:
    """Bits whose upper half is the bfloat16 nearest to each value, ties to even;
    NaN stays NaN.

    Parameters:
        width: How many.

    Args:
        value: The values.
    """
    var bits = bitcast[DType.uint32, width](value)
    var nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    # A carry would make another number of a NaN.
    var quiet = bits | 0x400000
    return value.eq(value).select(nearest, quiet)


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
        var halves = (nearest_bits(value) >> 16).cast[DType.uint16]()
        return bitcast[dtype, width](halves)
    else:
        return value.cast[dtype]()


@always_inline
def rounded_by_avx512_bf16(
    low: SIMD[DType.float32, 16], high: SIMD[DType.float32, 16]
) -> SIMD[DType.uint64, 8]:
    """Bits of 32 bfloat16: two registers of values rounded by `vcvtne2ps2bf16`,
    which AVX512-BF16 has. Denormal numbers become zeros. As bfloat16 the compiler
    would shuffle them an element after the other.

    (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)

    Args:
        low: The first values.
        high: Those behind them.
    """
    return inlined_assembly[
        "vcvtne2ps2bf16 $2, $1, $0",
        SIMD[DType.uint64, 8],
        constraints="=v,v,v",
        has_side_effect=False,
    ](high, low)
