"""How neighbouring channels in memory become lanes of float32, and lanes become
outputs."""

from std.memory import bitcast
from std.utils import IndexList

from ...conv.memory import Reads
from ..config import LANES, vector_registers
from ..rounding import nearest_bits, rounded, rounded_by_avx512_bf16

comptime ORDER_PLAIN = 0
"""Lanes lie as their channels do."""

comptime ORDER_SPLIT = 1
"""Even channels, then odd ones: of bfloat16, a shift and a mask make two registers
of lanes of one of memory."""

comptime ORDER_UNPACKED = 2
"""The first half of each 8 channels, then the second halves: as AVX-512 unpacks
words, so that a register of memory is two of dot products."""


@fieldwise_init
struct Lanes(Equatable, ImplicitlyCopyable, Movable):
    """The lanes of a register tile. Sums, weights and bias in the same order need
    no shuffle."""

    var width: Int
    """How many, each a channel."""
    var order: Int
    """An `ORDER_*` code, of bfloat16 unless it is plain."""

    @staticmethod
    def plain(width: Int) -> Lanes:
        """Lanes in the order of their channels.

        Args:
            width: How many.
        """
        return Lanes(width, ORDER_PLAIN)

    @staticmethod
    def widest(dtype: DType) -> Lanes:
        """The lanes that a tile of many channels has: as many as one load brings,
        where the sums of a tile leave registers for them.

        Args:
            dtype: Of activation and filter.
        """
        if dtype == DType.bfloat16 and vector_registers() >= 32:
            return Lanes(2 * LANES, ORDER_SPLIT)
        return Lanes.plain(LANES)


def unpacked_words(half: Int) -> IndexList[32]:
    """Where `vpunpcklwd` (half 0) or `vpunpckhwd` (half 1) of 64 bytes finds each
    word, among those of both operands.

    Args:
        half: Which.
    """
    var mask = IndexList[32](fill=0)
    for i in range(32):
        var group, at = divmod(i, 8)
        mask[i] = 8 * group + 4 * half + at // 2 + 32 * (at % 2)
    return mask


@always_inline
def load_lanes[
    dtype: DType, //, lanes: Lanes
](elements: Reads[dtype], at: Int) -> SIMD[DType.float32, lanes.width]:
    """Loads neighbouring elements.

    Parameters:
        dtype: Theirs.
        lanes: The lanes.

    Args:
        elements: The elements.
        at: The first.
    """
    var values = elements.unsafe_load[width=lanes.width, alignment=1](at)
    comptime if lanes.order == ORDER_PLAIN:
        return values.cast[DType.float32]()
    comptime half = lanes.width // 2
    comptime if lanes.order == ORDER_SPLIT:
        var pairs = bitcast[DType.uint32, half](values)
        var even = bitcast[DType.float32, half](pairs << 16)
        var odd = bitcast[DType.float32, half](pairs & 0xFFFF0000)
        return rebind[SIMD[DType.float32, lanes.width]](even.join(odd))
    else:
        var words = bitcast[DType.uint16, 32](values)
        comptime low = unpacked_words(0)
        comptime high = unpacked_words(1)
        var zero = SIMD[DType.uint16, 32](0)
        var first = bitcast[DType.float32, half](zero.shuffle[mask=low](words))
        var second = bitcast[DType.float32, half](
            zero.shuffle[mask=high](words)
        )
        return rebind[SIMD[DType.float32, lanes.width]](first.join(second))


@always_inline
def rounded_lanes[
    lanes: Lanes, dtype: DType
](value: SIMD[DType.float32, lanes.width]) -> SIMD[dtype, lanes.width]:
    """Lanes as neighbouring outputs, rounded once. Of unpacked ones, which
    AVX512-BF16 has, denormal numbers become zeros.

    Parameters:
        lanes: The lanes.
        dtype: Of the outputs.

    Args:
        value: The values.
    """
    comptime half = lanes.width // 2
    comptime if lanes.order == ORDER_PLAIN:
        return rounded[dtype](value)
    elif lanes.order == ORDER_SPLIT:
        var even = nearest_bits(value.slice[half, offset=0]())
        var odd = nearest_bits(value.slice[half, offset=half]())
        return bitcast[dtype, lanes.width]((even >> 16) | (odd & 0xFFFF0000))
    else:
        var words = rounded_by_avx512_bf16(
            rebind[SIMD[DType.float32, 16]](value.slice[half, offset=0]()),
            rebind[SIMD[DType.float32, 16]](value.slice[half, offset=half]()),
        )
        return bitcast[dtype, lanes.width](
            words.shuffle[0, 4, 1, 5, 2, 6, 3, 7]()
        )
