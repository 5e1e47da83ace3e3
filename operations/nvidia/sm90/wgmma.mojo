"""The warpgroup's multiply (wgmma), what all kernels that use it share."""

from max.gpu.compute.mma import WGMMADescriptor

from ..limits import PATTERN_BYTES
from ..tma.copy import SharedAddress

comptime MMA_M = 64
"""Rows that one warpgroup's multiply takes at a time."""


@always_inline
def matrix_descriptor[
    dtype: DType
](address: SharedAddress) -> WGMMADescriptor[dtype]:
    """A tile's descriptor (PTX ISA, "Matrix descriptor format"): address,
    distance of 8-row groups, 128-byte swizzle.

    Args:
        address: The tile's.
    """
    comptime distance = UInt64(PATTERN_BYTES >> 4) << 32
    comptime swizzle = UInt64(1) << 62
    var bits = UInt64((address & 0x3FFFF) >> 4) | distance | swizzle
    return WGMMADescriptor[dtype](Int64(bits))
