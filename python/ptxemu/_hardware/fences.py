"""Who wrote shared memory by ordinary stores, and who has fenced since.

The asynchronous proxy (bulk copies, wgmma) sees an ordinary store only after
``fence.proxy.async`` (PTX ISA 9.0, 8.6 and 9.7.13.4), by the thread that wrote or by the one that
starts the operation, which must have synchronized with the writer.
"""

from __future__ import annotations

import numpy as np

from .._errors import FenceError
from .registers import Array

__all__ = ["Fences", "Writes"]

#: Bytes whose writer is known together.
WORD = 4


class Fences:
    """When each thread of a launch last executed a proxy fence."""

    def __init__(self) -> None:
        self.time = 1
        self.passed = np.zeros(1024, np.int64)

    def track(self, size: int) -> Writes:
        """Returns the notes of a block's shared memory."""
        return Writes(self, size)

    def reach(self, threads: int) -> None:
        """Makes room for threads up to a number."""
        if threads > len(self.passed):
            self.passed = np.concatenate([self.passed, np.zeros(threads, np.int64)])

    def fence(self, threads: Array) -> None:
        """Threads execute a fence."""
        self.time += 1
        self.passed[threads] = self.time


class Writes:
    """Which thread wrote a word of a block's shared memory, and when; 0 if no thread did."""

    def __init__(self, fences: Fences, size: int) -> None:
        words = -(-size // WORD) + 4
        self.fences = fences
        self.writer = np.zeros(words, np.int32)
        self.time = np.zeros(words, np.int64)

    def note(self, offsets: Array, width: int, threads: Array) -> None:
        """Lanes wrote ``width`` bytes each, at byte offsets."""
        self.fences.time += 1
        words = offsets // WORD
        for k in range(max(1, width // WORD)):
            self.writer[words + k] = threads
            self.time[words + k] = self.fences.time

    def forget(self, index: Array) -> None:
        """The asynchronous proxy wrote bytes."""
        self.time[index // WORD] = 0

    def check(self, index: Array, issuer: int, what: str) -> None:
        """Raises unless a fence followed every ordinary store to some bytes.

        Args:
            index: Of the bytes, or of one in each word.
            issuer: The thread that starts the operation.
            what: The operation, in messages.

        Raises:
            FenceError: With the byte and the thread that wrote it.
        """
        words = index // WORD
        time = self.time[words]
        missing = (self.fences.passed[self.writer[words]] < time) & (
            self.fences.passed[issuer] < time
        )
        if missing.any():
            word = int(words[missing].reshape(-1)[0])
            raise FenceError(
                f"{what} reads byte {word * WORD} of shared memory, which thread "
                f"{int(self.writer[word])} of the launch wrote, and no fence.proxy.async followed"
            )
