"""Memory with a shadow: what every byte may be used for at the moment.

A byte's state is 0 when it may be read and written; the flags say why not. The shadow is viewed
at the width of an access, so that one comparison checks all bytes of all lanes.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from .._errors import MemoryFaultError, RaceError
from .registers import Array

__all__ = [
    "BARRIER",
    "CHUNK",
    "INVALID",
    "READING",
    "UNREAD",
    "UNWRITTEN",
    "WRITING",
    "Memory",
]

#: Nothing wrote the byte.
UNWRITTEN = 1
#: An asynchronous operation may write the byte at any time.
WRITING = 2
#: An asynchronous operation may read the byte at any time.
READING = 4
#: The byte belongs to nothing.
INVALID = 8
#: The byte belongs to an mbarrier.
BARRIER = 16
#: An asynchronous write brought the byte, and nobody has read it.
UNREAD = 32

_STOPS_READ = UNWRITTEN | WRITING | INVALID | BARRIER
_STOPS_WRITE = WRITING | READING | INVALID | BARRIER

#: Bytes that asynchronous reads are counted in.
CHUNK = 16

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Memory:
    """Bytes from an address on, with their state.

    Args:
        name: In messages.
        base: The first byte's address.
        size: Bytes.
        state: Of all bytes at first.
    """

    def __init__(self, name: str, base: int, size: int, state: int = 0) -> None:
        self.name = name
        self.base = base
        self.size = 0
        self.data: Array = np.zeros(0, np.uint8)
        self.state: Array = np.zeros(0, np.uint8)
        self.resize(size, state)

    def resize(self, size: int, state: int = 0) -> None:
        """Makes room for more bytes; those that are there stay."""
        room = -(-size // CHUNK) * CHUNK
        data, flags = np.zeros(room, np.uint8), np.full(room, INVALID, np.uint8)
        old = len(self.data)
        flags[old:size] = state
        data[:old], flags[:old] = self.data, self.state
        self.size, self.data, self.state = size, data, flags
        self.views = {n: data.view(kind) for n, kind in _UNSIGNED.items()}
        self.states = {n: flags.view(kind) for n, kind in _UNSIGNED.items()}
        self.chunks = data.reshape(-1, CHUNK)
        self.chunk_states = flags.reshape(-1, CHUNK)
        self.readers = np.zeros(room // CHUNK, np.uint16)

    def index(self, addresses: Array, size: int, count: int, what: str) -> Array:
        """Returns indices into the view of a width, after checking alignment and bounds.

        Args:
            addresses: Of the lanes, int64.
            size: Bytes of an element.
            count: Elements of a lane, one after the other.
            what: The access, in messages.

        Raises:
            MemoryFaultError: An address is misaligned, or out of bounds.
        """
        offsets = addresses - self.base
        width = size * count
        if (offsets & (width - 1)).any():
            bad = int(addresses[(offsets & (width - 1)) != 0][0])
            raise MemoryFaultError(
                f"{what} of {width} bytes at {self.where(bad)}: no multiple of {width}"
            )
        if offsets.min() < 0 or offsets.max() + width > self.size:
            bad = int(addresses[(offsets < 0) | (offsets + width > self.size)][0])
            raise MemoryFaultError(f"{what} of {width} bytes at {self.where(bad)}: out of bounds")
        first: Array = offsets // size
        return first if count == 1 else first[:, None] + np.arange(count)

    def where(self, address: int) -> str:
        """Names an address."""
        return f"{self.name} {address:#x} (byte {address - self.base})"

    def read(self, addresses: Array, size: int, count: int = 1) -> Array:
        """Returns unsigned elements, ``[lanes]`` or ``[lanes, count]``.

        Raises:
            MemoryFaultError: An address is misaligned, or out of bounds.
            RaceError: Nothing wrote a byte, or something may be writing it.
        """
        index = self.index(addresses, size, count, "a read")
        flags = self.states[size][index]
        if flags.any():
            self._check(index, size, _STOPS_READ, "a read")
            self.states[size][index] &= _repeat(0xFF & ~UNREAD, size)
        found: Array = self.views[size][index]
        return found

    def write(self, addresses: Array, values: Array, size: int, count: int = 1) -> None:
        """Writes unsigned elements; of lanes that write the same byte the last one wins.

        Raises:
            MemoryFaultError: An address is misaligned, or out of bounds.
            RaceError: Something may be reading or writing a byte.
        """
        index = self.index(addresses, size, count, "a write")
        flags = self.states[size][index]
        if flags.any():
            self._check(index, size, _STOPS_WRITE, "a write")
            self.states[size][index] = 0
        self.views[size][index] = values

    def _check(self, index: Array, size: int, stops: int, what: str) -> None:
        start = index.reshape(-1, 1) * size
        self.check_bytes((start + np.arange(size)).reshape(-1), stops, what)

    def check_bytes(self, index: Array, stops: int, what: str) -> None:
        """Raises if bytes, by their indices, have one of the flags."""
        flags = self.state[index] & stops
        if flags.any():
            position = np.flatnonzero(flags)[0]
            self.refuse(int(index.reshape(-1)[position]), int(flags.reshape(-1)[position]), what)

    def refuse(self, index: int, flags: int, what: str) -> NoReturn:
        """Raises the error of a byte's state."""
        where = self.where(self.base + index)
        if flags & INVALID:
            raise MemoryFaultError(f"{what} at {where}: it belongs to no variable or allocation")
        if flags & BARRIER:
            raise RaceError(f"{what} at {where}: it belongs to an mbarrier")
        if flags & WRITING:
            raise RaceError(f"{what} at {where}: an asynchronous copy may still be writing it")
        if flags & READING:
            raise RaceError(f"{what} at {where}: an asynchronous operation may still be reading it")
        raise RaceError(f"{what} at {where}: nothing has written it")

    def begin_write(self, index: Array, what: str) -> None:
        """Marks bytes, by their indices, that an asynchronous operation will write.

        Raises:
            MemoryFaultError: A byte belongs to nothing.
            RaceError: Another operation may be reading or writing one, or nobody has read any of
                what the last one brought.
        """
        flags = self.state[index]
        if (flags & _STOPS_WRITE).any():
            self.check_bytes(index, _STOPS_WRITE, what)
        if flags.size and (flags & UNREAD).all():
            where = self.where(self.base + int(index.reshape(-1)[0]))
            raise RaceError(
                f"{what} at {where}: nobody has read any of what the last copy brought there"
            )
        self.state[index] |= WRITING

    def end_write(self, index: Array, values: Array) -> None:
        """Writes what an asynchronous operation brings."""
        self.data[index] = values
        self.state[index] = UNREAD

    def begin_read(self, chunks: Array, what: str) -> None:
        """Marks chunks that an asynchronous operation will read; each only once.

        Raises:
            RaceError: Nothing wrote a byte, or something may be writing it.
        """
        flags = self.chunk_states[chunks]
        if (flags & _STOPS_READ).any():
            index = (np.asarray(chunks).reshape(-1, 1) * CHUNK + np.arange(CHUNK)).reshape(-1)
            self.check_bytes(index, _STOPS_READ, what)
        self.readers[chunks] += 1
        self.chunk_states[chunks] = (flags | READING) & ~np.uint8(UNREAD)

    def end_read(self, chunks: Array) -> None:
        """Takes the marks away again."""
        self.readers[chunks] -= 1
        done = chunks[self.readers[chunks] == 0]
        self.chunk_states[done] &= np.uint8(0xFF & ~READING)


def _repeat(byte: int, size: int) -> Array:
    """A byte in every byte of an unsigned number."""
    pattern: Array = np.full(size, byte, np.uint8).view(_UNSIGNED[size])
    return pattern
