"""Numbers in a thread's registers: what the compiler shall keep or not know of
them, and values whose index is known at run time only."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly


@always_inline
def opaque(word: UInt32) -> UInt32:
    """The same number, which the compiler takes for another: it computes nothing
    of it where it comes from.

    Args:
        word: The number.
    """
    return inlined_assembly["", UInt32, constraints="=r,0,~{memory}"](word)


@always_inline
def settled(word: UInt32, zero: UInt32) -> UInt32:
    """The same number, by way of an addition. What is loaded before a loop and
    read in it would be waited for in every round, and what the round loads with
    it.

    Args:
        word: The number.
        zero: A zero that the compiler does not know.
    """
    return word + zero


@always_inline
def bits_of[dtype: DType](value: Scalar[dtype]) -> UInt32:
    """The bits of a value, zeros above them.

    Args:
        value: Of up to 32 bits.
    """
    return value.to_bits().cast[DType.uint32]()


@always_inline
def rounded_to[
    width: Int, //, dtype: DType
](values: SIMD[DType.float32, width]) -> SIMD[dtype, width]:
    """Values as a type. Pairs of 16 bits by one instruction each, which the
    compiler takes apart where single ones are stored too.

    Parameters:
        width: How many, even.
        dtype: The type: float32, or of 16 bits.

    Args:
        values: The values.
    """
    comptime if not dtype.is_half_float():
        return values.cast[dtype]()
    else:
        comptime name = "bf16" if dtype == DType.bfloat16 else "f16"
        comptime text = String("cvt.rn.", name, "x2.f32 $0, $1, $2;")
        var words = SIMD[DType.uint32, width // 2](0)
        comptime for i in range(width // 2):
            words[i] = inlined_assembly[
                text, UInt32, constraints="=r,f,f", has_side_effect=False
            ](values[2 * i + 1], values[2 * i])
        return bitcast[dtype, width](words)


@always_inline
def value_at[
    dtype: DType, width: Int
](values: SIMD[dtype, width], index: UInt32) -> Scalar[dtype]:
    """A value whose index is known at run time only.

    Args:
        values: All.
        index: Which.
    """
    var value = values[0]
    comptime for i in range(1, width):
        value = values[i] if index == UInt32(i) else value
    return value


@always_inline
def set_value[
    dtype: DType, width: Int
](mut values: SIMD[dtype, width], index: UInt32, value: Scalar[dtype]):
    """Sets a value whose index is known at run time only.

    Args:
        values: All.
        index: Which.
        value: To what.
    """
    comptime for i in range(width):
        values[i] = value if index == UInt32(i) else values[i]
