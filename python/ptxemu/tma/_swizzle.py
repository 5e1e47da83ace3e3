"""Where a byte of a row lies in shared memory.

The patterns are functions of the byte's address in shared memory (PTX ISA 9.0, 5.5.7): some address
bits are exchanged by xor with higher ones, so that a tile has to lie at a multiple of the pattern's
period for its first row to be in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._descriptor import Swizzle

__all__ = ["swizzle_address", "swizzle_bits", "swizzle_period"]

#: By pattern: the lowest bit that changes, how many change, and how far above them lie the bits
#: that they are xored with.
_XORS: dict[Swizzle, tuple[tuple[int, int, int], ...]] = {
    Swizzle.NONE: (),
    Swizzle.B32: ((4, 1, 3),),
    Swizzle.B64: ((4, 2, 3),),
    Swizzle.B128: ((4, 3, 3),),
    Swizzle.B128_ATOM_32B: ((5, 2, 2),),
    Swizzle.B128_ATOM_32B_FLIP_8B: ((5, 2, 2), (3, 1, 4)),
    Swizzle.B128_ATOM_64B: ((6, 1, 1),),
}


def swizzle_address(address: npt.NDArray[Any], swizzle: Swizzle) -> npt.NDArray[np.int64]:
    """Returns where bytes lie whose addresses without a swizzle would be ``address``.

    Its own inverse: the bits that others are xored with stay as they are. The patterns without
    atoms are recorded on an H200; those with atoms are the documentation's tables.
    """
    plain = np.asarray(address, np.int64)
    moved = plain
    for low, count, distance in _XORS[swizzle]:
        mask = ((1 << count) - 1) << low
        moved = moved ^ ((plain >> distance) & mask)
    return moved


def swizzle_bits(swizzle: Swizzle) -> str:
    """Describes a pattern as operations on address bits; empty for ``NONE``."""
    parts = []
    for low, count, distance in _XORS[swizzle]:
        bits = [(start, start + count - 1) for start in (low, low + distance)]
        names = [f"bit {a}" if a == b else f"bits {a}-{b}" for a, b in bits]
        parts.append(f"{names[0]} ^= {names[1]}")
    return ", ".join(parts)


def swizzle_period(swizzle: Swizzle) -> int:
    """Bytes after which a pattern repeats; 1 for ``NONE``."""
    ends = [low + distance + count for low, count, distance in _XORS[swizzle]]
    return 1 << max(ends, default=0)
