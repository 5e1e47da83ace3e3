"""This block's shared memory, 16 bytes at a time: what one thread moves in an
instruction."""

from std.sys.info import size_of

from ..tma.copy import SharedAddress

comptime CHUNK_BYTES = 16
"""Bytes of an access, and the alignment of its address."""


@always_inline
def shared_pointer[
    dtype: DType
](address: SharedAddress) -> Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]:
    """Shared memory at an address.

    Parameters:
        dtype: Of the elements.

    Args:
        address: Of the first.
    """
    return Pointer[
        Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ](unsafe_from_address=Int(address))


@always_inline
def load_chunk[
    dtype: DType
](address: SharedAddress) -> SIMD[dtype, CHUNK_BYTES // size_of[dtype]()]:
    """Reads 16 bytes of shared memory.

    Parameters:
        dtype: Of an element.

    Args:
        address: A multiple of 16.
    """
    return shared_pointer[dtype](address).unsafe_load[
        width=CHUNK_BYTES // size_of[dtype](), alignment=CHUNK_BYTES
    ](0)


@always_inline
def store_chunk[
    dtype: DType
](
    address: SharedAddress,
    values: SIMD[dtype, CHUNK_BYTES // size_of[dtype]()],
):
    """Writes 16 bytes of shared memory.

    Parameters:
        dtype: Of an element.

    Args:
        address: A multiple of 16.
        values: The elements.
    """
    shared_pointer[dtype](address).unsafe_store[alignment=CHUNK_BYTES](
        0, values
    )


@always_inline
def swizzled[row_bytes: Int](row: UInt32, chunk: UInt32) -> UInt32:
    """The offset of a chunk in rows that TMA swizzles (PTX ISA,
    "Swizzling modes"): the span's chunks are exchanged with the row's number,
    so that neighbouring rows' chunks lie in different banks.

    Parameters:
        row_bytes: Of a row, and the swizzle's span: 32, 64 or 128.

    Args:
        row: The row; the first lies at a multiple of 8 spans.
        chunk: The chunk in the row.
    """
    comptime chunks = row_bytes // CHUNK_BYTES
    comptime rows_of_pattern = 128 // row_bytes
    var moved = chunk ^ (row // UInt32(rows_of_pattern) % UInt32(chunks))
    return row * UInt32(row_bytes) + moved * CHUNK_BYTES
