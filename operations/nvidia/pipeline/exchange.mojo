"""Shared memory of this block and of others of its cluster, 16 bytes at a time,
which are passed as float32."""

from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly

from ..tma.copy import SharedAddress

comptime QUAD = 4
"""Values of an access."""

comptime QUAD_BYTES = 16
"""Bytes of an access, and the alignment of its address."""

comptime Quad = SIMD[DType.float32, QUAD]


@always_inline
def peer_address(address: SharedAddress, block: UInt32) -> SharedAddress:
    """The address in another block of the cluster that corresponds to `address`
    in this block.

    Args:
        address: In this block.
        block: The other's rank in the cluster.

    Returns:
        An address for `load_peer` and `store_peer`.
    """
    return inlined_assembly[
        "mapa.shared::cluster.u32 $0, $1, $2;", UInt32, constraints="=r,r,r"
    ](address, block)


@always_inline
def load_peer(address: SharedAddress) -> Quad:
    """Loads from a block of the cluster.

    Args:
        address: Of `peer_address`, or of this block.
    """
    var loaded = inlined_assembly[
        "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,~{memory}",
    ](address)
    return Quad(loaded[0], loaded[1], loaded[2], loaded[3])


@always_inline
def store_peer(address: SharedAddress, values: Quad):
    """Stores to a block of the cluster.

    Args:
        address: Of `peer_address`, or of this block.
        values: The values.
    """
    inlined_assembly[
        "st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,f,f,f,f,~{memory}",
    ](address, values[0], values[1], values[2], values[3])


@always_inline
def send_peer(address: SharedAddress, barrier: SharedAddress, values: Quad):
    """Starts to store to a block of the cluster. `QUAD_BYTES` count at its
    barrier when they have arrived.

    Args:
        address: Of `peer_address`.
        barrier: The barrier's address in the same block, of `peer_address`.
        values: The values.
    """
    inlined_assembly[
        (
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            " [$0], {$2, $3, $4, $5}, [$1];"
        ),
        NoneType,
        constraints="r,r,f,f,f,f,~{memory}",
    ](address, barrier, values[0], values[1], values[2], values[3])
