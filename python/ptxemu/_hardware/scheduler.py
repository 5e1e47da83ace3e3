"""Who runs next, and when what runs by itself gets done: both drawn from the seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

__all__ = ["UNNAMED", "Operation", "Scheduler", "Task", "Wait", "Waiters"]

#: Basic blocks that a task runs before another one is drawn, at most.
_LONGEST_TURN = 12

#: How often the warp that is ahead of the others gets the turn, and how often another one becomes
#: it.
_PREFERRED = 0.8
_CHANGES = 1 / 60

#: Asynchronous operations that wait until no task can run, in 100, and those among them that wait
#: until no other operation is under way either.
_LATEST = 40
_LAST = 8

#: Turns after which the others are done, on average.
_MEAN_DELAY = 24


@dataclass(frozen=True)
class Wait:
    """Why a task cannot go on.

    Attributes:
        subject: What it waits for, which says how it is when it is asked.
        purpose: What for.
    """

    subject: object
    purpose: str = ""

    @property
    def reason(self) -> str:
        """The rest of the sentence that begins with "waits for"."""
        return f"{self.subject}{self.purpose}"


class Task(Protocol):
    """What a scheduler runs: threads of a warp that execute together.

    Attributes:
        wait: Why it does not run.
    """

    wait: Wait | None

    @property
    def warp(self) -> object:
        """What it belongs to; tasks of one warp are preferred together."""

    def run(self, blocks: int) -> bool:
        """Runs a number of basic blocks, at most; returns whether the task can go on."""

    def wake(self) -> None:
        """Lets the task look again whether it can go on."""


class Waiters:
    """Tasks to wake when something happens."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Adds a task, once."""
        if not any(entry is task for entry in self.tasks):
            self.tasks.append(task)

    def wake(self) -> None:
        """Lets them all look again whether they can go on."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.wake()


class Operation(NamedTuple):
    """An asynchronous operation, as a trace shows it.

    Attributes:
        engine: What does it: its track.
        name: What it does.
        line: Of the instruction that started it; 0 if several did.
    """

    engine: str
    name: str
    line: int = 0


#: One that its instruction does not describe.
UNNAMED = Operation("asynchronous", "asynchronous work")


T = TypeVar("T", bound=Task)


class Scheduler(Generic[T]):
    """Runs tasks in turns of random length, and completes asynchronous operations late.

    Some operations wait until no task can run: whoever does not wait for them reads too early. Some
    wait for all others, too: a task that waits for one operation goes on without another.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runnable: list[T] = []
        self.waiting: dict[int, T] = {}
        self.timed: list[tuple[int, int, Callable[[], None]]] = []
        self.latest: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        self.ahead: object = None
        self.turn = 0
        self.numbers = 0

    def add(self, task: T) -> None:
        """Lets a task run."""
        self.runnable.append(task)

    def wake(self, task: T) -> None:
        """Lets a task that waits look again whether it can go on."""
        if self.waiting.pop(id(task), None) is not None:
            task.wait = None
            self.runnable.append(task)

    def later(self, act: Callable[[], None], operation: Operation = UNNAMED) -> None:
        """Completes an asynchronous operation some time."""
        drawn = self.random.randrange(100)
        if drawn < _LATEST:
            (self.last if drawn < _LAST else self.latest).append(act)
            return
        delay = int(self.random.expovariate(1 / _MEAN_DELAY))
        self.numbers += 1
        heapq.heappush(self.timed, (self.turn + delay, self.numbers, act))

    def run(self) -> None:
        """Runs until every task has ended or waits, and nothing is under way."""
        draw = self.random.random
        while True:
            self.turn += 1
            while self.timed and self.timed[0][0] <= self.turn:
                heapq.heappop(self.timed)[2]()
            runnable = self.runnable
            if runnable:
                chosen = self._choose(draw)
                task = runnable[chosen]
                if not self.give_turn(task, 1 + int(draw() * _LONGEST_TURN)):
                    if task.wait is not None:
                        self.waiting[id(task)] = task
                    if runnable[chosen] is not task:
                        chosen = runnable.index(task)
                    runnable[chosen] = runnable[-1]
                    runnable.pop()
            elif self.latest or self.timed or self.last:
                self._complete_one()
            else:
                return

    def give_turn(self, task: T, blocks: int) -> bool:
        """Runs a task for some basic blocks; returns whether it can go on."""
        return task.run(blocks)

    def _choose(self, draw: Callable[[], float]) -> int:
        """The task whose turn it is: often that of one warp, which gets ahead of the others."""
        runnable = self.runnable
        if draw() < _PREFERRED:
            for index, task in enumerate(runnable):
                if task.warp is self.ahead:
                    if draw() < _CHANGES:
                        self.ahead = None
                    return index
        chosen = int(draw() * len(runnable))
        if self.ahead is None or draw() < _CHANGES:
            self.ahead = runnable[chosen].warp
        return chosen

    def _complete_one(self) -> None:
        """Nothing else can happen: one of the operations under way completes."""
        count = len(self.latest) + bool(self.timed)
        if not count:
            self.last.pop(self.random.randrange(len(self.last)))()
            return
        chosen = self.random.randrange(count)
        late = chosen < len(self.latest)
        act = self.latest.pop(chosen) if late else heapq.heappop(self.timed)[2]
        act()
