"""Operands of a convolution whose input is enlarged: those of its sub-pixel form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._subpixel import SubpixelAxis, fold_axes

__all__ = ["folded_filter", "repeated"]


def folded_filter(weight: Tensor, axes: Sequence[SubpixelAxis], groups: int) -> Tensor:
    """Returns the filters that the kernels run, taps summed in float64.

    Args:
        weight: ``[K, C / groups, *taps]`` of a floating-point dtype.
        axes: One a spatial dimension.
        groups: A divisor of ``K``.

    Returns:
        ``[K * places, C / groups, *taps]`` of the same dtype.
    """

    def sum_of(value: Tensor, at: int, taps: tuple[int, ...]) -> Tensor:
        return value.index_select(
            at, torch.tensor(taps, dtype=torch.long, device=value.device)
        ).sum(at)

    folded = fold_axes(weight.detach().double(), axes, 2, sum_of=sum_of, stack=torch.stack)
    filters, channels = weight.shape[:2]
    taps = [axis.taps for axis in axes]
    split = folded.reshape(_places(axes), groups, filters // groups, channels, *taps)
    return split.movedim(1, 0).reshape(-1, channels, *taps).to(weight.dtype)


def repeated(vector: Tensor, axes: Sequence[SubpixelAxis], groups: int) -> Tensor:
    """Returns a vector of the filters' with a copy for each place in a block.

    Args:
        vector: ``[K]``.
        axes: One a spatial dimension.
        groups: A divisor of ``K``.
    """
    return vector.view(groups, 1, -1).expand(-1, _places(axes), -1).reshape(-1)


def _places(axes: Sequence[SubpixelAxis]) -> int:
    return math.prod(axis.block for axis in axes)
