"""Sums rounded to an output's type."""

from std.math import round
from std.memory import bitcast
from std.sys._assembly import inlined_assembly

from ..conv.quantization import Steps


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


comptime _MOST_STEPS = Float32(1 << 16)
"""More than any integer of 8 bits is away from a zero point, and exact in int32."""


@fieldwise_init
struct ByteSteps(ImplicitlyCopyable, Movable):
    """`Steps`, whose limits are integers of the output."""

    var factor: Float32
    var zero_point: Int16
    var low: Int16
    var high: Int16

    @staticmethod
    def of(steps: Steps) -> Self:
        """Those of an output.

        Args:
            steps: The steps to it.
        """
        # Rounding keeps an order: limits may as well be met behind it.
        return Self(
            steps.factor,
            steps.zero_point.cast[DType.int16](),
            (round(steps.low).cast[DType.int32]() + steps.zero_point).cast[
                DType.int16
            ](),
            (round(steps.high).cast[DType.int32]() + steps.zero_point).cast[
                DType.int16
            ](),
        )


@always_inline
def quantized_by_avx512[
    dtype: DType
](
    steps: ByteSteps,
    a: SIMD[DType.float32, 16],
    b: SIMD[DType.float32, 16],
    c: SIMD[DType.float32, 16],
    d: SIMD[DType.float32, 16],
) -> SIMD[dtype, 64]:
    """`Steps.apply` of four registers of values, in fewer instructions: integers
    are packed in halves of the registers, saturating, and put in order at the
    end. NaN becomes the least.

    (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)

    Parameters:
        dtype: Of the output, of 8 bits.

    Args:
        steps: To the output.
        a: The first values.
        b: Those behind them.
        c: Those behind them.
        d: The last ones.
    """
    comptime pack: StaticString = (
        "vpackuswb" if dtype == DType.uint8 else "vpacksswb"
    )
    var ab = _words(steps, a, b)
    var cd = _words(steps, c, d)
    var bytes = inlined_assembly[
        pack + " $2, $1, $0",
        SIMD[DType.int32, 16],
        constraints="=v,v,v",
        has_side_effect=False,
    ](ab, cd)
    # Each quarter of a register has four values of each.
    var ordered = bytes.shuffle[
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
    ]()
    return bitcast[dtype, 64](ordered)


@always_inline
def _words(
    steps: ByteSteps,
    low: SIMD[DType.float32, 16],
    high: SIMD[DType.float32, 16],
) -> SIMD[DType.int16, 32]:
    """Integers of the output, those of both registers in each quarter."""
    var packed = inlined_assembly[
        "vpackssdw $2, $1, $0",
        SIMD[DType.int16, 32],
        constraints="=v,v,v",
        has_side_effect=False,
    ](_integers(steps, low), _integers(steps, high))
    comptime Words = SIMD[DType.int16, 32]
    var moved = inlined_assembly[
        "vpaddsw $2, $1, $0",
        Words,
        constraints="=v,v,v",
        has_side_effect=False,
    ](packed, Words(steps.zero_point))
    return max(min(moved, Words(steps.high)), Words(steps.low))


@always_inline
def _integers(
    steps: ByteSteps, value: SIMD[DType.float32, 16]
) -> SIMD[DType.int32, 16]:
    """Values in steps, rounded to nearest, ties to even; NaN becomes the least.
    """
    comptime Values = SIMD[DType.float32, 16]
    var scaled = value * steps.factor
    # What is too large would become the least as well.
    var bounded = scaled.gt(_MOST_STEPS).select(Values(_MOST_STEPS), scaled)
    return inlined_assembly[
        "vcvtps2dq $1, $0",
        SIMD[DType.int32, 16],
        constraints="=v,v",
        has_side_effect=False,
    ](bounded)
