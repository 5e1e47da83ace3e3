"""A convolution of an enlarged image as one of the small image: its geometry, and its filter.

Nearest-neighbour enlargement by ``u`` repeats each pixel, so that neighbouring taps read the same
one: with ``f = (p - padding) mod u``, output ``p`` reads pixel ``floor((p - padding) / u) +
floor((f + dilation * r) / u)`` through tap ``r``. Taps of one pixel are summed. That gives a filter
for each ``f``, and outputs whose ``f`` differ lie side by side in the filters' dimension of one
convolution of the small image: a sub-pixel convolution (Shi et al., CVPR 2016; Aitken et al.,
"Checkerboard artifact free sub-pixel convolution", 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ._packing import Array

__all__ = ["SubpixelAxis", "fold_array", "fold_axes", "saves_products"]

T = TypeVar("T")


@dataclass(frozen=True)
class SubpixelAxis:
    """The sub-pixel form along one dimension, of stride 1 and dilation 1."""

    block: int
    """Output elements of each position: the factor of the enlargement."""
    crop: int
    """Elements of the first block that lie in front of the output."""
    members: tuple[tuple[tuple[int, ...], ...], ...]
    """The filter's taps that are summed, by element of the block and by tap; none is a zero."""
    pad_before: int
    pad_after: int

    @property
    def taps(self) -> int:
        """Taps of each summed filter."""
        return len(self.members[0])

    @classmethod
    def of(
        cls, *, factor: int, taps: int, dilation: int, pad_before: int, pad_after: int
    ) -> SubpixelAxis:
        """Returns the form of a convolution of stride 1.

        Args:
            factor: Of the enlargement.
            taps: The filter's.
            dilation: Elements of the enlarged input from one tap to the next.
            pad_before: Zeros in front of the enlarged input.
            pad_after: Zeros behind it.
        """
        read = [[(f + dilation * r) // factor for r in range(taps)] for f in range(factor)]
        count = 1 + max(map(max, read))
        members = tuple(
            tuple(tuple(r for r in range(taps) if of[r] == tap) for tap in range(count))
            for of in read
        )
        before, crop = -(-pad_before // factor), -pad_before % factor
        # Outputs beyond ``factor`` times the input's size, and positions beyond the input's size.
        growth = pad_before + pad_after - dilation * (taps - 1)
        positions = -(-(growth + crop) // factor)
        return cls(factor, crop, members, before, positions + count - 1 - before)


def saves_products(
    factors: Sequence[int], taps: Sequence[int], dilation: Sequence[int], group_channels: int
) -> bool:
    """Whether the sub-pixel form pays where an enlargement was written in front of a convolution.

    It has fewer products where taps meet. A depthwise convolution is bound by memory, and kernels
    for one filter a channel are the faster ones.

    Args:
        factors: Of the enlargement, one a spatial dimension.
        taps: The filter's.
        dilation: One a spatial dimension.
        group_channels: Channels that a filter reads.
    """
    kept = math.prod(
        SubpixelAxis.of(factor=u, taps=r, dilation=d, pad_before=0, pad_after=0).taps
        for u, r, d in zip(factors, taps, dilation, strict=True)
    )
    return group_channels > 1 and kept < math.prod(taps)


def fold_axes(
    value: T,
    axes: Sequence[SubpixelAxis],
    first: int,
    *,
    sum_of: Callable[[T, int, tuple[int, ...]], T],
    stack: Callable[[list[T], int], T],
) -> T:
    """Sums a filter's taps.

    Args:
        value: The filter.
        axes: One a spatial dimension.
        first: The dimension of the first of them in ``value``.
        sum_of: Returns the sum of some elements of a dimension, without that dimension; zeros of
            none.
        stack: Returns values side by side in a new dimension.

    Returns:
        The filters, with a dimension in front for each spatial one: the places in a block.
    """
    for i, axis in enumerate(axes):
        at = i + first + i
        value = stack(
            [stack([sum_of(value, at, taps) for taps in place], at) for place in axis.members], i
        )
    return value


def fold_array(krsc: Array, axes: Sequence[SubpixelAxis], groups: int) -> Array:
    """Returns the filters of the sub-pixel form: of a group, all of each place follow each other.

    Args:
        krsc: ``[K, *taps, C / groups]`` of float32 or float64.
        axes: One a spatial dimension.
        groups: A divisor of ``K``.

    Returns:
        ``[K * places, *taps, C / groups]``, summed in float64, of the same type.
    """
    folded = fold_axes(
        krsc.astype(np.float64),
        axes,
        1,
        sum_of=lambda value, at, taps: value.take(taps, at).sum(at),
        stack=lambda values, at: np.stack(values, at),
    )
    filters, *_, channels = krsc.shape
    places = math.prod(axis.block for axis in axes)
    taps = tuple(axis.taps for axis in axes)
    split = folded.reshape(places, groups, filters // groups, *taps, channels)
    whole = np.moveaxis(split, 1, 0).reshape(filters * places, *taps, channels)
    return np.ascontiguousarray(whole, krsc.dtype)
