"""The warpgroup's multiply (wgmma), what all kernels that use it share."""

from max.gpu.compute.mma import WGMMADescriptor

from ..limits import PATTERN_BYTES
from ..tma.copy import SharedAddress

comptime MMA_M = 64
"""Rows that one warpgroup's multiply takes at a time."""


comptime DESCRIPTOR_SHIFT = 4
"""By how many bits a descriptor shifts an address."""


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
    return chunk_descriptor[dtype, offset](address >> DESCRIPTOR_SHIFT)


@always_inline
def chunk_descriptor[
    dtype: DType, offset: Int = 0
](chunk: UInt32) -> WGMMADescriptor[dtype]:
    """The descriptor of a tile whose address is known in units of 16 bytes.

    Parameters:
        dtype: Of the tile.
        offset: Bytes from there to the tile, a multiple of 16.

    Args:
        chunk: The address, shifted by `DESCRIPTOR_SHIFT`.
    """
    comptime distance = UInt64(PATTERN_BYTES >> DESCRIPTOR_SHIFT) << 32
    comptime swizzle = UInt64(1) << 62
    # One sum a descriptor: the rest is the same for all of a stage.
    var moved = chunk + UInt32(offset >> DESCRIPTOR_SHIFT)
    var bits = UInt64(moved) | distance | swizzle
    return WGMMADescriptor[dtype](Int64(bits))
