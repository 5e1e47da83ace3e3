"""The interleaved layouts: NC/xHWx and C/xHWNx of activations, C/xRSKx of filters.

``[N, H, W, C]`` is ``[N, C / x, H, W, x]`` or ``[C / x, H, W, N, x]`` there: x neighbouring
channels lie side by side, then the pixels of a row, or the images. In NC/xHWx the element of image
n, channel c, row h and column w has the offset ``c % x + x * w + s0 * h + s1 * (c // x) + s2 * n``,
with ``s0 = x * W``, ``s1 = s0 * H`` and ``s2 = s1 * C / x``. A filter is ``[C / x, R, S, K, x]``:
neighbouring filters are neighbours. ``operations/conv/interleave.mojo`` has the same maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.graph import TensorValue, TensorValueLike, ops

from ._checks import check_at_least, check_integer, check_size, show
from ._fields import BLOCKED_IMAGES, INTERLEAVED

__all__ = [
    "BLOCK_LAYOUTS",
    "LAST",
    "BlockLayout",
    "deinterleave",
    "interleave",
    "krsc_of_value",
    "value_of_krsc",
]


@dataclass(frozen=True)
class BlockLayout:
    """The layout of an image."""

    channels: int
    """Of a block; 0 for channels last."""
    batch_last: bool = False
    """Whether images are neighbours, and not pixels."""

    @property
    def name(self) -> str:
        """As ``input_layout`` has it."""
        own = (self.channels, self.batch_last)
        return next((name for name, placed in BLOCKED_IMAGES.items() if placed == own), "NHWC")

    @property
    def form(self) -> str:
        """The dimensions, for messages."""
        if not self.channels:
            return "[batch, h, w, channels]"
        x = self.channels
        if self.batch_last:
            return f"[channels / {x}, h, w, batch, {x}]"
        return f"[batch, channels / {x}, h, w, {x}]"

    def of_last(self, shape: Any) -> tuple[Any, ...]:
        """Returns the shape of an image whose shape with the channels last is ``shape``."""
        batch, height, width, channels = shape
        if not self.channels:
            return (batch, height, width, channels)
        pieces = channels // self.channels
        if self.batch_last:
            return (pieces, height, width, batch, self.channels)
        return (batch, pieces, height, width, self.channels)

    def to_last(self, shape: Any) -> tuple[Any, ...]:
        """Returns the shape with the channels last of an image of shape ``shape``."""
        if not self.channels:
            return tuple(shape)
        if self.batch_last:
            pieces, height, width, batch, _ = shape
        else:
            batch, pieces, height, width, _ = shape
        return (batch, height, width, pieces * self.channels)


LAST = BlockLayout(0)

#: The interleaved layouts of an image, by their names.
BLOCK_LAYOUTS = {name: BlockLayout(*placed) for name, placed in BLOCKED_IMAGES.items()}


def interleave(
    x: TensorValueLike, channels: int = INTERLEAVED, *, batch_last: bool = False
) -> TensorValue:
    """Brings an image from ``NHWC`` to NC/xHWx or C/xHWNx, with operations that MAX fuses.

    Args:
        x: The image, ``[N, H, W, C]``, of any type and on any device.
        channels: How many neighbouring channels lie side by side, a divisor of ``C``. Convolutions
            take 4, 16 and 32 on a CPU, and 4 on a GPU.
        batch_last: Whether the images are neighbours then, and not the pixels of a row: C/xHWNx.

    Returns:
        ``[N, C / channels, H, W, channels]``, or ``[C / channels, H, W, N, channels]``.

    Raises:
        TypeError: ``channels`` is no integer.
        ValueError: The rank is not 4, or ``C`` is symbolic or no multiple of ``channels``.
    """
    value, block = TensorValue(x), check_integer("channels", channels)
    check_at_least("channels", block, 1)
    if value.rank != 4:
        raise ValueError(
            f"x: shape {show(tuple(value.shape))} has rank {value.rank}; rank 4 is allowed: "
            f"{LAST.form}"
        )
    *outer, last = value.shape
    count = check_size("x", last)
    if not isinstance(count, int) or count % block:
        raise ValueError(
            f"x: {count} channels; a multiple of channels={block} is needed, known when the graph "
            "is built"
        )
    pieces = ops.reshape(value, (*outer, count // block, block))
    return ops.permute(pieces, [3, 1, 2, 0, 4] if batch_last else [0, 3, 1, 2, 4])


def deinterleave(x: TensorValueLike, *, batch_last: bool = False) -> TensorValue:
    """Brings an image from NC/xHWx or C/xHWNx to ``NHWC``, with operations that MAX fuses.

    Args:
        x: The image, ``[N, C / x, H, W, x]``, of any type and on any device.
        batch_last: Whether it is ``[C / x, H, W, N, x]``.

    Returns:
        ``[N, H, W, C]``.

    Raises:
        ValueError: The rank is not 5.
    """
    value = TensorValue(x)
    if value.rank != 5:
        form = "[channels / x, h, w, batch, x]" if batch_last else "[batch, channels / x, h, w, x]"
        raise ValueError(
            f"x: shape {show(tuple(value.shape))} has rank {value.rank}; rank 5 is allowed: {form}"
        )
    last = ops.permute(value, [3, 1, 2, 0, 4] if batch_last else [0, 2, 3, 1, 4])
    *outer, pieces, block = last.shape
    return ops.reshape(last, (*outer, pieces * block))


def value_of_krsc(krsc: TensorValue, channels: int) -> TensorValue:
    """Returns ``array_of_krsc`` of whole blocks with graph operations."""
    *outer, own = (int(size) for size in krsc.shape)
    blocks = ops.reshape(krsc, (*outer, own // channels, channels))
    return ops.permute(blocks, [3, 1, 2, 0, 4])


def krsc_of_value(blocks: TensorValue) -> TensorValue:
    """Returns ``krsc_of_array`` with graph operations."""
    krsc = ops.permute(blocks, [3, 1, 2, 0, 4])
    filters, rows, columns, pieces, channels = krsc.shape
    return ops.reshape(krsc, (filters, rows, columns, pieces * channels))
