"""Who runs next, and when what runs by itself gets done: both drawn from the seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .paths import Path, Warp

__all__ = ["UNNAMED", "Operation", "Scheduler"]

#: Basic blocks that a path runs before another one is drawn, at most.
_LONGEST_TURN = 12

#: How often the warp that is ahead of the others gets the turn, and how often another one becomes
#: it.
_PREFERRED = 0.8
_CHANGES = 1 / 60

#: Asynchronous operations that wait until no path can run, in 100, and those among them that wait
#: until no other operation is under way either.
_LATEST = 40
_LAST = 8

#: Turns after which the others are done, on average.
_MEAN_DELAY = 24


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


class Scheduler:
    """Runs paths in turns of random length, and completes asynchronous operations late.

    Some operations wait until no path can run: whoever does not wait for them reads too early. Some
    wait for all others, too: a path that waits for one operation goes on without another.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runnable: list[Path] = []
        self.waiting: dict[int, Path] = {}
        self.timed: list[tuple[int, int, Callable[[], None]]] = []
        self.latest: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        self.ahead: Warp | None = None
        self.turn = 0
        self.numbers = 0

    def add(self, path: Path) -> None:
        """Lets a path run."""
        self.runnable.append(path)

    def wake(self, path: Path) -> None:
        """Lets a path that waits look again whether it can go on."""
        if self.waiting.pop(id(path), None) is not None:
            path.wait = None
            self.runnable.append(path)

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
        """Runs until every path has ended or waits, and nothing is under way."""
        draw = self.random.random
        while True:
            self.turn += 1
            while self.timed and self.timed[0][0] <= self.turn:
                heapq.heappop(self.timed)[2]()
            runnable = self.runnable
            if runnable:
                chosen = self._choose(draw)
                path = runnable[chosen]
                if not self.give_turn(path, 1 + int(draw() * _LONGEST_TURN)):
                    if path.wait is not None:
                        self.waiting[id(path)] = path
                    if runnable[chosen] is not path:
                        chosen = runnable.index(path)
                    runnable[chosen] = runnable[-1]
                    runnable.pop()
            elif self.latest or self.timed or self.last:
                self._complete_one()
            else:
                return

    def give_turn(self, path: Path, blocks: int) -> bool:
        """Runs a path for some basic blocks; returns whether it can go on."""
        return path.run(blocks)

    def _choose(self, draw: Callable[[], float]) -> int:
        """The path whose turn it is: often that of one warp, which gets ahead of the others."""
        runnable = self.runnable
        if draw() < _PREFERRED:
            for index, path in enumerate(runnable):
                if path.warp is self.ahead:
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
