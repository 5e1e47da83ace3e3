"""Barriers: mbarriers, named ones, a cluster's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .._errors import BarrierError
from .registers import LANES
from .scheduler import Waiters

__all__ = [
    "BarrierKinds",
    "BlockThreads",
    "ClusterBarrier",
    "ClusterThreads",
    "MBarrier",
    "NamedBarrier",
]

#: The largest transaction count, and the largest count of arrivals (PTX ISA 9.0, 9.7.13.15.2).
_MAXIMUM = (1 << 20) - 1


class BlockThreads(Protocol):
    """A block as its barriers know it.

    Attributes:
        index: In the grid, x first; the block's name in messages.
        rank: In the cluster.
        live_threads: Threads that have not exited.
    """

    index: tuple[int, int, int]
    rank: int
    live_threads: int


class ClusterThreads(Protocol):
    """A cluster as its barrier knows it."""

    @property
    def blocks(self) -> Sequence[BlockThreads]:
        """Its blocks, by rank."""

    def threads(self) -> int:
        """Threads that have not exited."""


class MBarrier:
    """An mbarrier (PTX ISA 9.0, 9.7.13.15).

    Attributes:
        count: Arrivals that a phase expects.
        pending: Arrivals that the current phase still expects.
        transactions: Bytes announced minus bytes that came.
        phase: Phases that have completed.
        thread: Who initialized it.
        published: Whether a fence followed, so that copies of the asynchronous proxy may use it.
    """

    def __init__(self, block: BlockThreads, offset: int, count: int, thread: int) -> None:
        if not 1 <= count <= _MAXIMUM:
            raise BarrierError(f"an mbarrier of {count} arrivals; 1 to {_MAXIMUM} are allowed")
        self.block = block
        self.offset = offset
        self.count = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.thread = thread
        self.published = False
        self.waiters = Waiters()

    def __str__(self) -> str:
        return (
            f"the mbarrier at byte {self.offset} of block {self.block.index} (phase {self.phase}, "
            f"{self.pending} of {self.count} arrivals and {self.transactions} bytes outstanding)"
        )

    def arrive(self, count: int = 1, drop: bool = False) -> int:
        """Arrives; returns the phase before."""
        phase = self.phase
        if count > self.pending:
            raise BarrierError(f"{count} arrivals too many: {self}")
        self.pending -= count
        if drop:
            self.count -= count
        self._complete_phase()
        return phase

    def expect(self, transactions: int) -> None:
        """Announces bytes; a negative number is bytes that came."""
        self.transactions += transactions
        if abs(self.transactions) > _MAXIMUM:
            raise BarrierError(
                f"a transaction count of {self.transactions}, beyond {_MAXIMUM}: {self}"
            )
        self._complete_phase()

    def _complete_phase(self) -> None:
        """Begins the next phase if nothing is outstanding."""
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.waiters.wake()

    def completed(self, parity: int) -> bool:
        """Whether the latest phase of a parity has completed (``parity`` waits)."""
        return self.phase & 1 != parity


class NamedBarrier:
    """A block's barrier of a number (PTX ISA 9.0, 9.7.13.1)."""

    def __init__(self, block: BlockThreads, number: int) -> None:
        self.block = block
        self.number = number
        self.expected: int | None = None
        self.arrived = 0
        self.generation = 0
        self.waiters = Waiters()

    def __str__(self) -> str:
        needed = self.expected or self.block.live_threads
        return f"barrier {self.number} ({self.arrived} of {needed} threads have arrived)"

    def arrive(self, threads: int | None) -> int:
        """A warp arrives; returns the generation that it belongs to.

        Args:
            threads: That the barrier is for; all of the block if None.
        """
        if threads is not None and (threads % LANES or threads <= 0):
            raise BarrierError(f"barrier {self.number} for {threads} threads; no multiple of 32")
        if self.arrived and threads != self.expected:
            raise BarrierError(
                f"barrier {self.number} for {threads or 'all'} threads, and others arrived for "
                f"{self.expected or 'all'}"
            )
        self.expected = threads
        generation = self.generation
        self.arrived += LANES
        self.complete()
        return generation

    def complete(self) -> None:
        """Begins the next generation if all have arrived."""
        needed = self.expected
        if needed is None:
            needed = -(-self.block.live_threads // LANES) * LANES
        if self.arrived and self.arrived >= needed:
            self.arrived, self.expected = 0, None
            self.generation += 1
            self.waiters.wake()


class ClusterBarrier:
    """The barrier of a cluster's threads (PTX ISA 9.0, 9.7.13.3)."""

    def __init__(self, cluster: ClusterThreads) -> None:
        self.cluster = cluster
        self.arrived = 0
        self.generation = 0
        self.waiters = Waiters()

    def __str__(self) -> str:
        return f"barrier.cluster ({self.arrived} of {self.cluster.threads()} threads have arrived)"

    def arrive(self, threads: int) -> int:
        """Threads arrive; returns the generation that they belong to."""
        generation = self.generation
        self.arrived += threads
        self.complete()
        return generation

    def complete(self) -> None:
        """Begins the next generation if all threads that have not exited have arrived."""
        if self.arrived and self.arrived >= self.cluster.threads():
            self.arrived = 0
            self.generation += 1
            self.waiters.wake()


@dataclass(frozen=True)
class BarrierKinds:
    """What a launch makes its barriers of; a trace has its own."""

    mbarrier: Callable[[BlockThreads, int, int, int], MBarrier] = MBarrier
    named: Callable[[BlockThreads, int], NamedBarrier] = NamedBarrier
    cluster: Callable[[ClusterThreads], ClusterBarrier] = ClusterBarrier
