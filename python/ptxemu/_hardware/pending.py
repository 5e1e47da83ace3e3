"""What is under way beside the threads that started it: copies, transfers, multiplies."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .registers import Array
from .scheduler import Operation, Scheduler, Waiters

__all__ = [
    "Accumulator",
    "Arrivals",
    "CopyGroup",
    "MultiplyGroup",
    "TensorOperation",
    "Transfer",
    "Transfers",
    "Warpgroup",
]

#: Warps of a warpgroup.
_WARPS = 4


@dataclass(eq=False)
class CopyGroup:
    """Copies that a thread waits for together: a group of cp.async or of cp.async.bulk.

    Attributes:
        copies: All of them.
        reading: Copies that have not read their source.
        running: Copies that are not done.
        awaited: Whether the thread waited until their sources were read.
        waiters: Tasks that wait for them.
    """

    copies: int = 0
    reading: int = 0
    running: int = 0
    awaited: bool = False
    waiters: Waiters = field(default_factory=Waiters)


@dataclass(eq=False)
class Transfer:
    """A load or store of tensor memory, or an arrival in another block, under way.

    Attributes:
        act: Does it.
        done: Whether it is done.
    """

    act: Callable[[], None]
    done: bool = False

    def complete(self) -> None:
        """Does it, if it is not done."""
        if not self.done:
            self.done = True
            self.act()


class Transfers:
    """A warp's loads or stores of tensor memory that it has not waited for.

    Attributes:
        waiters: Tasks that wait for them.
    """

    def __init__(self) -> None:
        self.waiters = Waiters()
        self._running: list[Transfer] = []

    def unfinished(self) -> list[Transfer]:
        """Those that are not done; the others are forgotten."""
        self._running = [entry for entry in self._running if not entry.done]
        return self._running

    def start(
        self, scheduler: Scheduler[Any], act: Callable[[], None], operation: Operation
    ) -> Transfer:
        """Lets one happen some time."""
        transfer = Transfer(act)

        def complete() -> None:
            transfer.complete()
            self.waiters.wake()

        self._running.append(transfer)
        scheduler.later(complete, operation)
        return transfer


class Arrivals:
    """A block's arrivals at mbarriers of other blocks: what one of them is sent comes in order."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[Transfer]] = defaultdict(deque)

    def send(
        self, rank: int, scheduler: Scheduler[Any], act: Callable[[], None], operation: Operation
    ) -> None:
        """Lets one come some time.

        Args:
            rank: Of the other block.
            scheduler: Draws when.
            act: Arrives.
            operation: The arrival, for a trace.
        """
        sent, arrival = self._sent[rank], Transfer(act)
        sent.append(arrival)

        def come() -> None:
            while not arrival.done:
                sent.popleft().complete()

        scheduler.later(come, operation)

    def complete(self) -> None:
        """Lets all come."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().complete()


@dataclass(eq=False)
class TensorOperation:
    """A multiply or a copy of the tensor cores (tcgen05) under way.

    Attributes:
        act: Does it.
        before: Operations that are done first.
        queue: Operations of one accumulator, in order; None for a copy.
        done: Whether it is done.
    """

    act: Callable[[], None]
    before: list[TensorOperation] = field(default_factory=list)
    queue: deque[TensorOperation] | None = None
    done: bool = False

    def complete(self) -> None:
        """Does it and all that is done before, if it is not done."""
        while not self.done:
            (self.queue.popleft() if self.queue is not None else self)._finish()

    def _finish(self) -> None:
        self.done = True
        for earlier in self.before:
            earlier.complete()
        self.before = []
        self.act()


@dataclass(eq=False)
class Accumulator:
    """Where tcgen05 multiplies of one shape add to: they happen in order.

    Attributes:
        number: Of its operations, for tensor memory's shadow.
        queue: Those that are not done.
    """

    number: int
    queue: deque[TensorOperation] = field(default_factory=deque)


@dataclass(eq=False)
class MultiplyGroup:
    """wgmma multiplies that a warpgroup committed together: they complete as one.

    Attributes:
        acts: What computes them, in each warp's order.
        registers: What they may change or read, by warp.
        committed: Warps that have closed it.
        done: Whether it has completed.
    """

    acts: list[Callable[[], None]] = field(default_factory=list)
    registers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    committed: int = 0
    done: bool = False


@dataclass(eq=False)
class Warpgroup:
    """Four warps' wgmma multiplies.

    Attributes:
        groups: In order.
        opened: The group that a warp's multiplies go to, by warp.
        awaited: Groups that a warp has waited for, by warp.
        fenced: The 32-bit registers of a warp as they were at its latest fence, and as multiplies
            have left them since, ``[rows, 32]``.
        waiters: Tasks that wait for groups.
    """

    groups: list[MultiplyGroup] = field(default_factory=list)
    opened: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)
    fenced: dict[int, Array] = field(default_factory=dict)
    waiters: Waiters = field(default_factory=Waiters)
    _started: int = 0
    _busy: bool = False

    def open(self, warp: int) -> MultiplyGroup:
        """The group that is open for a warp."""
        number = self.opened.setdefault(warp, 0)
        while len(self.groups) <= number:
            self.groups.append(MultiplyGroup())
        return self.groups[number]

    def commit(self, warp: int, scheduler: Scheduler[Any]) -> None:
        """Closes a warp's open group; when all four warps have, it completes some time."""
        self.open(warp).committed += 1
        self.opened[warp] += 1
        self._start(scheduler)

    def _start(self, scheduler: Scheduler[Any]) -> None:
        """Lets the next group complete some time, if all four warps have committed it."""
        if self._busy or self._started == len(self.groups):
            return
        group = self.groups[self._started]
        if group.committed < _WARPS:
            return
        self._busy = True
        self._started += 1

        def complete() -> None:
            for act in group.acts:
                act()
            group.acts.clear()
            group.done, self._busy = True, False
            self.waiters.wake()
            self._start(scheduler)

        name = f"group of {len(group.acts)} warps' multiplies"
        scheduler.later(complete, Operation("wgmma", name))
