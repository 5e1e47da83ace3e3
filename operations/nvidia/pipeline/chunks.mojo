"""This block's shared memory in chunks of 16 bytes, which a thread moves in one
instruction, and TMA's swizzle of such chunks."""

from max.gpu import thread_idx
from std.sys import llvm_intrinsic
from std.sys.info import size_of

from ..tma.copy import SharedAddress, fence_async_proxy

comptime CHUNK_BYTES = 16
"""Bytes of an access, and the alignment of its address."""

comptime Words = SIMD[DType.uint32, CHUNK_BYTES // size_of[DType.uint32]()]
"""A chunk."""


@always_inline
def shared_pointer[
    dtype: DType
](address: SharedAddress) -> Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]:
    """Shared memory at an address.

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
def chunk_within(first: Words, second: Words, offset: UInt32) -> Words:
    """16 bytes of two chunks side by side.

    Args:
        first: A chunk.
        second: The one behind it.
        offset: Of the bytes: 0 to 15.
    """
    # Each step keeps the words that the next one reads: an index that is known
    # at run time only would put them into local memory.
    var words = first.join(second)
    var by_pairs = SIMD[DType.uint32, 8](0)
    comptime for i in range(6):
        by_pairs[i] = words[i + 2] if offset & 8 != 0 else words[i]
    var by_words = SIMD[DType.uint32, 8](0)
    comptime for i in range(5):
        by_words[i] = by_pairs[i + 1] if offset & 4 != 0 else by_pairs[i]
    var result = Words(0)
    comptime for i in range(4):
        result[i] = llvm_intrinsic["llvm.fshr.i32", UInt32](
            by_words[i + 1], by_words[i], offset % 4 * 8
        )
    return result


@always_inline
def swizzled_chunk[row_bytes: Int](row: UInt32, chunk: UInt32) -> UInt32:
    """The chunk of its row that TMA's swizzle stores a chunk in (PTX ISA,
    "Swizzling modes"): its index XOR bits of the row's number, so that the same
    chunk of neighbouring rows is in different banks.

    Parameters:
        row_bytes: Of a row, and the swizzle's span: 32, 64 or 128.

    Args:
        row: The row; the first is at a multiple of 8 spans.
        chunk: The chunk in the row.
    """
    comptime chunks = row_bytes // CHUNK_BYTES
    comptime rows_of_pattern = 128 // row_bytes
    return chunk ^ (row // UInt32(rows_of_pattern) % UInt32(chunks))


@always_inline
def swizzled[row_bytes: Int](row: UInt32, chunk: UInt32) -> UInt32:
    """The offset of a chunk in rows that TMA swizzles.

    Parameters:
        row_bytes: Of a row, and the swizzle's span: 32, 64 or 128.

    Args:
        row: The row; the first is at a multiple of 8 spans.
        chunk: The chunk in the row.
    """
    return (
        row * UInt32(row_bytes)
        + swizzled_chunk[row_bytes](row, chunk) * CHUNK_BYTES
    )


@always_inline
def clear_rows[
    row_bytes: Int, rows: Int, threads: Int
](data: SharedAddress, loaded: UInt32):
    """Writes zeros to the ends of swizzled rows, of which loads write only the
    first bytes and multiplies read all. All threads of the block call it; a
    barrier among them must follow.

    Parameters:
        row_bytes: Of a row, and the swizzle's span: 32, 64 or 128.
        rows: How many.
        threads: Of the block.

    Args:
        data: The first row, at a multiple of 8 spans.
        loaded: Bytes at the start of each row to leave alone, a multiple of 16.
    """
    for row in range(UInt32(thread_idx.x), UInt32(rows), UInt32(threads)):
        for chunk in range(
            loaded // CHUNK_BYTES, UInt32(row_bytes // CHUNK_BYTES)
        ):
            store_chunk[DType.uint32](data + swizzled[row_bytes](row, chunk), 0)
    fence_async_proxy()
