"""Copies of chunks from device memory to shared memory that a thread starts
and does not wait for (PTX ISA, "cp.async"), in groups that end in order."""

from std.sys._assembly import inlined_assembly

from ...conv.memory import Reads
from ..tma.copy import SharedAddress
from .chunks import CHUNK_BYTES

comptime PIECE_BYTES = 8
"""Of a copy of half a chunk."""


@always_inline
def copy_chunk(to: SharedAddress, from_: Reads, exists: Bool):
    """Starts copying `CHUNK_BYTES` to shared memory; zeros if there are none.
    Both addresses are multiples of as many.

    Args:
        to: Where to.
        from_: Where from; not read unless `exists`.
        exists: Whether there is something to copy.
    """
    copy_part(
        to,
        UInt64(Int(from_)),
        UInt32(CHUNK_BYTES) if exists else UInt32(0),
    )


@always_inline
def copy_part(to: SharedAddress, address: UInt64, bytes: UInt32):
    """Starts copying the first bytes of a chunk to shared memory, and zeros for
    the others.

    Args:
        to: Where to, a multiple of `CHUNK_BYTES`.
        address: Where from, a multiple of `CHUNK_BYTES`; nothing is read beyond
            `bytes`.
        bytes: 0 to `CHUNK_BYTES`.
    """
    inlined_assembly[
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](to, address, bytes)


@always_inline
def copy_piece(to: SharedAddress, address: UInt64, exists: Bool):
    """Starts copying `PIECE_BYTES` to shared memory; zeros if there are none.
    Both addresses are multiples of as many.

    Args:
        to: Where to.
        address: Where from; not read unless `exists`.
        exists: Whether there is something to copy.
    """
    inlined_assembly[
        "cp.async.ca.shared.global [$0], [$1], 8, $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](to, address, UInt32(PIECE_BYTES) if exists else UInt32(0))


@always_inline
def close_copies():
    """Commits the group of this thread's copies."""
    inlined_assembly[
        "cp.async.commit_group;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def await_copies[pending: Int]():
    """Waits for all but the latest groups of this thread's copies.

    Parameters:
        pending: How many may still be under way.
    """
    inlined_assembly[
        "cp.async.wait_group $0;", NoneType, constraints="n,~{memory}"
    ](pending)
