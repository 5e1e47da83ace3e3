"""Times several contenders in one process, in turns: all meet the same state of the machine.

A burst is a pause, then some calls of one contender, of which the first are thrown away. The pause
sends the threads of the library that ran before to sleep: both MAX's and torch's spin for a while,
and would take the cores from the next. The calls that are thrown away refill the caches and wake
the contender's own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .statistics import Timing, summarize

__all__ = ["FULL", "QUICK", "Contender", "Protocol", "interleave"]

#: One call of a contender; what it returns is dropped after the call was timed.
Contender = Callable[[], object]

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Protocol:
    """How often and how long."""

    pause_s: float = 0.01
    """Sleep before each burst."""
    calls: int = 10
    """Calls of a burst of fast calls."""
    discarded: int = 3
    """Of these, the first that are thrown away."""
    burst_s: float = 0.1
    """Slower contenders make fewer calls, at least 3 of which 1 is thrown away, to end in time."""
    rounds: int = 30
    """Bursts of a fast contender."""
    fewest_rounds: int = 5
    """Bursts of a slow one."""
    budget_s: float = 1.0
    """Seconds for all bursts of one contender; ``fewest_rounds`` may take longer."""
    slow_s: float = 2.0
    """A contender whose call takes so long is timed once."""


FULL = Protocol()
QUICK = Protocol(rounds=5, fewest_rounds=2, budget_s=0.2)


@dataclass
class _Entry:
    call: Contender
    calls: int
    discarded: int
    rounds: int
    samples: list[float]


def interleave(
    contenders: Mapping[_Key, Contender],
    protocol: Protocol = FULL,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[_Key, Timing]:
    """Returns the timing of each contender's call.

    Every round gives each contender one burst, and a different one begins. Slow contenders sit out
    rounds, evenly spread.

    Args:
        contenders: What to call, by any key. Each has been called before: this measures no start.
        protocol: How often and how long.
        clock: Seconds, for tests.
        sleep: Waits for seconds, for tests.
    """
    entries = [_plan(call, protocol, clock, sleep) for call in contenders.values()]
    rounds = max((entry.rounds for entry in entries), default=0)
    for number in range(rounds):
        first = number % len(entries)
        for entry in entries[first:] + entries[:first]:
            done, due = (count * entry.rounds // rounds for count in (number, number + 1))
            if due > done:
                sleep(protocol.pause_s)
                _burst(entry, clock)
    return {key: summarize(entry.samples) for key, entry in zip(contenders, entries, strict=True)}


def _plan(
    call: Contender,
    protocol: Protocol,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> _Entry:
    """Times one call, and decides from it how many there will be."""
    sleep(protocol.pause_s)
    start = clock()
    call()
    estimate = clock() - start
    if estimate >= protocol.slow_s:
        return _Entry(call, 0, 0, 0, [estimate])
    calls = protocol.calls
    if estimate * calls > protocol.burst_s:
        calls = min(calls, max(3, int(protocol.burst_s / estimate)))
    discarded = max(1, calls * protocol.discarded // protocol.calls)
    rounds = int(protocol.budget_s / (protocol.pause_s + calls * estimate))
    rounds = min(protocol.rounds, max(protocol.fewest_rounds, rounds))
    return _Entry(call, calls, discarded, rounds, [])


def _burst(entry: _Entry, clock: Callable[[], float]) -> None:
    for number in range(entry.calls):
        start = clock()
        result = entry.call()
        elapsed = clock() - start
        # Freeing an output is no part of the call, in any library.
        del result
        if number >= entry.discarded:
            entry.samples.append(elapsed)
