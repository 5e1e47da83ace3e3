"""Where an address leads: state spaces, windows of generic addresses, blocks of a cluster.

Shared addresses name the block in their upper bits, generic ones the state space in their top byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import MemoryFaultError
from .._hardware.barriers import MBarrier
from .._hardware.blocks import RANK_SHIFT, ThreadBlock
from .._hardware.memory import Memory
from .._hardware.registers import Array
from .paths import Path

__all__ = [
    "WINDOWS",
    "WINDOW_SHIFT",
    "Part",
    "addresses",
    "find_mbarrier",
    "gather",
    "generic_memory",
    "locate",
    "parts_of",
    "scatter",
]

#: Generic addresses of a state space have its number in their top byte.
WINDOW_SHIFT = 56

#: The numbers of the state spaces.
WINDOWS = {"global": 0, "const": 0, "shared": 1, "local": 2, "param": 3}

_IN_WINDOW = (1 << WINDOW_SHIFT) - 1


@dataclass(frozen=True)
class Part:
    """Lanes of an access whose addresses lie in one memory.

    Attributes:
        memory: Which one.
        addresses: In it.
        lanes: Their positions among the active lanes; a slice if it is all.
        block: The block whose shared memory it is.
    """

    memory: Memory
    addresses: Array
    lanes: Any
    block: ThreadBlock | None


def addresses(t: Path, view: int, row: int, offset: int) -> Array:
    """The addresses of the active lanes, int64."""
    found: Array = t.active(t.files[view][row]).astype(np.int64)
    return found + offset if offset else found


def _shared_block(t: Path, rank: int) -> ThreadBlock:
    """The block of the cluster that a shared address belongs to.

    Raises:
        MemoryFaultError: There is none, or its threads have exited.
    """
    blocks = t.block.cluster.blocks
    if not 0 <= rank < len(blocks):
        raise MemoryFaultError(f"shared memory of block {rank} of a cluster of {len(blocks)}")
    block = blocks[rank]
    if not block.live_threads:
        raise MemoryFaultError(f"shared memory of block {block}, which has ended")
    return block


def parts_of(t: Path, space: str, where: Array) -> Iterator[Part]:
    """Parts the addresses of the active lanes by the memory that they lie in."""
    if space == "shared":
        ranks = where >> RANK_SHIFT
        if (ranks == t.block.rank).all():
            yield Part(t.block.shared, where, slice(None), t.block)
            return
        for rank in np.unique(ranks):
            block = _shared_block(t, int(rank))
            lanes = np.flatnonzero(ranks == rank)
            yield Part(block.shared, where[lanes], lanes, block)
    elif space in ("global", "const"):
        yield Part(t.grid.device.memory, where, slice(None), None)
    elif space == "param":
        yield Part(t.grid.parameters, where, slice(None), None)
    elif space == "local":
        size = t.grid.local_bytes
        if len(where) and (int(where.max()) >= size or int(where.min()) < 0):
            raise MemoryFaultError(f"local memory at byte {int(where.max())} of {size}")
        yield Part(t.warp.local, where + np.flatnonzero(t.mask) * size, slice(None), None)
    else:
        yield from _generic_parts(t, where)


def _generic_parts(t: Path, where: Array) -> Iterator[Part]:
    windows = where >> WINDOW_SHIFT
    for window in np.unique(windows):
        space = ("global", "shared", "local", "param")[window & 3]
        lanes = np.flatnonzero(windows == window)
        inner = where[lanes] & _IN_WINDOW
        if space == "local" and len(lanes) != len(where):
            raise MemoryFaultError("lanes that access local memory and others by one instruction")
        for part in parts_of(t, space, inner):
            yield Part(part.memory, part.addresses, lanes[part.lanes], part.block)


def generic_memory(t: Path, address: int) -> tuple[Memory, int]:
    """The memory that a generic address outside of shared memory lies in, and its address there."""
    window = address >> WINDOW_SHIFT
    inner = address & _IN_WINDOW
    if window == WINDOWS["param"]:
        return t.grid.parameters, inner
    if window == WINDOWS["global"]:
        return t.grid.device.memory, inner
    raise MemoryFaultError(f"generic address {address:#x} is not in global or parameter memory")


def locate(t: Path, address: int, size: int, what: str) -> tuple[ThreadBlock, int]:
    """The block and the offset in its shared memory of a shared or generic address.

    Raises:
        MemoryFaultError: It is misaligned or out of bounds.
    """
    if address >> WINDOW_SHIFT == 1:
        address &= _IN_WINDOW
    block = _shared_block(t, address >> RANK_SHIFT)
    block.shared.index(np.array([address], np.int64), size, 1, what)
    return block, address - block.shared.base


def find_mbarrier(t: Path, address: int) -> MBarrier:
    """The mbarrier at an address."""
    block, offset = locate(t, address, 8, "an mbarrier")
    return block.mbarrier(offset)


def gather(t: Path, space: str, where: Array, size: int, count: int) -> Array:
    """Reads unsigned elements for the active lanes, ``[lanes]`` or ``[lanes, count]``."""
    result: Array | None = None
    for part in parts_of(t, space, where):
        values = part.memory.read(part.addresses, size, count)
        if isinstance(part.lanes, slice):
            return values
        if result is None:
            result = np.zeros((len(where), *values.shape[1:]), values.dtype)
        result[part.lanes] = values
    assert result is not None
    return result


def scatter(t: Path, space: str, where: Array, values: Array, size: int, count: int) -> None:
    """Writes the active lanes' values, and notes who wrote shared memory."""
    for part in parts_of(t, space, where):
        if part.memory is t.grid.parameters:
            raise MemoryFaultError("a write to parameter memory")
        part.memory.write(part.addresses, values[part.lanes], size, count)
        if part.block is not None:
            offsets = part.addresses - part.memory.base
            part.block.writes.note(offsets, size * count, t.thread_numbers()[part.lanes])
