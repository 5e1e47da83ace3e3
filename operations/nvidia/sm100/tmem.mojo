"""Tensor memory: 128 lanes by 512 columns of 32 bits a block (PTX ISA, "Tensor
Memory"). An address is `lane << 16 | column`; warp w of a warpgroup reaches
lanes `32*w` to `32*w + 31`.

One warp allocates it, of each block of a pair, and the same one frees it, once
no warp of either block reads it any more.
"""

from max.gpu.compute.arch.tcgen05 import tcgen05_ld, tcgen05_load_wait
from std.sys._assembly import inlined_assembly

from ..pipeline.chunks import shared_pointer
from ..tma.copy import SharedAddress
from ..limits import WARP
from .config import TMEM_COLUMNS


@always_inline
def allocate_tmem[cta_group: Int](slot: SharedAddress):
    """Allocates all columns, and gives up the right to allocate more. All
    threads of one warp; of a pair, the same warp of both blocks.

    Parameters:
        cta_group: Blocks that multiply together.

    Args:
        slot: Shared memory where the address is written.
    """
    comptime name = String(
        "tcgen05.alloc.cta_group::",
        cta_group,
        ".sync.aligned.shared::cta.b32 [$0], $1;",
    )
    inlined_assembly[name, NoneType, constraints="r,n,~{memory}"](
        slot, TMEM_COLUMNS
    )
    comptime permit = String(
        "tcgen05.relinquish_alloc_permit.cta_group::",
        cta_group,
        ".sync.aligned;",
    )
    inlined_assembly[permit, NoneType, constraints="~{memory}"]()


@always_inline
def free_tmem[cta_group: Int](address: UInt32):
    """Frees what `allocate_tmem` allocated. All threads of that warp.

    Parameters:
        cta_group: Blocks that multiply together.

    Args:
        address: Of the tensor memory.
    """
    comptime name = String(
        "tcgen05.dealloc.cta_group::", cta_group, ".sync.aligned.b32 $0, $1;"
    )
    inlined_assembly[name, NoneType, constraints="r,n,~{memory}"](
        address, TMEM_COLUMNS
    )


@always_inline
def tmem_address(slot: SharedAddress) -> UInt32:
    """The address of the tensor memory, once a barrier has followed its
    allocation.

    Args:
        slot: Where `allocate_tmem` wrote it.
    """
    return shared_pointer[DType.uint32](slot).unsafe_load(0)


@always_inline
def lane_offset(warp: UInt32) -> UInt32:
    """What a warp adds to an address, to read its own lanes.

    Args:
        warp: Of its warpgroup.
    """
    return warp * WARP << 16


@always_inline
def read_row[
    dtype: DType, columns: Int
](address: UInt32) -> SIMD[dtype, columns]:
    """Neighbouring columns of each thread's own lane: thread l of the warp has
    lane l of the warp's. All threads of the warp; done when it returns.

    Parameters:
        dtype: Of the accumulators: float32 or int32.
        columns: How many, a power of two up to 128.

    Args:
        address: Of the first column, with the warp's `lane_offset`.

    Returns:
        The values.
    """
    var loaded = tcgen05_ld[
        datapaths=32, bits=32, repeat=columns, dtype=dtype, pack=False
    ](address)
    tcgen05_load_wait()
    var values = SIMD[dtype, columns](0)
    comptime for i in range(columns):
        values[i] = _pinned(loaded[i])
    return values


@always_inline
def _pinned[dtype: DType](value: Scalar[dtype]) -> Scalar[dtype]:
    """Keeps the compiler from using a value before the wait, of whose effect on
    registers it knows nothing."""
    comptime kind = "f" if dtype == DType.float32 else "r"
    return inlined_assembly[
        "", Scalar[dtype], constraints=String("=", kind, ",0,~{memory}")
    ](value)


@always_inline
def order_after_barrier():
    """Orders what follows of this thread's accesses to tensor memory behind a
    barrier that it has waited for."""
    inlined_assembly[
        "tcgen05.fence::after_thread_sync;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def order_before_barrier():
    """Orders this thread's accesses to tensor memory in front of a barrier that
    it arrives at next."""
    inlined_assembly[
        "tcgen05.fence::before_thread_sync;",
        NoneType,
        constraints="~{memory}",
    ]()
