"""TMA loads of one step of a tile's sum, for descriptors of any rank:
activations by im2col, filters in boxes."""

from std.utils import IndexList

from ..tma.copy import SharedAddress, load_im2col, load_tile
from ..tma.descriptor import TensorMap
from .tiles import LoadStart, Tap, TileGeometry


@always_inline
def load_pixels[
    *, multicast: Bool, pair: Bool = False
](
    destination: SharedAddress,
    ref map: TensorMap,
    barrier: SharedAddress,
    geometry: TileGeometry,
    first: LoadStart,
    tap: Tap,
    channel: Int,
    peers: UInt16,
):
    """Loads activations: as many pixels as the descriptor has per column, at
    the offset of a tap.

    Parameters:
        multicast: Whether the pixels go to several blocks of the cluster.
        pair: Whether `barrier` may be the other block's of a pair.

    Args:
        destination: Where to, in shared memory.
        map: The activation's descriptor, of rank 3, 4 or 5.
        barrier: The barrier that counts the bytes.
        geometry: The problem.
        first: The first pixel.
        tap: The step; its `w` is 0 if the load serves a whole filter row.
        channel: The first channel.
        peers: With `multicast`, a bit for each block that gets the pixels.
    """
    var w = Int(tap.w * geometry.dilation_w)
    var h = Int(tap.h * geometry.dilation_h)
    var d = Int(tap.d * geometry.dilation_d)
    if geometry.rank == 4:
        load_im2col[4, multicast=multicast, pair=pair](
            destination,
            map,
            barrier,
            IndexList[4](channel, Int(first.w), Int(first.h), Int(first.image)),
            IndexList[2](w, h),
            peers,
        )
    elif geometry.rank == 5:
        load_im2col[5, multicast=multicast, pair=pair](
            destination,
            map,
            barrier,
            IndexList[5](
                channel,
                Int(first.w),
                Int(first.h),
                Int(first.d),
                Int(first.image),
            ),
            IndexList[3](w, h, d),
            peers,
        )
    else:
        load_im2col[3, multicast=multicast, pair=pair](
            destination,
            map,
            barrier,
            IndexList[3](channel, Int(first.w), Int(first.image)),
            IndexList[1](w),
            peers,
        )


@always_inline
def load_filters[
    *, multicast: Bool, pair: Bool = False
](
    destination: SharedAddress,
    ref map: TensorMap,
    barrier: SharedAddress,
    geometry: TileGeometry,
    first: UInt32,
    tap: Tap,
    channel: Int,
    peers: UInt16,
):
    """Loads filters: one tap of the descriptor's box of filters.

    Parameters:
        multicast: Whether the filters go to several blocks of the cluster.
        pair: Whether `barrier` may be the other block's of a pair.

    Args:
        destination: Where to, in shared memory.
        map: The filter's descriptor, `[K, T*R*S, C/groups]`.
        barrier: The barrier that counts the bytes.
        geometry: The problem.
        first: The first filter.
        tap: The step.
        channel: The first channel.
        peers: With `multicast`, a bit for each block that gets the filters.
    """
    load_tile[3, multicast=multicast, pair=pair](
        destination,
        map,
        barrier,
        IndexList[3](channel, Int(tap.position(geometry)), Int(first)),
        peers,
    )
