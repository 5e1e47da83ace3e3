"""Numbers in a thread's registers: what the compiler shall keep or not know of
them, and values whose index is known at run time only."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils import StaticTuple

from .tiling import neighbours


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


struct SumPieces[columns: Int]:
    """A thread's sums of a multiply as vectors of filters that it stores
    together: of each part of the filters, those of its upper pixel and of its
    lower one.

    Parameters:
        columns: Filters of the multiply.
    """

    comptime Sums = StaticTuple[Float32, Self.columns // 2]
    comptime vector = neighbours(Self.columns)
    comptime count = Self.columns // (2 * Self.vector)
    comptime Values = SIMD[DType.float32, Self.vector]

    @staticmethod
    @always_inline
    def of[piece: Int](sums: Self.Sums) -> Self.Values:
        """The values of a piece: columns `8*j + 2*t` and the next of each j.

        Parameters:
            piece: Which.

        Args:
            sums: The thread's.
        """
        var values = Self.Values(0)
        comptime for i in range(Self.vector):
            comptime j = piece // 2 * (Self.vector // 2) + i // 2
            values[i] = sums[4 * j + 2 * (piece % 2) + i % 2]
        return values

    @staticmethod
    @always_inline
    def put[piece: Int](mut sums: Self.Sums, values: Self.Values):
        """Sets the values of a piece.

        Parameters:
            piece: Which.

        Args:
            sums: The thread's.
            values: To what.
        """
        comptime for i in range(Self.vector):
            comptime j = piece // 2 * (Self.vector // 2) + i // 2
            sums[4 * j + 2 * (piece % 2) + i % 2] = values[i]

    @staticmethod
    @always_inline
    def chosen(sums: Self.Sums, piece: UInt32) -> Self.Values:
        """The values of a piece that is known at run time only.

        Args:
            sums: The thread's.
            piece: Which.
        """
        var values = Self.of[0](sums)
        comptime for other in range(1, Self.count):
            if piece == UInt32(other):
                values = Self.of[other](sums)
        return values
