"""Loads of a packed filter's panels as float32."""

from std.memory import bitcast

from ..conv.fields import PANEL
from ..conv.memory import Reads


@always_inline
def load_filters[
    dtype: DType, width: Int, quads: Bool = False
](panel: Reads[dtype], step: Int, lane: Int) -> SIMD[DType.float32, width]:
    """Neighbouring filters' values of one product.

    Parameters:
        dtype: Of the filter.
        width: How many filters.
        quads: Whether four products of 8 bits lie side by side.

    Args:
        panel: The panel.
        step: The product: see `PanelLayout.offset`.
        lane: The first filter.
    """
    comptime if quads:
        var words = load_quads[dtype, width](panel, step >> 2, lane)
        # Down from the highest byte: with the sign.
        var high = bitcast[DType.int32, width](
            words << UInt32(24 - 8 * (step & 3))
        )
        return (high >> 24).cast[DType.float32]()
    elif not dtype.is_half_float():
        return panel.unsafe_load[width=width](step * PANEL + lane).cast[
            DType.float32
        ]()
    else:
        var pairs = load_pairs[dtype, width](panel, step >> 1, lane)
        return widened[dtype](pairs >> 16 if step & 1 == 1 else pairs)


@always_inline
def load_quads[
    dtype: DType, width: Int
](panel: Reads[dtype], quad: Int, lane: Int) -> SIMD[DType.uint32, width]:
    """Neighbouring filters' bytes of four products, the first one lowest.

    Parameters:
        dtype: Of the filter, of 8 bits.
        width: How many filters.

    Args:
        panel: The panel.
        quad: A quarter of the first product's step.
        lane: The first filter.
    """
    return panel.unsafe_bitcast[UInt32]().unsafe_load[width=width, alignment=1](
        quad * PANEL + lane
    )


@always_inline
def load_pairs[
    dtype: DType, width: Int
](panel: Reads[dtype], pair: Int, lane: Int) -> SIMD[DType.uint32, width]:
    """Neighbouring filters' bits of two products, the first one in the low
    half.

    Parameters:
        dtype: Of the filter, of 16 bits.
        width: How many filters.

    Args:
        panel: The panel.
        pair: Half of the first product's step.
        lane: The first filter.
    """
    return panel.unsafe_bitcast[UInt32]().unsafe_load[width=width](
        pair * PANEL + lane
    )


@always_inline
def widened[
    width: Int, //, dtype: DType
](bits: SIMD[DType.uint32, width]) -> SIMD[DType.float32, width]:
    """Values of 16 bits, of which the high halves are not read, as float32.

    Parameters:
        width: How many.
        dtype: Their type.

    Args:
        bits: The values, in the low halves.
    """
    comptime if dtype == DType.bfloat16:
        return bitcast[DType.float32, width](bits << 16)
    else:
        return bitcast[DType.float16, width](bits.cast[DType.uint16]()).cast[
            DType.float32
        ]()
