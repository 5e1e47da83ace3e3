"""Copies in another memory format: channels last of contiguous tensors, and back.

On a CPU the kernels' library makes them, on PyTorch's threads: PyTorch's own copy takes two to six
times as long. Whatever else there is (GPUs, other strides) PyTorch copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from .._native import any_host
from ._dtypes import DTYPES
from ._threads import parallel_function, threads

__all__ = [
    "channels_last_copy",
    "channels_last_strides",
    "contiguous_copy",
    "contiguous_strides",
    "lies",
    "permuted_last",
]

#: Permutation of ``[N, C, *spatial]`` to ``[N, *spatial, C]``, by spatial rank.
_CHANNELS_LAST: Final = {1: (0, 2, 1), 2: (0, 2, 3, 1), 3: (0, 2, 3, 4, 1)}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of ``[N, C, *spatial]`` whose memory is ``[N, *spatial, C]``."""
    batch, *spatial, channels = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (batch, channels, *spatial)


def lies(shape: Sequence[int], stride: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements have the places of other strides, which are those of a dense tensor.

    Args:
        shape: A tensor's.
        stride: Its own strides.
        strides: The others.
    """
    if 0 in shape:
        return True
    pairs = zip(shape, stride, strides, strict=True)
    return all(size == 1 or own == other for size, own, other in pairs)


def channels_last_copy(shape: Sequence[int], stride: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Returns what makes ``[N, *spatial, C]``, contiguous, of tensors ``[N, C, *spatial]``.

    Args:
        shape: Theirs.
        stride: Their strides.
    """
    return _to_channels_last if lies(shape, stride, contiguous_strides(shape)) else permuted_last


def permuted_last(tensor: Tensor) -> Tensor:
    """Returns ``[N, *spatial, C]``, contiguous, of any ``[N, C, *spatial]``: PyTorch's copy."""
    return tensor.permute(_CHANNELS_LAST[tensor.dim() - 2]).contiguous()


def _to_channels_last(tensor: Tensor) -> Tensor:
    """Returns ``[N, *spatial, C]`` of a contiguous tensor."""
    if tensor.device.type != "cpu":
        return permuted_last(tensor)
    batch, channels, *spatial = tensor.shape
    made = tensor.new_empty((batch, *spatial, channels))
    if not _transpose(tensor, made, batch, channels, math.prod(spatial)):
        return permuted_last(tensor)
    return made


def contiguous_copy(tensor: Tensor) -> Tensor:
    """Returns ``tensor.contiguous()`` of a channels-last tensor in plain memory.

    Args:
        tensor: ``[N, C, *spatial]``, not empty.
    """
    batch, channels, *spatial = tensor.shape
    if tensor.device.type == "cpu":
        made = tensor.new_empty(tensor.shape)
        if _transpose(tensor, made, batch, math.prod(spatial), channels):
            return made
    return tensor.contiguous()


def _transpose(source: Tensor, target: Tensor, batch: int, rows: int, columns: int) -> bool:
    """Transposes matrices ``[rows, columns]`` in memory, if a library that can is loaded."""
    library = any_host()
    if library is None or source.dtype not in DTYPES:
        return False
    library.transpose(
        source.data_ptr(),
        target.data_ptr(),
        batch,
        rows,
        columns,
        source.element_size(),
        threads(),
        parallel_function(),
    )
    return True
