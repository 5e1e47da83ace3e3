"""Copies of interleaved activations with the channels last."""

from ..conv.blocks import BlockedActivation
from ..conv.fields import BLOCKS, INTERLEAVED
from ..conv.memory import Reads, Writes
from .pixel import Pixel

comptime _TOGETHER = 4
"""The shortest blocks that are stored together: 16 bytes of integers."""


@always_inline
def copy_pixels[
    dtype: DType
](
    x: BlockedActivation[dtype],
    first: Pixel,
    count: Int,
    channels: Int,
    to: Writes[dtype],
):
    """Copies all channels of neighbouring pixels of a row, pixel by pixel;
    writes nothing behind them.

    Parameters:
        dtype: Of the activation.

    Args:
        x: The activation.
        first: The first pixel, inside the image.
        count: How many there are.
        channels: Of the activation.
        to: Where to, `count * channels` elements.
    """
    var map = x.map
    if count <= 0:
        return
    var begin = map.offset(first.n, 0, first.at[1], first.at[2])
    comptime for i in range(len(BLOCKS)):
        comptime block = BLOCKS[i]
        if map.x() == block:
            _copy_blocks[block](
                x.elements.unsafe_offset(begin),
                count,
                channels // block,
                pixel_stride=map.column * block,
                plane=map.plane * block,
                to=to,
            )


@always_inline
def _copy_blocks[
    block: Int, dtype: DType
](
    source: Reads[dtype],
    count: Int,
    pieces: Int,
    *,
    pixel_stride: Int,
    plane: Int,
    to: Writes[dtype],
):
    """Copies pixels of `pieces` blocks each, that lie a plane apart."""
    var channels = pieces * block
    var piece = 0
    comptime if block == INTERLEAVED:
        while piece + _TOGETHER <= pieces:
            var here = source.unsafe_offset(piece * plane)
            var target = to.unsafe_offset(piece * block)
            for _ in range(count):
                var low = here.unsafe_load[width=block]().join(
                    here.unsafe_load[width=block](plane)
                )
                var high = here.unsafe_load[width=block](2 * plane).join(
                    here.unsafe_load[width=block](3 * plane)
                )
                target.unsafe_store(0, low.join(high))
                here = here.unsafe_offset(pixel_stride)
                target = target.unsafe_offset(channels)
            piece += _TOGETHER
    while piece < pieces:
        var here = source.unsafe_offset(piece * plane)
        var target = to.unsafe_offset(piece * block)
        for _ in range(count):
            target.unsafe_store(0, here.unsafe_load[width=block]())
            here = here.unsafe_offset(pixel_stride)
            target = target.unsafe_offset(channels)
        piece += 1
