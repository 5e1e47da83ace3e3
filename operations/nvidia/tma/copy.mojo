"""TMA's instructions: boxes and im2col boxes between device memory
and shared memory.

One thread issues each copy. A load completes `bytes` of a barrier's
transaction, a store belongs to the issuing thread's bulk group. Shared memory
is addressed by its 32-bit address (`SharedAddress`), the same in every thread
of the block; coordinates are innermost first.
"""

from std.sys._assembly import inlined_assembly
from std.utils import IndexList

from .descriptor import TensorMap

comptime SharedAddress = UInt32
"""Bytes from the start of the shared window."""


@always_inline
def _map_address(ref map: TensorMap) -> UInt64:
    """The generic address of a descriptor in constant memory."""
    return UInt64(Int(Pointer(to=map)))


@always_inline
def _coordinates[rank: Int, first: Int]() -> String:
    """The assembly operand `{$first, ...}` of `rank` coordinates."""
    var text = String("{")
    comptime for i in range(rank):
        comptime if i > 0:
            text += ", "
        text += String("$") + String(first + i)
    return text + "}"


@always_inline
def _at[rank: Int](values: IndexList[rank], i: Int) -> Int32:
    """A coordinate, 0 beyond the rank."""
    return Int32(values[i]) if i < rank else Int32(0)


@always_inline
def prefetch_map(ref map: TensorMap):
    """Prefetches a descriptor.

    Args:
        map: The kernel's argument.
    """
    inlined_assembly[
        "prefetch.tensormap [$0];", NoneType, constraints="l,~{memory}"
    ](_map_address(map))


@always_inline
def load_tile[
    rank: Int, *, multicast: Bool = False, pair: Bool = False
](
    destination: SharedAddress,
    ref map: TensorMap,
    barrier: SharedAddress,
    at: IndexList[rank],
    peers: UInt16 = 0,
):
    """Loads a box.

    Parameters:
        rank: Of the tensor.
        multicast: Whether the box goes to several blocks of the cluster.
        pair: Whether `barrier` may be the other block's of a pair (two blocks
            of a cluster whose ranks differ in the last bit), as a
            `peer_address`; with `multicast` the bytes count in the block of
            each pair that has its place.

    Args:
        destination: Where the box goes, aligned to the swizzle's pattern.
        map: The descriptor.
        barrier: The barrier that counts the bytes.
        at: The box's first element.
        peers: With `multicast`, one bit for each block; each gets the box, and
            the bytes counted, at its own `destination` and `barrier`.
    """
    comptime name = String(
        "cp.async.bulk.tensor.",
        rank,
        "d.shared::cluster.global.mbarrier::complete_tx::bytes",
        ".multicast::cluster" if multicast else "",
        ".cta_group::2" if pair else "",
        " [$0], [$1, ",
        _coordinates[rank, 4](),
        "], [$2]",
        ", $3;" if multicast else ";",
    )
    inlined_assembly[name, NoneType, constraints="r,l,r,h,r,r,r,r,r,~{memory}"](
        destination,
        _map_address(map),
        barrier,
        peers,
        _at(at, 0),
        _at(at, 1),
        _at(at, 2),
        _at(at, 3),
        _at(at, 4),
    )


@always_inline
def load_im2col[
    rank: Int, *, multicast: Bool = False, pair: Bool = False
](
    destination: SharedAddress,
    ref map: TensorMap,
    barrier: SharedAddress,
    at: IndexList[rank],
    offsets: IndexList[rank - 2],
    peers: UInt16 = 0,
):
    """Loads the pixels of a traversal (im2col).

    Parameters:
        rank: Of the tensor, 3 to 5.
        multicast: Whether the pixels go to several blocks of the cluster.
        pair: Whether `barrier` may be the other block's of a pair, as a
            `peer_address`.

    Args:
        destination: Where the pixels go, one row each, aligned to the
            swizzle's pattern.
        map: The descriptor.
        barrier: The barrier that counts the bytes.
        at: First channel, the traversal's first pixel, image.
        offsets: The filter tap's position along each spatial dimension, which
            is added to every pixel of the traversal.
        peers: With `multicast`, one bit for each block; each gets the pixels,
            and the bytes counted, at its own `destination` and `barrier`.
    """
    comptime name = String(
        "cp.async.bulk.tensor.",
        rank,
        "d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
        ".multicast::cluster" if multicast else "",
        ".cta_group::2" if pair else "",
        " [$0], [$1, ",
        _coordinates[rank, 4](),
        "], [$2], ",
        _coordinates[rank - 2, 9](),
        ", $3;" if multicast else ";",
    )
    inlined_assembly[
        name, NoneType, constraints="r,l,r,h,r,r,r,r,r,h,h,h,~{memory}"
    ](
        destination,
        _map_address(map),
        barrier,
        peers,
        _at(at, 0),
        _at(at, 1),
        _at(at, 2),
        _at(at, 3),
        _at(at, 4),
        UInt16(_at(offsets, 0)),
        UInt16(_at(offsets, 1)),
        UInt16(_at(offsets, 2)),
    )


@always_inline
def store_tile[
    rank: Int
](ref map: TensorMap, source: SharedAddress, at: IndexList[rank]):
    """Stores a box; elements outside the tensor are dropped.

    Parameters:
        rank: Of the tensor.

    Args:
        map: The descriptor.
        source: The box in shared memory, visible to TMA
            (`fence_async_proxy`).
        at: The box's first element; no coordinate may be negative.
    """
    comptime name = String(
        "cp.async.bulk.tensor.",
        rank,
        "d.global.shared::cta.bulk_group [$1, ",
        _coordinates[rank, 2](),
        "], [$0];",
    )
    inlined_assembly[name, NoneType, constraints="r,l,r,r,r,r,r,~{memory}"](
        source,
        _map_address(map),
        _at(at, 0),
        _at(at, 1),
        _at(at, 2),
        _at(at, 3),
        _at(at, 4),
    )


@always_inline
def fence_async_proxy():
    """Makes this thread's writes to shared memory visible to TMA;
    a barrier must follow before another thread starts the store."""
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def commit_stores():
    """Commits this thread's bulk group."""
    inlined_assembly[
        "cp.async.bulk.commit_group;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def wait_stores_read[pending: Int]():
    """Waits until all but the latest bulk groups of this thread have read
    their shared memory.

    Parameters:
        pending: Groups that may be unread.
    """
    inlined_assembly[
        "cp.async.bulk.wait_group.read $0;",
        NoneType,
        constraints="n,~{memory}",
    ](pending)
