"""The warpgroup's multiply (wgmma), what all kernels that use it share."""

from max.gpu.compute.mma import WGMMADescriptor

from ..limits import PATTERN_BYTES
from ..tma.copy import SharedAddress

comptime MMA_M = 64
"""Rows that one warpgroup's multiply takes at a time."""


@always_inline
def matrix_descriptor[
    dtype: DType, offset: Int = 0
](address: SharedAddress) -> WGMMADescriptor[dtype]:
    """A tile's descriptor (PTX ISA, "Matrix descriptor format"): address,
    distance of 8-row groups, 128-byte swizzle.

    Parameters:
        dtype: Of the tile.
        offset: Bytes from `address` to the tile, a multiple of 16.

    Args:
        address: In shared memory, which ends before the descriptor's 14 bits
            of 16 bytes do.
    """
    comptime distance = UInt64(PATTERN_BYTES >> 4) << 32
    comptime swizzle = UInt64(1) << 62
    # One sum a descriptor: the rest is the same for all of a stage.
    var chunk = (address >> 4) + UInt32(offset >> 4)
    var bits = UInt64(chunk) | distance | swizzle
    return WGMMADescriptor[dtype](Int64(bits))
