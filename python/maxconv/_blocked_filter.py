"""Filters in the interleaved layouts C/xRSKx, ``[C / x, R, S, K, x]``, as arrays; without MAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._checks import show
from ._fields import BLOCKED_FILTERS

__all__ = ["array_of_krsc", "blocks_of", "krsc_of_array", "without_blocks"]

Array: TypeAlias = npt.NDArray[Any]


def blocks_of(filter_layout: object, shape: Sequence[Any] | None = None) -> int | None:
    """Returns the channels of a block of an interleaved layout, ``None`` of any other.

    Args:
        filter_layout: The argument.
        shape: The filter's, which is checked if it is given.

    Raises:
        ValueError: The shape is none of such a layout.
    """
    name = getattr(filter_layout, "value", filter_layout)
    block = BLOCKED_FILTERS.get(name) if isinstance(name, str) else None
    if block is None or shape is None:
        return block
    if len(shape) != 5 or shape[4] != block:
        raise ValueError(
            f"filter: shape {show(tuple(shape))} is not in layout {name}; [channels / {block}, r, "
            f"s, filters, {block}] is allowed"
        )
    return block


def without_blocks(values: Array, filter_layout: object) -> tuple[Array, object]:
    """Returns a filter and its layout: ``"KRSC"`` of an interleaved one.

    Raises:
        ValueError: The shape is none of the layout.
    """
    if blocks_of(filter_layout, values.shape) is None:
        return values, filter_layout
    return krsc_of_array(values), "KRSC"


def array_of_krsc(krsc: Array, channels: int) -> Array:
    """Returns ``[K, R, S, C]`` as ``[C / x, R, S, K, x]``, zeros behind the last channel.

    Args:
        krsc: The filter.
        channels: Of a block, x.
    """
    filters, rows, columns, own = krsc.shape
    filled = np.pad(krsc, [(0, 0)] * 3 + [(0, -own % channels)])
    blocks = filled.reshape(filters, rows, columns, -1, channels)
    return np.ascontiguousarray(blocks.transpose(3, 1, 2, 0, 4))


def krsc_of_array(blocks: Array) -> Array:
    """Returns ``[C / x, R, S, K, x]`` as ``[K, R, S, C]``."""
    pieces, rows, columns, filters, channels = blocks.shape
    krsc: Array = blocks.transpose(3, 1, 2, 0, 4)
    return krsc.reshape(filters, rows, columns, pieces * channels)
