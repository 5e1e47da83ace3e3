"""Times several contenders in turns: all meet the same state of the machine.

A burst is a pause, then some calls of one contender. On a CPU the pause sends the threads of the
library that ran before to sleep, which would take the cores from the next, and the first calls of a
burst are thrown away: they refill the caches and wake the contender's own threads. On a GPU the
pause lets the chip cool below its power limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .statistics import Timing, summarize

__all__ = ["Burst", "Protocol", "interleave"]

#: Makes so many calls; returns the seconds of each, or of their mean.
Burst = Callable[[int], Sequence[float]]

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Protocol:
    """How often and how long."""

    pause_s: float
    """Least sleep before each burst."""
    rest: float
    """Sleep before a burst, as a multiple of the burst, ..."""
    longest_pause_s: float
    """... up to this."""
    calls: int
    """Calls of a burst of fast calls."""
    discarded: int
    """Of these, the first that are thrown away."""
    burst_s: float
    """Slower contenders make fewer calls, at least 3 of which 1 is thrown away, to end in time."""
    rounds: int
    """Bursts of a fast contender."""
    fewest_rounds: int
    """Bursts of a slow one."""
    budget_s: float
    """Seconds for all bursts of one contender; ``fewest_rounds`` may take longer."""
    slow_s: float
    """A contender whose call takes so long is timed once."""

    @property
    def quick(self) -> Protocol:
        """The protocol of a rough look."""
        return replace(
            self,
            rounds=max(2, self.rounds // 6),
            fewest_rounds=2,
            budget_s=self.budget_s / 5,
        )


@dataclass
class _Entry:
    burst: Burst
    pause_s: float
    calls: int
    discarded: int
    rounds: int
    samples: list[float]


def interleave(
    contenders: Mapping[_Key, Burst],
    protocol: Protocol,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[_Key, Timing]:
    """Returns the timing of each contender's call.

    Every round gives each contender one burst, and a different one begins. Slow contenders sit out
    rounds, evenly spread.

    Args:
        contenders: What to call, by any key. Each has been called before: this measures no start.
        protocol: How often and how long.
        sleep: Waits for seconds, for tests.
    """
    entries = [_plan(burst, protocol, sleep) for burst in contenders.values()]
    rounds = max((entry.rounds for entry in entries), default=0)
    for number in range(rounds):
        first = number % len(entries)
        for entry in entries[first:] + entries[:first]:
            done, due = (count * entry.rounds // rounds for count in (number, number + 1))
            if due > done:
                sleep(entry.pause_s)
                entry.samples += entry.burst(entry.calls)[entry.discarded :]
    return {key: summarize(entry.samples) for key, entry in zip(contenders, entries, strict=True)}


def _plan(burst: Burst, protocol: Protocol, sleep: Callable[[float], None]) -> _Entry:
    """Times one call, and decides from it how many there will be."""
    sleep(protocol.pause_s)
    (estimate,) = burst(1)
    if estimate >= protocol.slow_s:
        return _Entry(burst, 0, 0, 0, 0, [estimate])
    calls = protocol.calls
    if estimate * calls > protocol.burst_s:
        calls = min(calls, max(3, int(protocol.burst_s / estimate)))
    discarded = protocol.discarded and max(1, calls * protocol.discarded // protocol.calls)
    busy = calls * estimate
    pause = max(protocol.pause_s, min(protocol.longest_pause_s, protocol.rest * busy))
    rounds = int(protocol.budget_s / (pause + busy))
    rounds = min(protocol.rounds, max(protocol.fewest_rounds, rounds))
    return _Entry(burst, pause, calls, discarded, rounds, [])
